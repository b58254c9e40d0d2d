"""What recording costs: the target, beside counting in the kernel alone, and the recorder itself; and what it loses.

Two ping-pongs on a P each want both CPUs for themselves and do nothing but change states, so that the rate is the most
that the machine can make, and the recorder has to take its CPU time from them. All run with real-time priority, as if
the machine had nothing else to do.
"""

import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import Any

from bench.measurement import (
    BenchError,
    Rounds,
    Spread,
    alternate,
    compare,
    print_conditions,
    print_limit,
    print_table,
    process_cpu_ns,
)
from schedtrace.attach import Watched
from schedtrace.session import Compilation, Session, Sizes
from schedtrace.target import programs_of
from tests.workload import Workload, binary

ROUNDS = 5
ROUND_TRIPS = 200_000
TRANSITIONS = 6  # a round trip: two messages, each a park, a ready and a run
TARGETS = 2
LONG_SECONDS = 30.0
START_SECONDS = 60.0
NOTHING, COUNTING, RECORDING = "nothing", "counting in the kernel (attach)", "recording (record)"
WAITING = "recording when something happens (--when)"
NAMES = (NOTHING, COUNTING, RECORDING, WAITING)
NEVER = "latency>1000s"
SLOWDOWN_LIMIT = 1.5
CPU_LIMIT = 1.0


@contextmanager
def _targets(round_trips: int) -> Iterator[list[Workload]]:
    with ExitStack() as stack:
        program = binary("pingpong", "1.27")
        targets = [stack.enter_context(Workload(program, "-procs", 1, "-n", round_trips)) for _ in range(TARGETS)]
        for target in targets:
            _hurry(target.pid, 1)
        yield targets


def _hurry(pid: int, priority: int) -> None:
    """Give a process real-time priority: its threads, and those that they start."""
    for task in Path(f"/proc/{pid}/task").iterdir():
        os.sched_setscheduler(int(task.name), os.SCHED_RR, os.sched_param(priority))


