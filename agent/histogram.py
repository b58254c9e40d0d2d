"""Latency histograms: from the slots that BPF counts in to buckets and quantiles. Pure.

A histogram has 25 slots. Slot ``k`` < 24 counts values in ``(2**(k-1), 2**k]`` microseconds (slot 0: all up to
1 µs); slot 24 counts what is longer than 2**23 µs (8.39 s) and is shown only as +Inf. The sum is the true sum of the
values and the maximum the true maximum, both in nanoseconds: neither is estimated from the slots. The same is written
down for the kernel's side in ``bpf/types.h``.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from operator import add

SLOTS = 25
BOUNDS_SECONDS: tuple[float, ...] = tuple((1 << k) / 1e6 for k in range(SLOTS - 1)) + (math.inf,)
"""Upper bound of each slot, in seconds; a value equal to a bound lies in that bound's slot."""


@dataclass(frozen=True)
class Histogram:
    """Counts per slot (25 of them), with the true sum and maximum in nanoseconds."""

    slots: tuple[int, ...] = (0,) * SLOTS
    sum_ns: int = 0
    max_ns: int = 0

    def __post_init__(self) -> None:
        if len(self.slots) != SLOTS:
            raise ValueError(f"a histogram has {SLOTS} slots, not {len(self.slots)}")

    @property
    def count(self) -> int:
        """How many values were recorded."""
        return sum(self.slots)

    def __add__(self, other: Histogram) -> Histogram:
        if not any(other.slots):
            return self
        if not any(self.slots):
            return other
        slots = tuple(map(add, self.slots, other.slots))
        return Histogram(slots, self.sum_ns + other.sum_ns, max(self.max_ns, other.max_ns))

    def since(self, earlier: Histogram) -> Histogram:
        """What was recorded after ``earlier``, a snapshot of this same histogram.

        The maximum of the difference is known only if it grew; otherwise it is bounded by the highest slot in use, and
        the lower of that bound and the overall maximum is given.
        """
        slots = tuple(now - before for now, before in zip(self.slots, earlier.slots, strict=True))
        if min(slots) < 0:
            raise ValueError("the earlier snapshot holds more than the later one")
        used = [k for k, n in enumerate(slots) if n]
        if not used:
            return Histogram()
        maximum = self.max_ns
        if maximum <= earlier.max_ns and used[-1] < SLOTS - 1:
            maximum = min(maximum, 1000 << used[-1])
        return Histogram(slots, self.sum_ns - earlier.sum_ns, maximum)

    def buckets(self) -> list[tuple[float, int]]:
        """Cumulative counts as Prometheus wants them: (upper bound in seconds, values up to it), +Inf last."""
        cumulative, result = 0, []
        for bound, n in zip(BOUNDS_SECONDS, self.slots, strict=True):
            cumulative += n
            result.append((bound, cumulative))
        return result

    def quantile_seconds(self, q: float) -> float | None:
        """The q-quantile (0 < q <= 1) in seconds, or None of nothing.

        Linear within the slot that holds it, as Prometheus's histogram_quantile does, so it is exact to that slot's
        bounds (a factor of two), and never above the true maximum.
        """
        total = self.count
        if not total:
            return None
        rank, below = q * total, 0
        for k, n in enumerate(self.slots):
            if n and below + n >= rank:
                upper = min(BOUNDS_SECONDS[k], self.max_ns / 1e9)
                lower = BOUNDS_SECONDS[k - 1] if k else 0.0
                return lower + max(upper - lower, 0.0) * (rank - below) / n
            below += n
        return self.max_ns / 1e9


def total(histograms: Sequence[Histogram]) -> Histogram:
    """The sum of histograms; an empty one of none."""
    result = Histogram()
    for h in histograms:
        result = result + h
    return result


def add_histograms(a: Mapping[str, Histogram], b: Mapping[str, Histogram]) -> Mapping[str, Histogram]:
    """The sums by key; what is missing is empty."""
    if not a or not b:  # as at most times
        return a or b
    return {key: a.get(key, Histogram()) + b.get(key, Histogram()) for key in {**a, **b}}
