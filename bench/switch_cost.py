"""What the agent's programs on the scheduler's tracepoints cost a context switch, `python -m bench.switch_cost`.

Two processes on one CPU wake each other through pipes: each byte is one wake-up and one switch. They are not Go's;
where their goroutines are to be found there is memory in them that looks like a runtime's.
"""

import ctypes
import os
import struct
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from random import Random
from time import process_time_ns

from bench.measurement import BenchError, Rounds, compare, print_conditions, print_table
from schedtrace import abi
from schedtrace.session import Compilation, Session
from tools import kernel_access

ROUNDS = 11
ROUND_TRIPS = 5_000
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
        self.pids = [_fork(lambda: _first(memory, cpu, orders, results, there[1], back[0]))]
        os.close(there[1])
        self.pids.append(_fork(lambda: _second(memory, cpu, results, there[0], back[1])))
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

    def close(self) -> None:
        """End them."""
        os.close(self._orders)
        for pid in self.pids:
            os.waitpid(pid, 0)
        os.close(self._results)


def _fork(work) -> int:  # type: ignore[no-untyped-def]
    pid = os.fork()
    if pid == 0:
        try:
            work()
        finally:
            os._exit(0)
    return pid


def _first(memory: _Memory, cpu: int, orders: int, results: int, there: int, back: int) -> None:
    memory.belong_to_this_thread()
    os.sched_setaffinity(0, {cpu})
    while os.read(orders, 1):
        start = process_time_ns()
        for _ in range(ROUND_TRIPS):
            os.write(there, b"x")
            os.read(back, 1)
        os.write(results, struct.pack("<Q", process_time_ns() - start))


def _second(memory: _Memory, cpu: int, results: int, there: int, back: int) -> None:
    memory.belong_to_this_thread()
    os.sched_setaffinity(0, {cpu})
    while True:
        start = process_time_ns()
        for _ in range(ROUND_TRIPS):
            if not os.read(there, 1):
                return
            os.write(back, b"x")
        os.write(results, struct.pack("<Q", process_time_ns() - start))


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


def _measure() -> Rounds:
    memory, chance = _Memory(), Random(1)
    pair = Pair(memory)
    try:
        rounds: Rounds = []
        for _ in range(ROUNDS):
            pair.switch_ns()  # caches, and the CPU's frequency
            one = {NOTHING: pair.switch_ns()}
            with Session(Compilation(), ()) as session:
                for name in chance.sample(WATCHED, len(WATCHED)):
                    with _watched(session, pair, memory, name):
                        one[name] = pair.switch_ns()
            one[NOTHING] = (one[NOTHING] + pair.switch_ns()) / 2
            rounds.append(one)
        return rounds
    finally:
        pair.close()


def main() -> None:
    """Measure, and print a table."""
    print("One context switch, with its wake-up: CPU time in ns, median (middle half)")
    print_conditions()
    rounds = _measure()
    rows = []
    for name in NAMES:
        more = compare(rounds, lambda one, name=name: one[name] - one[NOTHING]).text(0)  # type: ignore[misc]
        rows.append((name, compare(rounds, lambda one, name=name: one[name]).text(0), "" if name == NOTHING else more))  # type: ignore[misc]
    print_table(("", "ns a switch", "more than nothing"), rows)


if __name__ == "__main__":
    if missing := kernel_access.missing():
        print(f"bench: {missing}", file=sys.stderr)
        sys.exit(77)
    main()
