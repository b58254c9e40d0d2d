"""Scheduling latency seen from outside against the runtime's own /sched/latencies:seconds, over the same work.

The runtime takes a sample of every eighth time that a goroutine stops running, whichever goroutine it is, and
records how long it was runnable when it runs again (casgstatus, newproc1). Up to Go 1.25 a system call counts as a
stop, too, and ends with a wait of 0 s, which fills the bucket that begins at 0; from 1.26 it does not. Nothing that
waits for a processor waits for less than that bucket's 64 ns, so that it is left out of the comparison.
"""

import math
from dataclasses import dataclass

import pytest

from schedtrace.attach import Watch
from schedtrace.histogram import BOUNDS_SECONDS
from schedtrace.window import Window
from tests.workload import Facts, Workload, binary
from tools import toolchains

VERSIONS = tuple(version for version in toolchains.RELEASES if toolchains.minor(version) >= 22)
SAMPLED = 8  # gTrackingPeriod
SHORTEST_SECONDS = 64e-9
CLOCKS_APART_SECONDS = 0.25e-6
DEVIATIONS = 5  # standard deviations of what a sample says; more than that is no chance


@dataclass(frozen=True)
class RuntimeHistogram:
    """By how much the runtime's histogram grew: bucket i counts what lies between bounds i and i + 1."""

    bounds_seconds: tuple[float, ...]
    counts: tuple[int, ...]

    @property
    def count(self) -> int:
        return sum(self.counts)

    def quantile_seconds(self, q: float) -> float:
        """Linear within the bucket that holds it."""
        rank, below = q * self.count, 0
        for i, n in enumerate(self.counts):
            if n and below + n >= rank:
                lower, upper = self.bounds_seconds[i : i + 2]
                return lower + (upper - lower) * (rank - below) / n
            below += n
        raise ValueError("a quantile of nothing")

    def share_up_to(self, seconds: float) -> float:
        """The share of values that are no longer; linear within the bucket, whose bounds are not ours."""
        below = 0.0
        for n, lower, upper in zip(self.counts, self.bounds_seconds, self.bounds_seconds[1:], strict=False):
            below += n * min(1.0, max(0.0, (seconds - lower) / (upper - lower)))
        return below / self.count


def _split(facts: Facts) -> tuple[int, RuntimeHistogram]:
    """The number of waits of no length, and the histogram of all others."""
    bounds = facts["bounds_seconds"]
    edges = (-math.inf if bounds[0] is None else bounds[0], *bounds[1:-1], bounds[-1] or math.inf)
    shortest = next(i for i, upper in enumerate(edges[1:]) if upper >= SHORTEST_SECONDS) + 1
    counts = facts["counts"]
    return sum(counts[:shortest]), RuntimeHistogram(edges[shortest:], tuple(counts[shortest:]))


def _observe(version: str, *arguments: object) -> tuple[Window, Facts]:
    with (
        Workload(binary("latencies", version), "-duration", "1500ms", *arguments) as target,
        Watch(target.pid) as watch,
    ):
        facts = target.run()
        watch.stop()
        window = watch.window()
    assert set(window.lost) <= {"thread_switch_unseen"}
    assert facts["turns"] > 1000
    return window, facts


def _slot(seconds: float) -> int:
    """The power-of-two bucket of a value, as bpf/types.h numbers them."""
    return max(0, math.ceil(math.log2(seconds * 1e6)))


def _assert_same_distribution(window: Window, theirs: RuntimeHistogram) -> None:
    ours = window.sched_latency_total
    for q in (0.5, 0.9, 0.99):
        quantile = ours.quantile_seconds(q)
        assert quantile is not None
        assert abs(_slot(quantile) - _slot(theirs.quantile_seconds(q))) <= 1, q
    # More than quantiles can tell: the share of all waits up to each of our bounds. Theirs is a sample of thousands.
    below = 0
    for slot, bound in zip(ours.slots, BOUNDS_SECONDS, strict=True):
        below += slot
        deviation = 0.01 + DEVIATIONS * 0.5 / math.sqrt(theirs.count)
        # The runtime looks at its clock a little earlier or later than we do, which tells where waits are short.
        least, most = (theirs.share_up_to(bound + sign * CLOCKS_APART_SECONDS) for sign in (-1, 1))
        assert least - deviation <= below / ours.count <= most + deviation, bound


@pytest.mark.parametrize("version", VERSIONS)
def test_latencies(version: str) -> None:
    window, facts = _observe(version)
    no_wait, theirs = _split(facts)
    assert no_wait <= 2
    # One in eight of each goroutine's runs, so that each may be off by one sample; the workload's, and a few others.
    assert abs(window.sched_latency_total.count - SAMPLED * theirs.count) <= SAMPLED * _goroutines(window)
    _assert_same_distribution(window, theirs)


@pytest.mark.parametrize("version", ["1.22", "1.25", "1.26", "1.27"])
def test_latencies_among_system_calls(version: str) -> None:
    window, facts = _observe(version, "-calls")
    no_wait, theirs = _split(facts)
    assert facts["calls"] > 1000
    if toolchains.minor(version) <= 25:
        assert SAMPLED * no_wait == pytest.approx(facts["calls"], abs=_sampling_error(facts["calls"]))
    else:
        assert no_wait <= 2
    runs = window.sched_latency_total.count
    assert SAMPLED * theirs.count == pytest.approx(runs, abs=_sampling_error(runs))
    _assert_same_distribution(window, theirs)


def _sampling_error(number: int) -> float:
    """How far off a number may be that is estimated from a sample of one in SAMPLED."""
    return DEVIATIONS * math.sqrt((SAMPLED - 1) * number)


def _goroutines(window: Window) -> int:
    """How many goroutines were seen in a window, those that ended included."""
    return sum(f.goroutines for f in window.functions)
