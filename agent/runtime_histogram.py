"""The Go runtime's own latency histogram (timeHistogram in runtime/histogram.go): its buckets, and ours from it. Pure.

======  ========================================================================================================
Go      buckets
======  ========================================================================================================
≤ 1.19  720: sixteen of 1 ns, then sixteen in each factor of two; the last of them takes whatever is longer
≥ 1.20  160: four of 64 ns up to 256 ns, then four in each factor of two up to 2**47 ns (39 h); what is longer is
        counted apart
======  ========================================================================================================

Times below 0, of a clock that went back, are counted apart. A bucket holds lower <= time < upper.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache, cached_property
from itertools import pairwise
from operator import ge

from schedtrace.histogram import SLOTS, Histogram

_OLD_BUCKETS, _NEW_BUCKETS = 720, 160


@cache
def bounds_ns(buckets: int) -> tuple[int, ...]:
    """The ``buckets`` + 1 bounds in ns of a histogram of 720 (Go up to 1.19) or 160 buckets; the last one of the older
    form is only nominal."""
    if buckets == _OLD_BUCKETS:
        return (*range(16), *((16 + j) << i for i in range(44) for j in range(16)), 1 << 48)
    if buckets == _NEW_BUCKETS:
        return (*(64 * j for j in range(4)), *((4 + j) << i for i in range(6, 45) for j in range(4)), 1 << 47)
    raise ValueError(f"no runtime histogram has {buckets} buckets")


@dataclass(frozen=True)
class RuntimeHistogram:
    """Counts as the runtime keeps them. ``counts[i]`` is of bucket i; ``underflow`` of times below 0; ``overflow`` of
    times above the last bound, always 0 up to Go 1.19."""

    counts: tuple[int, ...]
    underflow: int
    overflow: int

    @property
    def bounds_ns(self) -> tuple[int, ...]:
        """One more than there are buckets."""
        return bounds_ns(len(self.counts))

    @property
    def count(self) -> int:
        return sum(self.counts) + self.underflow + self.overflow

    def grown_from(self, earlier: RuntimeHistogram) -> bool:
        """Whether no count is lower than in ``earlier``."""
        return self is earlier or (
            len(self.counts) == len(earlier.counts)
            and all(map(ge, self.counts, earlier.counts))
            and self.underflow >= earlier.underflow
            and self.overflow >= earlier.overflow
        )

    @cached_property
    def histogram(self) -> Histogram:
        """The same in the project's buckets. Counts are moved, none is multiplied; two things are inexact.

        A bucket of the runtime's that spans one of our bounds goes whole to the slot above that bound. So no time is
        shown as shorter than it was, and of the times at most 2**k µs, those are counted one slot too high that are
        0.896 × 2**k µs or longer (from Go 1.20; 0.992 × 2**k µs before). In other words, ``le="2**k µs"`` says exactly
        how many times were shorter than 0.896 (0.992) of that bound.

        The sum is an estimate: every time counts as the middle of its bucket, so that it is off by at most an eighth
        (from Go 1.20; a thirty-second before) for times of 256 ns and longer. Times in the lowest bucket count as 0: up
        to Go 1.25 these are mostly system calls, which the runtime samples as waits of no length. The maximum is the
        upper bound of the highest bucket in use; times beyond the last bound count as that.
        """
        slots = [0] * SLOTS
        doubled_sum = highest = 0
        slots[0] = self.underflow + self.counts[0]
        for n, (lower, upper) in zip(self.counts[1:], pairwise(self.bounds_ns[1:]), strict=True):
            if n:
                slots[_slot(upper)] += n
                doubled_sum += n * (lower + upper)
                highest = upper
        if self.counts[0] and not highest:
            highest = self.bounds_ns[1]
        if self.overflow:
            highest = self.bounds_ns[-1]
            slots[-1] += self.overflow
            doubled_sum += 2 * self.overflow * highest
        return Histogram(tuple(slots), doubled_sum // 2, highest)


def _slot(upper_ns: int) -> int:
    """The slot of the project's histogram that holds values up to ``upper_ns``."""
    microseconds = -(-upper_ns // 1000)
    return min((microseconds - 1).bit_length(), SLOTS - 1)

