"""CPU time of a server under load, a unit of its work: with nothing attached, with schedtrace, with bpftrace.

And with an empty program where schedtrace's probes are: the part that is the kernel's.
"""

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path

from bench import bpftrace
from bench.hit_parts import Parts
from bench.measurement import Rounds, Spread, alternate, compare, print_table, process_cpu_ns
from schedtrace.attach import Watch
from schedtrace.plan import make_plan

OFF, OURS = "nothing", "schedtrace"
EMPTY, THREE = "an empty program where schedtrace's are", "bpftrace on gopark, ready, execute"
NAMES = (OFF, OURS, EMPTY, THREE)


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
        ways: dict[str, Callable[[], AbstractContextManager[None]]] = {
            OFF: nullcontext,
            EMPTY: lambda: _empty_programs(parts, self._program),
            THREE: lambda: bpftrace.attached(self._program, bpftrace.THREE),
        }

        def measured(way: Callable[[], AbstractContextManager[None]]) -> Callable[[], float]:
            return lambda: self._attached(way())

        with Parts() as parts:
            return alternate({OURS: self._ours, **{name: measured(way) for name, way in ways.items()}}, rounds)

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


@contextmanager
def _empty_programs(parts: Parts, program: Path) -> Iterator[None]:
    offsets = [probe.file_offset for probe in make_plan(str(program)).probes]
    with program.open("rb") as file:
        parts.attach("empty", file.fileno(), offsets)
    try:
        yield
    finally:
        parts.detach()


def total(rounds: Rounds, name: str) -> Spread:
    """Microseconds a unit of work."""
    return compare(rounds, lambda one: one[name])


def added_percent(rounds: Rounds, name: str) -> Spread:
    """What is added to the CPU time without anything attached."""
    return compare(rounds, lambda one: 100 * (one[name] / one[OFF] - 1))


def print_comparison(what: str, unit: str, rounds: Rounds, server: ServerUnderLoad) -> None:
    """The table, how often the probes were hit, and what was lost."""
    rows = [[name, total(rounds, name).text(), added_percent(rounds, name).text(0)] for name in NAMES]
    print_table([f"{what}, attached:", f"µs a {unit}", "% added"], rows)
    lost = ", ".join(f"{reason} {count}" for reason, count in server.lost.items() if count)
    print(f"schedtrace had {server.hits:.1f} hits a {unit}; not recorded: {lost or 'nothing'}")
