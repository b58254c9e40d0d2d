"""What the agent's programs on the scheduler's tracepoints cost a context switch, `python -m bench.switch_cost`.

Two processes on one CPU wake each other through pipes: each byte is one wake-up and one switch. They are not Go's;
where their goroutines are to be found there is memory in them that looks like a runtime's.
"""

import ctypes
import os
import struct
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from random import Random
from statistics import median
from time import process_time_ns

from bench.measurement import BenchError, Rounds, Spread, print_conditions, print_table
from schedtrace import abi
from schedtrace.compilation import Compilation
from schedtrace.session import Session
from tools import kernel_access

ROUNDS = 15
ROUND_TRIPS = 2_000
REPEATS = 15
NOTHING = "no programs"
OTHER = "a process that is not watched"
THREADS = "watched: run queue of its threads"
NO_GOROUTINE = "the same, and it is looked whether a goroutine runs: none"
GOROUTINE = "the same, one runs: also its time off the CPU"
WATCHED = (OTHER, THREADS, NO_GOROUTINE, GOROUTINE)
NAMES = (NOTHING, *WATCHED)

_M = {"alllink": 0, "procid": 8, "curg": 16, "no_curg": 24}
_G = {"m": 0, "atomicstatus": 8, "startpc": 16}


class _Memory:
    """A runtime's list of threads with one in it, and that one's goroutine, which runs."""

    def __init__(self) -> None:
        self._m, self._g = ctypes.create_string_buffer(32), ctypes.create_string_buffer(32)
        self._allm = ctypes.c_uint64(ctypes.addressof(self._m))

    def belong_to_this_thread(self) -> None:
        """To be called in the process that has the memory, and not before it is forked."""
        m, g = ctypes.addressof(self._m), ctypes.addressof(self._g)
        struct.pack_into("<QQQQ", self._m, 0, 0, threading.get_native_id(), g, 0)
        struct.pack_into("<QIIQ", self._g, 0, m, abi.GoroutineState.RUNNING, 0, 1)

    def record(self, name: str) -> abi.Process:
        """What a session is told of it."""
        if name == THREADS:
            return abi.Process()
        namespace = os.stat("/proc/self/ns/pid")  # noqa: PTH116
        return abi.Process(
            allm=ctypes.addressof(self._allm),
            pid_namespace=namespace.st_ino,
            pid_namespace_device=os.major(namespace.st_dev) << 20 | os.minor(namespace.st_dev),
            m_alllink=_M["alllink"],
            m_procid=_M["procid"],
            m_curg=_M["curg" if name == GOROUTINE else "no_curg"],
            g_m=_G["m"],
            g_atomicstatus=_G["atomicstatus"],
            g_startpc=_G["startpc"],
        )


class Pair:
    """The two processes."""

    def __init__(self, memory: _Memory) -> None:
        orders, self._orders = os.pipe()
        self._results, results = os.pipe()
        there, back = os.pipe(), os.pipe()
        cpu = min(os.sched_getaffinity(0))
        self.pids = [self._fork(lambda: _first(memory, cpu, orders, results, there[1], back[0]))]
        os.close(there[1])
        self.pids.append(self._fork(lambda: _second(memory, cpu, results, there[0], back[1])))
        for descriptor in (orders, results, there[0], *back):
            os.close(descriptor)

    def switch_ns(self) -> float:
        """CPU time of the two, in ns for each time that one of them is woken, runs and sleeps again."""
        os.write(self._orders, b"x")
        total = 0
        for _ in self.pids:
            answer = os.read(self._results, 8)
            if len(answer) < 8:
                raise BenchError("a process of the bench has ended")
            total += struct.unpack("<Q", answer)[0]
        return total / (2 * ROUND_TRIPS)

    def _fork(self, work: Callable[[], None]) -> int:
        pid = os.fork()
        if pid == 0:
            try:
                os.close(self._orders)  # or its end would never be seen
                work()
            finally:
                os._exit(0)
        return pid

    def close(self) -> None:
        """End them."""
        os.close(self._orders)
        for pid in self.pids:
            os.waitpid(pid, 0)
        os.close(self._results)


