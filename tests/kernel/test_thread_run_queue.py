"""Waits of threads for a CPU seen from outside against the kernel's own account, /proc/PID/task/*/schedstat.

schedstat's second number grows at the end of each wait (sched_info_arrive) and the third one counts them. Three
differences are known:

* The kernel takes both ends of a wait from the run queue's clock, which it does not advance for every event
  (rq_clock_skip_update): a thread that runs as soon as it is woken waits for 0 ns in schedstat, and for some
  microseconds between the two tracepoints.
* A thread that sleeps stays on its run queue for a while (delayed dequeue, Linux 6.12). If it is moved to another CPU
  meanwhile, schedstat takes its sleep from then on for a wait; sched_info_enqueue does not look whether it sleeps.
  That happens on busy machines, so that the time is measured again if the kernel has more.
* Events of which a BPF program is not told are counted as lost, one for each wait.
"""

import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from time import monotonic_ns

import numpy as np
import pytest

from schedtrace.attach import Watch
from schedtrace.histogram import Histogram
from schedtrace.proc_formats import SchedStat
from schedtrace.procfs import Process, open_process
from schedtrace.recording import Recording
from schedtrace.timeline import RUNNABLE, Timeline
from tests.recorded import recording
from tests.threads import Threads, watched_threads
from tests.workload import Workload, binary

AT_ONCE_NS = 15_000  # between the tracepoints of a wake-up and of the switch that follows, at most on average
TOLERANCE = 0.05
ATTEMPTS = 4


@dataclass(frozen=True)
class Look:
    """What was seen until some moment, and the kernel's account just before and just after it."""

    run_queue: Histogram
    unseen: int
    before: dict[int, SchedStat]
    after: dict[int, SchedStat]


@dataclass(frozen=True)
class Account:
    """Between two looks: what was seen, and the kernel's account at least and at most."""

    seen: Histogram
    unseen: int
    waits: tuple[int, int]
    wait_ns: tuple[int, int]


def _look(watch: Watch | Threads) -> Look:
    before = watch.process.schedstats()
    seen = watch.window() if isinstance(watch, Watch) else watch.counts()
    assert seen.run_queue
    return Look(seen.run_queue, seen.lost.get("thread_switch_unseen", 0), before, watch.process.schedstats())


def _look_at_rest(watch: Watch | Threads) -> Look:
    """A look while no thread of the target runs or wants to."""
    for _ in range(100):
        look = _look(watch)
        if look.before == look.after:
            return look
        time.sleep(0.05)
    raise TimeoutError("the target does not come to rest")


def _between(start: Look, end: Look) -> Account:
    def grown(of: Callable[[SchedStat], int]) -> tuple[int, int]:
        first, last = ([sum(map(of, stats.values())) for stats in (look.before, look.after)] for look in (start, end))
        return last[0] - first[1], last[1] - first[0]

    return Account(
        end.run_queue.since(start.run_queue),
        end.unseen - start.unseen,
        grown(lambda stat: stat.timeslices),
        grown(lambda stat: stat.wait_ns),
    )


def _assert_not_more_than_the_kernel(account: Account) -> None:
    assert account.seen.sum_ns <= 1.01 * account.wait_ns[1] + AT_ONCE_NS * account.waits[1]


def _assert_every_wait(account: Account) -> None:
    """Between looks at rest each wait is there or counted as lost; some of the events that would tell may be lost."""
    (waits, most_waits), missing = account.waits, account.waits[0] - account.seen.count
    assert waits == most_waits
    assert 0 <= missing - account.unseen <= 2 + waits // 500
    assert account.unseen <= 2 + waits // 100


def _shortfall(account: Account) -> float:
    """The share of the kernel's waiting time that was not seen."""
    return 1 - account.seen.sum_ns / account.wait_ns[0]


LEVELS: dict[str, Callable[[int], AbstractContextManager[Watch | Threads]]] = {
    "no probes": watched_threads,
    "default": Watch,
    "syscalls": lambda pid: Watch(pid, syscalls=True),
}


