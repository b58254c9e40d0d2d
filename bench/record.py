"""What recording costs: the target, beside counting in the kernel alone, and the recorder itself; and what it loses.

Two ping-pongs on a P each want both CPUs for themselves and do nothing but change states, so that the rate is the most
that the machine can make, and the recorder has to take its CPU time from them.
"""

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path

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
from tests.workload import Workload, binary

ROUNDS = 7
ROUND_TRIPS = 300_000
TRANSITIONS = 6  # a round trip: two messages, each a park, a ready and a run
TARGETS = 2
LONG_SECONDS = 30.0
START_SECONDS = 60.0
NOTHING, COUNTING, RECORDING = "nothing", "counting in the kernel (attach)", "recording (record)"
NAMES = (NOTHING, COUNTING, RECORDING)
SLOWDOWN_LIMIT = 1.5
CPU_LIMIT = 1.0


@contextmanager
def _targets(round_trips: int) -> Iterator[list[Workload]]:
    with ExitStack() as stack:
        program = binary("pingpong", "1.27")
        yield [stack.enter_context(Workload(program, "-procs", 1, "-n", round_trips)) for _ in range(TARGETS)]


@contextmanager
def _schedtrace(*arguments: object) -> Iterator[subprocess.Popen[str]]:
    command = [sys.executable, "-m", "schedtrace", *map(str, arguments)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            yield process
        finally:
            process.terminate()
            process.communicate()


def _await_start(process: subprocess.Popen[str], file: Path) -> None:
    deadline = time.monotonic() + START_SECONDS
    while not file.exists() or not file.stat().st_size:
        if process.poll() is not None or time.monotonic() > deadline:
            raise BenchError("the recording does not begin")
        time.sleep(0.02)
    time.sleep(0.5)


def _cpu_ns_a_transition(targets: Sequence[Workload]) -> float:
    """Of the targets' own CPU time."""
    before = [process_cpu_ns(target.pid) for target in targets]
    for target in targets:
        target.go()
    for target in targets:
        target.done()
    used = sum(process_cpu_ns(target.pid) - start for target, start in zip(targets, before, strict=True))
    return used / (len(targets) * ROUND_TRIPS * TRANSITIONS)


def _bare() -> float:
    with _targets(ROUND_TRIPS) as targets:
        return _cpu_ns_a_transition(targets)


def _counting() -> float:
    from schedtrace.record import Options, RecordingSession
    from schedtrace.session import Compilation, Sizes

    # As for a recording, with one session for both, but nothing is sent.
    raise NotImplementedError(Options, RecordingSession, Compilation, Sizes)


def _recording(folder: Path) -> float:
    file = folder / "round.rec"
    with _targets(ROUND_TRIPS) as targets, _schedtrace("record", *(t.pid for t in targets), "-o", file) as recorder:
        _await_start(recorder, file)
        return _cpu_ns_a_transition(targets)
