"""Time that goroutines run for Go and their threads are off the CPU, without a probe, against an account made of single
events (tests/sched_events.py) of the same work.

Not every event reaches a BPF program (bpf/thread.h): what is missing is counted as lost.
"""

import ctypes
import shutil
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest

from schedtrace import abi
from schedtrace.join import ThreadCounts
from tests.sched_events import OffCpu, sched_events
from tests.threads import Threads, watched_threads
from tests.workload import Facts, Workload, binary
from tools import toolchains
from tools.cgroup import CpuLimit

TOLERANCE = 0.05
SHARE = 0.02
ATTEMPTS = 5
SHORT_NS = 20_000_000
"""Reasons with less time than this are not compared one by one."""

SMALL_LOSSES = {"interval_began_before_window", "thread_switch_unseen", "goroutine_of_thread_unknown"}

# Which goroutines work, and what goes on beside them.
LOADS: dict[str, tuple[str, ...]] = {
    "more Ps than CPUs": ("-procs", "6", "-compute", "8"),
    "busy neighbours": ("-compute", "3"),
    "collector": ("-procs", "4", "-allocate", "4", "-compute", "2"),
    "blocked in the kernel": ("-procs", "6", "-raw", "3", "-compute", "2"),
    "page faults": ("-procs", "4", "-fault", "2", "-compute", "2"),
}


@contextmanager
def _beside(load: str) -> Iterator[None]:
    with ExitStack() as stack:
        if load == "busy neighbours":
            neighbour = stack.enter_context(Workload(binary("spinners"), "-threads", 4, "-duration", "60s"))
            neighbour.go()
        yield


def _both(program: Path, version: str, load: str) -> tuple[ThreadCounts, OffCpu, Facts]:
    """The same work, as it is counted and as single events tell it."""
    with (
        _beside(load),
        Workload(program, *LOADS[load], "-duration", "1s") as target,
        sched_events(program, version) as events,
        watched_threads(target.pid) as threads,
    ):
        facts = target.run()
        threads.stop()
        events.stop()
        return threads.counts(), events.off_cpu(), facts


def _differences(counted: ThreadCounts, expected: OffCpu) -> dict[str, tuple[float, float]]:
    """Seconds counted and expected, where they are further apart than they may be: in all by a twentieth, of one reason
    by a fiftieth of all besides. With the collector at work a tenth more is counted as blocked than the account has,
    perhaps since it knows statuses alone, and not for which reasons a goroutine that waits in fact works.
    """
    assert counted.off_cpu is not None
    ns = {reason: histogram.sum_ns for reason, histogram in counted.off_cpu.items()}
    uncertain = {"preempted": expected.uncertain_ns, "all": expected.uncertain_ns}
    ns["all"], truth = sum(ns.values()), {**expected.ns, "all": sum(expected.ns.values())}
    beside = {reason: 0.0 if reason == "all" else SHARE * truth["all"] for reason in ns}
    return {
        reason: (seen / 1e9, least / 1e9)
        for reason, seen in ns.items()
        if (least := truth.get(reason, 0)) > SHORT_NS
        if not (1 - TOLERANCE) * least <= seen <= (1 + TOLERANCE) * (least + uncertain.get(reason, 0)) + beside[reason]
    }


def _assert_agree(program: Path, version: str, load: str) -> tuple[ThreadCounts, Facts]:
    found = []
    for _ in range(ATTEMPTS):  # the kernel may have kept events from one of the two
        counted, expected, facts = _both(program, version, load)
        found.append((_differences(counted, expected), expected.uncertain_ns / 1e9, dict(counted.lost)))
        # Where the account itself is uncertain of a tenth, nothing can be compared.
        if not found[-1][0] and sum(expected.ns.values()) > max(0.1e9, 10 * expected.uncertain_ns):
            assert set(counted.lost) <= SMALL_LOSSES
            assert counted.lost.get("goroutine_of_thread_unknown", 0) <= 20
            return counted, facts
    pytest.fail(f"seconds counted and expected, uncertain, lost: {found}")