def _first(memory: _Memory, cpu: int, orders: int, results: int, there: int, back: int) -> None:
    _settle(memory, cpu)
    while os.read(orders, 1):
        start = process_time_ns()
        for _ in range(ROUND_TRIPS):
            os.write(there, b"x")
            os.read(back, 1)
        os.write(results, struct.pack("<Q", process_time_ns() - start))


def _second(memory: _Memory, cpu: int, results: int, there: int, back: int) -> None:
    _settle(memory, cpu)
    while True:
        start = process_time_ns()
        for _ in range(ROUND_TRIPS):
            if not os.read(there, 1):
                return
            os.write(back, b"x")
        os.write(results, struct.pack("<Q", process_time_ns() - start))


def _settle(memory: _Memory, cpu: int) -> None:
    memory.belong_to_this_thread()
    os.sched_setaffinity(0, {cpu})
    with suppress(PermissionError):  # so that nobody else comes between the two
        os.sched_setscheduler(0, os.SCHED_FIFO, os.sched_param(1))


@contextmanager
def _watched(session: Session, pair: Pair, memory: _Memory, name: str) -> Iterator[None]:
    if name == OTHER:
        yield
        return
    for pid in pair.pids:
        session.threads.watch(pid, memory.record(name))
    yield
    snapshots = session.threads.retire(pair.pids)
    for snapshot in snapshots.values():
        waits, off_cpu = snapshot.stats["run_queue"]["slots"].sum(), snapshot.stats["off_cpu"]["slots"].sum(axis=1)
        blocked = int(off_cpu[abi.OffCpu.BLOCKED])
        if waits < ROUND_TRIPS * 0.98 or not (blocked >= ROUND_TRIPS * 0.98 if name == GOROUTINE else blocked == 0):
            raise BenchError(f"{name}: {waits} waits and {blocked} times off the CPU in {ROUND_TRIPS} round trips")


def _measure(count: int) -> Rounds:
    memory, chance = _Memory(), Random(1)
    pair = Pair(memory)
    try:
        rounds: Rounds = []
        for _ in range(count):
            times: dict[str, list[float]] = {name: [] for name in NAMES}
            times[NOTHING] += (pair.switch_ns() for _ in range(REPEATS))
            with Session(Compilation(), ()) as session:
                for _ in range(REPEATS):
                    for name in chance.sample(WATCHED, len(WATCHED)):
                        with _watched(session, pair, memory, name):
                            times[name].append(pair.switch_ns())
            times[NOTHING] += (pair.switch_ns() for _ in range(REPEATS))
            rounds.append({name: median(values) for name, values in times.items()})
        return rounds
    finally:
        pair.close()


def more_ns(rounds: int) -> dict[str, Spread]:
    """What a switch of a watched thread costs more than without any programs, for :data:`NO_GOROUTINE` and
    :data:`GOROUTINE`, in so many rounds (of a second or two each)."""
    measured = _measure(rounds)
    return {name: Spread.of([one[name] - one[NOTHING] for one in measured]) for name in (NO_GOROUTINE, GOROUTINE)}


def main() -> None:
    """Measure, and print a table."""
    print("One context switch, with its wake-up: CPU time in ns, median (middle half)")
    print_conditions()
    rounds = _measure(ROUNDS)
    rows = []
    for name in NAMES:
        beside = {NOTHING: name != NOTHING, OTHER: name not in (NOTHING, OTHER)}
        more = [_more(rounds, name, other) if there else "" for other, there in beside.items()]
        rows.append((name, Spread.of([one[name] for one in rounds]).text(0), *more))
    print_table(("", "ns a switch", "more than without", "than not watched"), rows)


def _more(rounds: Rounds, name: str, than: str) -> str:
    """Compared within each round; those that are watched take turns with those that are not within one session."""
    return Spread.of([one[name] - one[than] for one in rounds]).text(0)


if __name__ == "__main__":
    if missing := kernel_access.missing():
        print(f"bench: {missing}", file=sys.stderr)
        sys.exit(77)
    main()
