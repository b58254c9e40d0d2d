"""How the benches measure: variants in turn within one run, CPU time, medians with their spread.

On shared machines a time differs by half from one minute to the next, and by less from one second to the
next. So variants take turns, in another order each round, and are compared within the round.
"""

import os
import random
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

_T = TypeVar("_T")
_CPUCLOCK_SCHED = 2  # what the scheduler accounts, in nanoseconds: include/linux/posix-timers.h


class BenchError(Exception):
    """What was measured is not what should have been; the message says why."""


@dataclass(frozen=True)
class Spread:
    """Median of several values, and what the middle half of them lies between."""

    median: float
    low: float
    high: float

    @classmethod
    def of(cls, values: Sequence[float]) -> "Spread":
        """Of at least two values."""
        low, median, high = statistics.quantiles(values, n=4, method="inclusive")
        return cls(median, low, high)

    def text(self, digits: int = 2) -> str:
        """ "1.20 (1.15-1.31)" """
        return f"{self.median:.{digits}f} ({self.low:.{digits}f}-{self.high:.{digits}f})"


Rounds = list[dict[str, float]]
"""One dict a round: variant -> what was measured."""


def alternate(variants: Mapping[str, Callable[[], _T]], rounds: int) -> list[dict[str, _T]]:
    """Measure each variant once a round, in random order (the same order every time the bench is run)."""
    order = random.Random(1)
    measured = []
    for _ in range(rounds):
        names = order.sample(list(variants), len(variants))
        this_round = {name: variants[name]() for name in names}
        measured.append({name: this_round[name] for name in variants})
    return measured


def compare(rounds: Sequence[dict[str, _T]], value: Callable[[dict[str, _T]], float]) -> Spread:
    """Spread over the rounds of what is calculated within a round."""
    return Spread.of([value(one) for one in rounds])


def process_cpu_ns(pid: int) -> int:
    """CPU time of all threads of a process that there have been, as the scheduler accounts it.

    The kernel's clock id of another process: MAKE_PROCESS_CPUCLOCK in include/linux/posix-timers.h. Raises
    OSError if there is no such process.
    """
    return time.clock_gettime_ns((~pid << 3) | _CPUCLOCK_SCHED)


def print_table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """First column to the left, the others to the right."""
    widths = [max(len(row[i]) for row in (header, *rows)) for i in range(len(header))]
    for row in (header, *rows):
        others = (cell.rjust(width) for cell, width in zip(row[1:], widths[1:], strict=True))
        print("  ".join([row[0].ljust(widths[0]), *others]))


def print_limit(what: str, measured: float, limit: float, *, at_least: bool = False, unit: str = "") -> None:
    """One line: is a limit that the project sets itself kept?"""
    kept = measured >= limit if at_least else measured <= limit
    sign = "at least" if at_least else "at most"
    print(f"{'kept' if kept else 'NOT KEPT'}: {what} {measured:.2f}{unit}, {sign} {limit:.2f}{unit}")


def print_conditions() -> None:
    """What the machine is and how busy others keep it, since figures are nothing without."""
    one_minute, _, _ = os.getloadavg()
    today = time.strftime("%Y-%m-%d")
    print(f"{today}, {os.cpu_count()} CPUs, Linux {os.uname().release}, load average {one_minute:.1f}")