@contextmanager
def _schedtrace(*arguments: object) -> Iterator[subprocess.Popen[str]]:
    command = [sys.executable, "-m", "schedtrace", *map(str, arguments)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            yield process
        finally:
            process.kill()


def _await_start(process: subprocess.Popen[str], file: Path) -> None:
    deadline = time.monotonic() + START_SECONDS
    while not file.exists() or not file.stat().st_size:
        if process.poll() is not None or time.monotonic() > deadline:
            raise BenchError("the recording does not begin")
        time.sleep(0.02)
    time.sleep(0.5)
    _hurry(process.pid, 2)


class _Targets:
    """Measures what a transition takes the targets: CPU time, and time."""

    def __init__(self) -> None:
        self.elapsed: Rounds = []

    def measure(self, name: str, targets: Sequence[Workload]) -> float:
        """Nanoseconds of CPU time a transition; the time it took goes to :attr:`elapsed`."""
        before = [process_cpu_ns(target.pid) for target in targets]
        start = time.monotonic_ns()
        for target in targets:
            target.go()
        for target in targets:
            target.done()
        count = len(targets) * ROUND_TRIPS * TRANSITIONS
        if not self.elapsed or len(self.elapsed[-1]) == len(NAMES):
            self.elapsed.append({})
        self.elapsed[-1][name] = (time.monotonic_ns() - start) / count
        used = sum(process_cpu_ns(target.pid) - cpu_ns for target, cpu_ns in zip(targets, before, strict=True))
        return used / count

    def with_nothing(self) -> float:
        with _targets(ROUND_TRIPS) as targets:
            return self.measure(NOTHING, targets)

    def counted(self) -> float:
        """One session for both, as when they are recorded, but nothing is sent."""
        with _targets(ROUND_TRIPS) as targets, ExitStack() as stack:
            watched = [stack.enter_context(Watched(target.pid)) for target in targets]
            sizes = Sizes(targets=len(targets) + 1)
            session = stack.enter_context(Session(Compilation(sizes), programs_of(watched[0].plan)))
            for one in watched:
                one.measure(session)
            for one in watched:
                one.attach(session)
            cpu_ns = self.measure(COUNTING, targets)
            _check(sum(sum(one.window().transitions.values()) for one in watched), 0)
            return cpu_ns

    def recorded(self, folder: Path, name: str, *options: str) -> float:
        file = folder / "round.rec"
        with (
            _targets(ROUND_TRIPS) as targets,
            _schedtrace("record", *(target.pid for target in targets), "-o", file, "--json", *options) as recorder,
        ):
            _await_start(recorder, file)
            cpu_ns = self.measure(name, targets)
            recorder.terminate()
            done = json.loads(recorder.communicate()[0])
        _check(sum(_transitions(target) for target in done["targets"]), done["lost_events"])
        file.unlink()
        return cpu_ns


def _transitions(window: dict[str, Any]) -> int:
    return sum(int(kind["count"]) for kind in window["transitions"])


def _check(transitions: int, lost: int) -> None:
    least = TARGETS * ROUND_TRIPS * TRANSITIONS
    if transitions < least or lost:
        raise BenchError(f"{transitions} transitions were seen, {lost} lost; there were {least}")


def _beside_counting(name: str, one: dict[str, float]) -> float:
    return one[name] / one[COUNTING]


def _slowdown(rounds: Rounds, name: str) -> Spread:
    return compare(rounds, lambda one: one[name] / one[NOTHING])


def cost_to_the_target() -> None:
    """In turns: without, counting alone, recording."""
    targets = _Targets()
    with tempfile.TemporaryDirectory(prefix="schedtrace-bench-") as name:
        folder = Path(name)
        cpu = alternate(
            {
                NOTHING: targets.with_nothing,
                COUNTING: targets.counted,
                RECORDING: lambda: targets.recorded(folder, RECORDING),
                WAITING: lambda: targets.recorded(folder, WAITING, "--when", NEVER),
            },
            ROUNDS,
        )
    for title, rounds in (("CPU time", cpu), ("time", targets.elapsed)):
        rows = [
            [name, f"{statistics.median(one[name] for one in rounds):.0f}", _slowdown(rounds, name).text()]
            for name in NAMES
        ]
        print_table([f"{title} of the targets", "ns a transition", "times without"], rows)
        for name in (RECORDING, WAITING):
            ratio = compare(rounds, partial(_beside_counting, name))
            print_limit(f"{name}: {title} beside counting alone", ratio.median, SLOWDOWN_LIMIT, unit=" x")
        print()


def a_long_one() -> None:
    """Half a minute at the rate that the machine can make."""
    with tempfile.TemporaryDirectory(prefix="schedtrace-bench-") as name:
        file = Path(name) / "long.rec"
        with (
            _targets(1 << 40) as targets,
            _schedtrace("record", *(target.pid for target in targets), "-o", file, "--json") as recorder,
        ):
            _await_start(recorder, file)
            for target in targets:
                target.go()
            start, cpu_ns = time.monotonic(), process_cpu_ns(recorder.pid)
            time.sleep(LONG_SECONDS)
            seconds, used_ns = time.monotonic() - start, process_cpu_ns(recorder.pid) - cpu_ns
            for target in targets:
                target.kill()
            done = json.loads(recorder.communicate(timeout=START_SECONDS)[0])
        size = file.stat().st_size
    transitions = sum(_transitions(target) for target in done["targets"])
    print(
        f"{transitions / seconds / 1e6:.2f} M transitions a second for {seconds:.0f} s: {done['events']:,} events, "
        f"{size / 1e9:.2f} GB, {done['lost_events']:,} lost"
    )
    print_limit("the recorder's CPU time", used_ns / 1e9 / seconds, CPU_LIMIT, unit=" CPUs")
    print_limit("events lost", done["lost_events"], 0)


def main() -> None:
    print("Recording two ping-pongs on two Ps (medians, in brackets the middle half of the rounds)")
    print_conditions()
    print()
    cost_to_the_target()
    a_long_one()


if __name__ == "__main__":
    main()