@pytest.mark.parametrize("load", LOADS)
def test_kinds_of_load(load: str) -> None:
    counted, facts = _assert_agree(binary("offcpu"), "1.27", load)
    assert counted.off_cpu is not None
    functions = {each.function: each for each in counted.functions}
    working = {f"main.{word.removeprefix('-')}" for word in LOADS[load] if word.startswith("-")} - {"main.procs"}
    assert {name for name in functions if name.startswith("main.")} == working
    total_ns = sum(histogram.sum_ns for histogram in counted.off_cpu.values())
    assert sum(each.run_queue_ns + each.blocked_ns for each in functions.values()) == total_ns
    if load == "blocked in the kernel":
        sleeps = counted.off_cpu["blocked"]
        # Where the machine stands still at the wrong moment, a sleep is over before the thread leaves its CPU.
        seen = 0.99 * facts["raws"] - counted.lost.get("thread_switch_unseen", 0)
        assert sleeps.count >= seen > 0.95 * facts["raws"]
        assert functions["main.raw"].blocked_ns >= 2e6 * seen
    if load == "page faults":
        assert functions["main.fault"].times > 1000


def test_cpu_limit() -> None:
    """More goroutines that never wait than Ps: every P runs one all the time, on a CPU or off it. (Single events are no
    account of this: under a CPU limit tracefs lacks switches, and shows threads that leave the CPU twice in turn.) The
    limit may hold back the word that it is done, by a period of a tenth of a second: hence so long."""
    with (
        CpuLimit(cores=0.5) as limit,
        Workload(binary("offcpu"), "-procs", 4, "-compute", 6, "-duration", "4s", limit=limit) as target,
        watched_threads(target.pid) as threads,
    ):
        began_ns, cpu_before_ns = time.monotonic_ns(), threads.process.cpu_ns()
        target.run()
        on_ns = threads.process.cpu_ns() - cpu_before_ns
        all_ns = 4 * (time.monotonic_ns() - began_ns)
        threads.stop()
        counted = threads.counts()
    assert counted.off_cpu is not None
    total_ns = sum(histogram.sum_ns for histogram in counted.off_cpu.values())
    assert total_ns == pytest.approx(all_ns - on_ns, rel=TOLERANCE)
    assert counted.off_cpu["preempted"].sum_ns > 0.95 * total_ns
    assert {each.function for each in counted.functions if each.function.startswith("main.")} == {"main.compute"}
    assert sum(each.run_queue_ns + each.blocked_ns for each in counted.functions) == total_ns
    assert set(counted.lost) <= SMALL_LOSSES
    assert counted.lost.get("goroutine_of_thread_unknown", 0) <= 20


@pytest.mark.parametrize("strip", [False, True], ids=["symbols", "stripped"])
@pytest.mark.parametrize("version", [v for v in toolchains.RELEASES if v != "1.27"])
def test_versions(version: str, strip: bool) -> None:
    _assert_agree(binary("offcpu", version, strip=strip), version, "blocked in the kernel")


@pytest.mark.parametrize("form", [{"strip": True}, {"cgo": True}, {"buildmode": "pie"}], ids=["stripped", "cgo", "pie"])
def test_forms(form: dict[str, bool | str]) -> None:
    _assert_agree(binary("offcpu", "1.27", **form), "1.27", "more Ps than CPUs")


def test_in_a_pid_namespace() -> None:
    """There the runtime has other thread ids than the kernel."""
    arguments = ("-procs", 4, "-raw", 2, "-duration", "500ms")
    with Workload(binary("offcpu"), *arguments, namespaces=True) as target, watched_threads(target.pid) as threads:
        assert threads.process.container_pid != target.pid
        facts = target.run()
        threads.stop()
        counted = threads.counts()
    assert counted.off_cpu is not None
    assert 0.99 * facts["raws"] <= counted.off_cpu["blocked"].count + counted.lost.get("thread_switch_unseen", 0)
    assert counted.lost.get("goroutine_of_thread_unknown", 0) <= 20


def test_nothing_is_counted_of_what_comes_after() -> None:
    """The process executes another program, which has something else where its runtime's memory was."""
    with Workload(binary("successor"), shutil.which("yes") or "") as target, watched_threads(target.pid) as threads:
        target.go()
        deadline = time.monotonic() + 10
        while Path(f"/proc/{target.pid}/exe").readlink() == binary("successor"):
            assert time.monotonic() < deadline
            time.sleep(0.01)
        before = threads.counts()
        time.sleep(0.3)
        assert threads.counts() == before