def _run(level: str, program: str, *arguments: object) -> Account:
    """All of the workload's work, from rest to rest; checked but for the kernel's time being more."""
    with Workload(binary(program), *arguments) as target, LEVELS[level](target.pid) as watch:
        start = _look_at_rest(watch)
        target.run()
        account = _between(start, _look_at_rest(watch))
    _assert_every_wait(account)
    _assert_not_more_than_the_kernel(account)
    return account


@pytest.mark.parametrize("level", ["no probes", "default"])
def test_more_threads_than_cpus(level: str) -> None:
    """Threads that are made in the window wait for most of it."""
    shortfalls = []
    for _ in range(ATTEMPTS):
        account = _run(level, "spinners", "-duration", "1500ms")
        assert account.wait_ns[0] > 2e9
        assert account.seen.sum_ns <= (1 + TOLERANCE) * account.wait_ns[1]
        shortfalls.append(_shortfall(account))
        if shortfalls[-1] <= TOLERANCE:
            return
    pytest.fail(f"the kernel counts more each time: {shortfalls}")


@pytest.mark.parametrize("level", ["no probes", "default"])
def test_while_threads_wait(level: str) -> None:
    """The window begins and ends while threads wait: neither side counts these waits before they end."""
    shortfalls = []
    with Workload(binary("spinners"), "-duration", "30s") as target:
        target.go()
        time.sleep(0.3)
        with LEVELS[level](target.pid) as watch:
            for _ in range(ATTEMPTS):
                start = _look(watch)
                time.sleep(1)
                account = _between(start, _look(watch))
                assert account.wait_ns[0] > 1.5e9
                assert account.seen.sum_ns <= (1 + TOLERANCE) * account.wait_ns[1]
                shortfalls.append(_shortfall(account))
    assert min(shortfalls) <= TOLERANCE, shortfalls


@dataclass(frozen=True)
class TimedLook:
    """The kernel's account, read between two moments."""

    before_ns: int
    stats: dict[int, SchedStat]
    after_ns: int


def _timed_look(process: Process) -> TimedLook:
    return TimedLook(monotonic_ns(), process.schedstats(), monotonic_ns())


def test_thread_by_thread(tmp_path: Path) -> None:
    """In a recording it can be told which thread waited."""
    with Workload(binary("spinners"), "-duration", "30s") as target:
        target.go()
        with recording([target.pid], tmp_path) as result, open_process(target.pid) as process:
            time.sleep(0.3)
            looks = [_timed_look(process)]
            for _ in range(ATTEMPTS):
                time.sleep(1)
                looks.append(_timed_look(process))
    with Recording.open(result.path) as file:
        spans = np.concatenate([block.kernel for block in Timeline(file).blocks()])
    waits = spans[spans["state"] == RUNNABLE]

    def seen_ns(tid: int, begin_ns: int, end_ns: int) -> int:
        ended = waits[(waits["tid"] == tid) & (waits["end_ns"] > begin_ns) & (waits["end_ns"] <= end_ns)]
        return int((ended["end_ns"] - ended["begin_ns"]).sum())

    worst = []
    for first, last in pairwise(looks):
        grown = {tid: last.stats[tid].wait_ns - stat.wait_ns for tid, stat in first.stats.items()}
        waited = {tid: wait_ns for tid, wait_ns in grown.items() if wait_ns > 0.1e9}
        assert len(waited) > 2
        too_many = [seen_ns(tid, first.after_ns, last.before_ns) / wait_ns - 1 for tid, wait_ns in waited.items()]
        too_few = [1 - seen_ns(tid, first.before_ns, last.after_ns) / wait_ns for tid, wait_ns in waited.items()]
        worst.append(max(too_many + too_few))
    assert min(worst) <= TOLERANCE, worst


@pytest.mark.parametrize("level", LEVELS)
def test_many_short_waits(level: str) -> None:
    """Threads that sleep, wake each other and make system calls, thousands of times."""
    shortfalls = []
    for _ in range(ATTEMPTS):
        account = _run(level, "mixed", "-duration", "1500ms", "-procs", 4, "-syscalls")
        assert account.seen.count > 1000
        shortfalls.append(_shortfall(account))
        if shortfalls[-1] <= TOLERANCE:
            return
    pytest.fail(f"the kernel counts more each time: {shortfalls}")
