"""How much a thing costs a busy process that is there in some intervals of time and in others not. Pure.

Each interval with it is compared with the time around it, when there was none: what its work cost more than it would
have cost there, and how much less of it was done. Nothing is compared over more than a few seconds, since machines are
not the same for longer. The interval of an average is 1.96 times its standard error, of the sum over all of them.
"""

import math
import statistics
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass

from bench.measurement import BenchError

FEWEST = 3


@dataclass(frozen=True)
class Sample:
    """The target at one moment: its CPU time and its units of work so far. ``level``: what there is now, "" if there is
    nothing."""

    time_ns: int
    cpu_ns: int
    units: int
    level: str


@dataclass(frozen=True)
class Cost:
    """Of one interval, in which there was something: its length, the CPU time in it, what of it is more than the same
    work cost around it; and the units of work that would have been done, and were not."""

    level: str
    time_ns: float
    cpu_ns: float
    extra_ns: float
    units: float
    missed: float


@dataclass(frozen=True)
class Average:
    """With the half of its 95 % interval."""

    value: float
    half: float

    def text(self) -> str:
        """ "0.79 ± 0.14" """
        return f"{self.value:.2f} ± {self.half:.2f}"


def costs(samples: Sequence[Sample], around_ns: int) -> list[Cost]:
    """Of each interval that begins and ends in the samples. It is compared with ``around_ns`` before and after it, or
    with less if there was something else in that time."""
    found = []
    start = 1
    while start < len(samples):
        level = samples[start].level
        if not level or samples[start - 1].level:
            start += 1
            continue
        end = start
        while end < len(samples) and samples[end].level:
            end += 1
        if end == len(samples):
            break
        before, after = samples[start - 1], samples[end]
        sides = [(_before(samples, start - 1, around_ns), before), (after, _after(samples, end, around_ns))]
        bare_ns, bare_cpu_ns, bare_units = (
            sum(getattr(last, name) - getattr(first, name) for first, last in sides)
            for name in ("time_ns", "cpu_ns", "units")
        )
        if bare_units:
            time_ns, cpu_ns = after.time_ns - before.time_ns, after.cpu_ns - before.cpu_ns
            units = after.units - before.units
            extra_ns, missed = cpu_ns - units * bare_cpu_ns / bare_units, time_ns * bare_units / bare_ns - units
            found.append(Cost(level, time_ns, cpu_ns, extra_ns, units, missed))
        start = end
    return found


def _before(samples: Sequence[Sample], last: int, around_ns: int) -> Sample:
    """The first of the samples before, and including, number ``last`` that are near enough and have nothing."""
    first = last
    earliest = bisect_left(samples, samples[last].time_ns - around_ns, key=lambda sample: sample.time_ns)
    while first > earliest and not samples[first - 1].level:
        first -= 1
    return samples[first]


def _after(samples: Sequence[Sample], first: int, around_ns: int) -> Sample:
    last = first
    latest = samples[first].time_ns + around_ns
    while last + 1 < len(samples) and not samples[last + 1].level and samples[last + 1].time_ns <= latest:
        last += 1
    return samples[last]


def added_percent(found: Sequence[Cost], bare_cpu_ns: float) -> Average:
    """All that was added, of ``bare_cpu_ns``: the CPU time to which it was added. Raises BenchError."""
    return _sum([100 * cost.extra_ns / bare_cpu_ns for cost in found])


def missed_percent(found: Sequence[Cost], units: float) -> Average:
    """All that was missed, of ``units``: those that would have been done. Raises BenchError."""
    return _sum([100 * cost.missed / units for cost in found])


def bare_ns(found: Sequence[Cost]) -> float:
    """CPU time that the work in those intervals would have taken without anything."""
    return sum(cost.cpu_ns - cost.extra_ns for cost in found)


def possible_units(found: Sequence[Cost]) -> float:
    """Units of work that there would have been in those intervals without anything."""
    return sum(cost.units + cost.missed for cost in found)


def _sum(values: Sequence[float]) -> Average:
    if len(values) < FEWEST:
        raise BenchError(f"{len(values)} intervals are too few to measure")
    return Average(sum(values), 1.96 * statistics.stdev(values) * math.sqrt(len(values)))
