"""What an export takes: time and memory for ten million transitions, by format.

The recording is made up, and written by the real writer: goroutines that wake each other, run, wait and make system calls,
on threads that come onto CPUs and leave them; a second of it is repeated.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from bench.measurement import BenchError, print_limit, print_table
from schedtrace import recording_frames
from schedtrace.events import SWITCH, TRANSITION, EventType, of_type
from schedtrace.recording import Writer
from tests.unit.recordings import HEADER, STARTED_NS, TARGET
from tests.unit.simulated import SYMBOLS, Simulation

TRANSITIONS = 10_000_000
STEPS = 20_000
GOROUTINES, THREADS = 5_000, 16
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
    with tempfile.TemporaryDirectory() as name:
        recording = Path(name) / "made-up.rec"
        count = write_recording(recording)
        print(f"Exporting {count:,} transitions, {recording.stat().st_size / _MB:,.0f} MB\n", flush=True)
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