def _spoiled(pid: int, change: Callable[[abi.Process, Threads], None]) -> ThreadCounts:
    """What is counted of the work where what is known of the process's memory is wrong."""
    with watched_threads(pid, change) as threads:
        time.sleep(0.5)
        return threads.counts()


def _unmapped(record: abi.Process, _threads: Threads) -> None:
    record.allm = 0x7F0000000008


def _other_data(record: abi.Process, threads: Threads) -> None:
    record.allm = threads.load_bias + threads.runtime.sched_vaddr


def _other_goroutine(record: abi.Process, threads: Threads) -> None:
    record.m_curg = threads.runtime.offsets["m.g0"]


def test_nothing_is_made_up_from_wrong_places() -> None:
    with Workload(binary("offcpu"), *LOADS["more Ps than CPUs"], "-duration", "60s") as target:
        target.go()
        for change, reason in (
            (_unmapped, "unreadable_memory"),
            (_other_data, None),
            (_other_goroutine, None),
        ):
            counted = _spoiled(target.pid, change)
            assert counted.off_cpu is not None
            assert [histogram.count for histogram in counted.off_cpu.values()] == [0, 0, 0], change
            assert counted.run_queue.count > 20
            assert reason is None or counted.lost[reason] > 10


def test_goroutines_that_are_not_known_are_not_none() -> None:
    """Without the runtime's list of threads only these are counted, and the output says so."""

    def forget(record: abi.Process, _threads: Threads) -> None:
        record.allm = 0

    with Workload(binary("offcpu"), *LOADS["more Ps than CPUs"], "-duration", "60s") as target:
        target.go()
        counted = _spoiled(target.pid, forget)
    assert counted.off_cpu is None
    assert counted.run_queue.count > 20


def test_another_process_gets_the_id() -> None:
    """Before anybody has told the session that the first one has ended."""
    last_pid = Path("/proc/sys/kernel/ns_last_pid")
    for _ in range(50):
        with Workload(binary("offcpu"), "-duration", "60s") as target, watched_threads(target.pid) as threads:
            target.kill()
            target.wait()
            before = threads.counts()
            last_pid.write_text(str(target.pid - 1))
            with Workload(binary("offcpu"), *LOADS["more Ps than CPUs"], "-duration", "60s") as other:
                if other.pid == target.pid:  # nobody was faster
                    other.go()
                    time.sleep(0.5)
                    assert threads.counts() == before
                    return
    pytest.fail("the kernel did not give out the id again")


def test_death_in_the_middle() -> None:
    arguments = (*LOADS["blocked in the kernel"], "-duration", "60s")
    with Workload(binary("offcpu"), *arguments) as target, watched_threads(target.pid) as threads:
        target.go()
        time.sleep(0.3)
        target.kill()
        target.wait()
        counted = threads.counts()
        assert counted.off_cpu is not None
        assert counted.off_cpu["blocked"].count > 50
        assert counted.off_cpu["blocked"].max_ns < 1e9
        left, _ = threads.session._maps.entries("threads", ctypes.c_uint32, abi.Thread, 1 << 14)
        assert not len(left)


@pytest.mark.parametrize("wanted", [False, True])
def test_goroutines_that_are_not_looked_for(wanted: bool) -> None:
    """As where that is too dear: threads are counted all the same, and it can be taken up again."""
    with (
        Workload(binary("offcpu"), "-raw", 2, "-procs", 3, "-duration", "300ms") as target,
        watched_threads(target.pid) as threads,
    ):
        threads.session.threads.look_for_goroutines(target.pid, wanted=False)
        if wanted:
            threads.session.threads.look_for_goroutines(target.pid, wanted=True)
        facts = target.run()
        threads.stop()
        counts = threads.counts()
    assert counts.run_queue.count >= facts["raws"] > 20
    assert counts.off_cpu
    blocked = counts.off_cpu["blocked"].count
    assert blocked >= 0.9 * facts["raws"] if wanted else blocked == 0
