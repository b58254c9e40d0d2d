"""CPU time of a server under load, a unit of its work: with nothing attached, with schedtrace, with bpftrace."""

from collections import Counter
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path

from bench import bpftrace
from bench.measurement import Rounds, Spread, alternate, compare, print_table, process_cpu_ns
from schedtrace.attach import Watch

OFF, OURS, THREE = "nothing", "schedtrace", "bpftrace on gopark, ready, execute"


class ServerUnderLoad:
    """``work`` keeps the process ``pid``, which runs ``program``, busy for some seconds and returns how many units of
    work it did."""

    def __init__(self, program: Path, pid: int, work: Callable[[], int]) -> None:
        self._program, self._pid, self._work = program, pid, work
        self.hits = 0.0
        """Of schedtrace's probes, a unit of work."""
        self.lost: Counter[str] = Counter()
        """What schedtrace could not record, by reason."""

    def measure(self, rounds: int) -> Rounds:
        """Microseconds of CPU time a unit of work, by what is attached."""
        self._work()  # until heap and threads are what they will be
        return alternate({OFF: self._off, OURS: self._ours, THREE: self._three}, rounds)

    def _off(self) -> float:
        return self._attached(nullcontext())

    def _three(self) -> float:
        return self._attached(bpftrace.attached(self._program, bpftrace.THREE))

    def _attached(self, tracer: AbstractContextManager[None]) -> float:
        with tracer:
            return self._unit_us()[0]

    def _ours(self) -> float:
        with Watch(self._pid) as watch:
            unit_us, units = self._unit_us()
            watch.stop()
            window = watch.window()
        self.hits = sum(probe.hits for probe in window.probes) / units
        self.lost.update(window.lost)
        return unit_us

    def _unit_us(self) -> tuple[float, int]:
        before = process_cpu_ns(self._pid)
        units = self._work()
        return (process_cpu_ns(self._pid) - before) / 1000 / units, units


def total(rounds: Rounds, name: str) -> Spread:
    """Microseconds a unit of work."""
    return compare(rounds, lambda one: one[name])


def added_percent(rounds: Rounds, name: str) -> Spread:
    """What is added to the CPU time without anything attached."""
    return compare(rounds, lambda one: 100 * (one[name] / one[OFF] - 1))


def print_comparison(what: str, unit: str, rounds: Rounds, server: ServerUnderLoad) -> None:
    """The table, how often the probes were hit, and what was lost."""
    rows = [[name, total(rounds, name).text(), added_percent(rounds, name).text(0)] for name in (OFF, OURS, THREE)]
    print_table([f"{what}, attached:", f"µs a {unit}", "% added"], rows)
    lost = ", ".join(f"{reason} {count}" for reason, count in server.lost.items() if count)
    print(f"schedtrace had {server.hits:.1f} hits a {unit}; not recorded: {lost or 'nothing'}")
