"""Time that goroutines run for Go and their threads are off the CPU, without a probe, against an account made of single
events (tests/sched_events.py) of the same work.

Not every event reaches a BPF program (bpf/thread.h): what is missing is counted as lost.
"""

import os
import shutil
import signal
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest

from schedtrace.join import ThreadCounts
from tests.sched_events import OffCpu, sched_events
from tests.threads import watched_threads
from tests.workload import Facts, Workload, binary
from tools import toolchains
from tools.cgroup import CpuLimit

TOLERANCE = 0.05
ATTEMPTS = 3
SHORT_NS = 20_000_000
"""Reasons with less time than this are not compared one by one."""

# Which goroutines work, and what goes on beside them.
LOADS: dict[str, tuple[str, ...]] = {
    "more Ps than CPUs": ("-procs", "6", "-compute", "8"),
    "busy neighbours": ("-compute", "3"),
    "CPU limit": ("-procs", "4", "-compute", "6"),
    "collector": ("-procs", "4", "-allocate", "4", "-compute", "2"),
    "blocked in the kernel": ("-procs", "6", "-raw", "3", "-compute", "2"),
    "page faults": ("-procs", "4", "-fault", "2", "-compute", "2"),
}


@contextmanager
def _beside(load: str) -> Iterator[CpuLimit | None]:
    with ExitStack() as stack:
        if load == "busy neighbours":
            neighbour = stack.enter_context(Workload(binary("spinners"), "-threads", 4, "-duration", "60s"))
            neighbour.go()
        yield stack.enter_context(CpuLimit(cores=0.5)) if load == "CPU limit" else None


def _both(program: Path, version: str, load: str) -> tuple[ThreadCounts, OffCpu, Facts]:
    """The same work, as it is counted and as single events tell it."""
    with _beside(load) as limit, sched_events(program, version) as events:
        with Workload(program, *LOADS[load], "-duration", "1s", limit=limit) as target:
            with watched_threads(target.pid) as threads:
                facts = target.run()
                threads.stop()
                events.stop()
                counted = threads.counts()
        return counted, events.off_cpu(), facts


def _differences(counted: ThreadCounts, expected: OffCpu) -> dict[str, tuple[float, float]]:
    """Seconds counted and expected, where they are further apart than they may be."""
    assert counted.off_cpu is not None
    ns = {reason: histogram.sum_ns for reason, histogram in counted.off_cpu.items()}
    pairs = {reason: (ns[reason], expected.ns[reason]) for reason in ns if expected.ns[reason] > SHORT_NS}
    pairs["all"] = (sum(ns.values()), sum(expected.ns.values()))
    return {
        reason: (seen / 1e9, truth / 1e9)
        for reason, (seen, truth) in pairs.items()
        if abs(seen - truth) > TOLERANCE * truth
    }


def _assert_agree(program: Path, version: str, load: str) -> tuple[ThreadCounts, Facts]:
    found = []
    for _ in range(ATTEMPTS):  # the kernel may have kept events from one of the two
        counted, expected, facts = _both(program, version, load)
        assert sum(expected.ns.values()) > 0.1e9
        found.append((_differences(counted, expected), dict(counted.lost)))
        if not found[-1][0]:
            assert set(counted.lost) <= {
                *("interval_began_before_window", "thread_switch_unseen", "goroutine_of_thread_unknown"),
            }
            assert counted.lost.get("goroutine_of_thread_unknown", 0) <= 20
            return counted, facts
    pytest.fail(f"seconds counted and expected: {found}")


@pytest.mark.parametrize("load", LOADS)
def test_kinds_of_load(load: str) -> None:
    counted, facts = _assert_agree(binary("offcpu"), "1.27", load)
    assert counted.off_cpu is not None
    times = {function.function: function.times for function in counted.functions}
    blocked = {function.function: function.blocked_ns for function in counted.functions}
    assert {name for name in times if name.startswith("main.")} <= {f"main.main.func{n}" for n in range(1, 8)}
    if load == "blocked in the kernel":
        sleeps = counted.off_cpu["blocked"]
        assert facts["raws"] <= sleeps.count <= 1.02 * facts["raws"] + 50
        assert sleeps.sum_ns >= 2e6 * facts["raws"]
        assert max(blocked.values()) >= 2e6 * facts["raws"]


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
    assert facts["raws"] <= counted.off_cpu["blocked"].count + counted.lost.get("thread_switch_unseen", 0)
    assert counted.lost.get("goroutine_of_thread_unknown", 0) <= 20


def test_nothing_is_counted_of_what_comes_after() -> None:
    """The process executes another program, which has something else where its runtime's memory was."""
    with Workload(binary("successor"), shutil.which("yes") or "") as target, watched_threads(target.pid) as threads:
        target.go()
        deadline = time.monotonic() + 10
        while os.readlink(f"/proc/{target.pid}/exe") == str(binary("successor")):
            assert time.monotonic() < deadline
            time.sleep(0.01)
        before = threads.counts()
        time.sleep(0.3)
        assert threads.counts() == before


def test_death_in_the_middle() -> None:
    with Workload(binary("offcpu"), *LOADS["blocked in the kernel"], "-duration", "60s") as target:
        with watched_threads(target.pid) as threads:
            target.go()
            time.sleep(0.3)
            os.kill(target.pid, signal.SIGKILL)
            target.wait()
            time.sleep(0.1)
            counted = threads.counts()
            assert counted.off_cpu is not None
            assert counted.off_cpu["blocked"].count > 50
            assert counted.off_cpu["blocked"].max_ns < 1e9
            assert not len(threads.session._maps.entries("threads", *THREAD, 1 << 14)[0])
