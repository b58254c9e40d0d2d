"""How the cost grows: with hits a second, with goroutines, with processes.

Hits: two goroutines that wake each other at a rate, watched at the full level and not, by turns, each for half a
second. Goroutines: so many are woken by turns. Processes: as :mod:`bench.agent_scale` has them, at the passive level.
"""

import os
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import ExitStack, suppress
from pathlib import Path

from bench import agent_scale
from bench.agents import anonymous_mb
from bench.counted import Counted, counted
from bench.measurement import Spread, alternate, print_conditions, print_limit, print_table
from schedtrace.attach import Watch

HITS_PER_ROUND_TRIP = 6
HITS = (10_000, 30_000, 100_000, 300_000, 1_000_000, 0)
"""A second; 0: as many as there can be, on all CPUs."""
ROUNDS, SECONDS = 5, 0.5
GOROUTINES = (100, 1_000, 10_000, 100_000, 1_000_000)
GOROUTINE_SECONDS = 4.0
PROCESSES = (1, 10, 50, 100, 200)
SCRAPE_MS, IDLE_PERCENT = 100.0, 0.5
_EXPECTED_LOST = frozenset({"interval_began_before_window", "thread_switch_unseen"})


class _Rate:
    """A process at one rate."""

    def __init__(self, load: Counted) -> None:
        self._load = load
        self.hits_per_second: list[float] = []
        self.lost = 0
        """Transitions and threads that could not be counted, without what a window's start makes unknown."""
        self.hits_per_unit: list[float] = []

    def bare_us(self) -> float:
        """CPU time a round trip."""
        return self._unit_us()[0]

    def watched_us(self) -> float:
        """The same at the full level."""
        with Watch(self._load.pid) as watch:
            before, began = watch.window(), time.monotonic()
            unit_us, units = self._unit_us()
            seconds = time.monotonic() - began
            watch.stop()
            window = watch.window()
        hits = sum(probe.hits for probe in window.probes) - sum(probe.hits for probe in before.probes)
        self.hits_per_second.append(hits / seconds)
        self.hits_per_unit.append(hits / units)
        self.lost += sum(count for reason, count in window.lost.items() if reason not in _EXPECTED_LOST)
        return unit_us

    def _unit_us(self) -> tuple[float, int]:
        before = self._load.now()
        time.sleep(SECONDS)
        after = self._load.now()
        units = after.units - before.units
        return (after.cpu_ns - before.cpu_ns) / 1000 / units, units


def hits() -> None:
    """Measure and print what a hit costs and what is lost, by hits a second."""
    rows = []
    for wanted in HITS:
        with tempfile.TemporaryDirectory(prefix="schedtrace-bench-") as name:
            folder = Path(name)
            rate = str(wanted // HITS_PER_ROUND_TRIP)
            with counted(Counted.program(folder), folder / "count", "-rate", rate) as load:
                one = _Rate(load)
                variants: dict[str, Callable[[], float]] = {"bare": one.bare_us, "watched": one.watched_us}
                rounds = alternate(variants, ROUNDS)
        added_us = [each["watched"] - each["bare"] for each in rounds]
        hit_ns = [1000 * added / hits for added, hits in zip(added_us, one.hits_per_unit, strict=True)]
        rows.append(
            [
                f"{wanted:,}" if wanted else "all there can be",
                Spread.of([hits / 1000 for hits in one.hits_per_second]).text(0),
                Spread.of(hit_ns).text(0),
                Spread.of([100 * each["watched"] / each["bare"] - 100 for each in rounds]).text(0),
                str(one.lost),
            ]
        )
    print_table(["hits a second, wanted", "1,000 hits/s", "ns a hit", "% added", "lost"], rows)


def goroutines() -> None:
    """Measure and print memory, how long a report takes, and what is lost, by goroutines that take turns."""
    rows = []
    for count in (GOROUTINES[0], *GOROUTINES):  # the first time, modules are imported
        with ExitStack() as stack:
            folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="schedtrace-bench-")))
            program = Counted.program(folder)
            load = stack.enter_context(counted(program, folder / "count", "-goroutines", str(count)))
            before_mb = anonymous_mb(os.getpid())
            watch = stack.enter_context(Watch(load.pid))
            units = load.now().units
            time.sleep(GOROUTINE_SECONDS)
            units = load.now().units - units
            began, began_cpu_ns = time.monotonic(), time.process_time_ns()
            window = watch.window()
            report_ms = (time.monotonic() - began) * 1000
            cpu_ms = (time.process_time_ns() - began_cpu_ns) / 1e6
            memory_mb, maps_mb = anonymous_mb(os.getpid()) - before_mb, _maps_mb()
        lost = {reason: n for reason, n in window.lost.items() if n and reason not in _EXPECTED_LOST}
        rows.append(
            [
                f"{count:,}",
                f"{units / GOROUTINE_SECONDS / 1000:.0f}",
                f"{window.goroutines:,}",
                f"{report_ms:.0f}",
                f"{cpu_ms:.0f}",
                f"{memory_mb:.0f}",
                f"{maps_mb:.0f}",
                ", ".join(f"{reason} {n:,}" for reason, n in lost.items()) or "nothing",
            ]
        )
    print_table(
        ["goroutines", "1,000 turns/s", "seen", "report, ms", "CPU, ms", "MB", "maps, MB", "not counted"], rows[1:]
    )


def _maps_mb() -> float:
    """Memory of the BPF maps that this process holds, as the kernel tells it of their descriptors."""
    total = 0
    for file in Path("/proc/self/fdinfo").iterdir():
        with suppress(OSError):
            fields = dict(line.split(":", 1) for line in file.read_text().splitlines() if ":" in line)
            total += int(fields["memlock"]) if "map_type" in fields else 0
    return total / 1e6


def processes() -> None:
    """Measure and print the agent at the passive level, by processes."""
    measured = [agent_scale.measure(count, per_pod=1, level="passive") for count in PROCESSES]
    agent_scale.print_measured(measured)
    most = measured[-1]
    print_limit(f"{most.processes} processes: scrape", most.values[agent_scale.SCRAPE], SCRAPE_MS, unit=" ms")
    print_limit(
        f"{most.processes} processes: a scrape each 15 s", most.values[agent_scale.IDLE], IDLE_PERCENT, unit=" % CPU"
    )


PARTS: dict[str, Callable[[], None]] = {"hits": hits, "goroutines": goroutines, "processes": processes}


def main() -> None:
    print("How the cost grows (medians, in brackets the middle half of the rounds)")
    print_conditions()
    for name in sys.argv[1:] or PARTS:
        print()
        PARTS[name]()


if __name__ == "__main__":
    main()
