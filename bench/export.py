"""What an export takes: time and memory for ten million transitions, by format.

The recording is made up, and written by the real writer: goroutines that wake each other, run, wait and make system
calls, on threads that come onto CPUs and leave them; a piece of it is repeated. Another one has a million goroutines,
since memory grows with them.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from bench.measurement import BenchError, print_limit, print_table
from schedtrace import recording_frames
from schedtrace.events import EVENT, GOROUTINE, SWITCH, TRANSITION, EventType, Flag, of_type
from schedtrace.recording import Writer
from tests.unit.recordings import DEAD, HEADER, RUNNABLE, RUNNING, START_PC, STARTED_NS, TARGET, WAITING
from tests.unit.simulated import FIRST_TID, SYMBOLS, Simulation

TRANSITIONS = 10_000_000
STEPS = 20_000
GOROUTINES, THREADS = 5_000, 16
GOROUTINES_OF_MANY, _SOME = 1_000_000, 25_000
FORMATS = ("perfetto", "chrome", "csv", "html")
MEMORY_LIMIT_MB = 500.0
_MB = 1e6


@dataclass(frozen=True)
class Cost:
    """Of one export."""

    seconds: float
    cpu_seconds: float
    peak_mb: float
    output_mb: float


def write_recording(path: Path) -> int:
    """Write it; how many transitions it has."""
    simulation = Simulation(STEPS, goroutines=GOROUTINES, threads=THREADS)
    events = simulation.all_events()
    count = len(of_type(events, EventType.TRANSITION))
    rounds = -(-TRANSITIONS // count)
    target = replace(TARGET, target=replace(TARGET.target, name="made-up"))
    with path.open("wb", buffering=0) as file:
        writer = Writer(file, HEADER)
        writer.frame(target)
        for shifted in _repeated(events, rounds, simulation.now_ns):
            writer.events(shifted)
        writer.symbols(1, SYMBOLS)
        writer.frame(recording_frames.Footer(STARTED_NS + rounds * simulation.now_ns, "made up", 0, 0, 0))
    return count * rounds


def _repeated(events: Any, rounds: int, length_ns: int) -> Iterator[Any]:
    """All events again and again, later each time. That a goroutine is seen first is said once."""
    again = events[~((events["type"] == EventType.GOROUTINE) & (events["flags"] != 0))]
    for i in range(rounds):
        shifted = (again if i else events).copy()
        shifted["time_ns"] += i * length_ns
        for record, types in ((TRANSITION, (EventType.TRANSITION,)), (SWITCH, (EventType.THREAD_ON,))):
            which = np.isin(shifted["type"], types)
            some = shifted[which].view(record)
            some["since_ns"] += i * length_ns
            shifted[which] = some.view(events.dtype)
        yield shifted


def write_many_goroutines(path: Path) -> int:
    """Write a recording of a million goroutines, which are made, run, and wait; how many transitions it has."""
    with path.open("wb", buffering=0) as file:
        writer = Writer(file, HEADER)
        writer.frame(TARGET)
        for first in range(0, GOROUTINES_OF_MANY, _SOME):
            writer.events(_births(np.arange(first, first + _SOME)))
        writer.symbols(1, {START_PC: "main.worker"})
        writer.frame(recording_frames.Footer(STARTED_NS + GOROUTINES_OF_MANY * 4_000, "made up", 0, 0, 0))
    return 3 * GOROUTINES_OF_MANY


def _births(numbers: Any) -> Any:
    """Who it is, and its transitions at 0, 1 and 3 µs of its 4 µs."""
    events = np.zeros((len(numbers), 4), TRANSITION)
    names = np.zeros(len(numbers), GOROUTINE)
    for record in (events, names):
        record["slot"], record["tid"] = 1, FIRST_TID
    address, time_ns = 0xC000000000 + numbers * 0x400, STARTED_NS + numbers * 4_000
    names["type"], names["flags"], names["g"], names["start_pc"] = EventType.GOROUTINE, Flag.FIRST, address, START_PC
    names["goid"], names["time_ns"] = numbers + 1, time_ns
    events["type"], events["g"] = EventType.TRANSITION, address[:, None]
    events["time_ns"] = time_ns[:, None] + np.array([0, 0, 1_000, 3_000])
    events["since_ns"] = time_ns[:, None] + np.array([0, 0, 0, 1_000])
    events["old"] = events["left"] = np.array([DEAD, DEAD, RUNNABLE, RUNNING])
    events["new"] = np.array([RUNNABLE, RUNNABLE, RUNNING, WAITING])
    as_events = events.view(EVENT)
    as_events[:, 0] = names.view(EVENT)
    return as_events.reshape(-1)


def export(recording: Path, form: str, folder: Path) -> Cost:
    """Export it in a process of its own."""
    output = folder / f"out.{form}"
    start = time.monotonic()
    command = [sys.executable, "-m", "schedtrace", "export", str(recording), "--format", form, "-o", str(output)]
    process = subprocess.Popen(command)
    _, status, usage = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode:
        raise BenchError(f"export to {form} ends with {process.returncode}")
    size = output.stat().st_size
    output.unlink()
    cpu = usage.ru_utime + usage.ru_stime
    return Cost(time.monotonic() - start, cpu, usage.ru_maxrss * 1024 / _MB, size / _MB)


def main() -> None:
    """Measure, and print."""
    _measure(write_recording, "Exporting {count:,} transitions, {mb:,.0f} MB")
    print(flush=True)
    _measure(write_many_goroutines, "Exporting {count:,} transitions of a million goroutines, {mb:,.0f} MB")


def _measure(write: Callable[[Path], int], title: str) -> None:
    with tempfile.TemporaryDirectory() as name:
        recording = Path(name) / "made-up.rec"
        count = write(recording)
        print(title.format(count=count, mb=recording.stat().st_size / _MB), "\n", flush=True)
        costs = {form: export(recording, form, Path(name)) for form in FORMATS}
    print_table(
        ("format", "seconds", "of CPU", "peak MB", "output MB"),
        [
            (form, f"{cost.seconds:.0f}", f"{cost.cpu_seconds:.0f}", f"{cost.peak_mb:.0f}", f"{cost.output_mb:,.0f}")
            for form, cost in costs.items()
        ],
    )
    print_limit("memory of the dearest", max(cost.peak_mb for cost in costs.values()), MEMORY_LIMIT_MB, unit=" MB")


if __name__ == "__main__":
    main()
