"""The benches find the costs that are put into made-up samples."""

import pytest

from bench import intervals
from bench.intervals import Cost, Sample
from bench.measurement import BenchError

MS = 1_000_000
SECOND = 1_000 * MS


def _made_up(windows: dict[range, str], milliseconds: int = 10_000) -> list[Sample]:
    """A sample each 5 ms. Work takes 10 us a unit, in windows 25 us; the process always runs."""
    samples, cpu_ns, units = [], 0.0, 0.0
    for at in range(0, milliseconds, 5):
        level = next((level for when, level in windows.items() if at in when), "")
        samples.append(Sample(at * MS, round(cpu_ns), round(units), level))
        cpu_ns += 5 * MS
        units += 5 * MS / (25_000 if level else 10_000)
    return samples


def test_cost_of_a_window() -> None:
    (cost,) = intervals.costs(_made_up({range(5_000, 5_100): "full"}), 2 * SECOND)
    assert isinstance(cost, Cost)
    assert cost.level == "full"
    # From the last sample before it, which was taken when there was nothing, to the first after it.
    assert cost.time_ns == cost.cpu_ns == pytest.approx(105 * MS)
    assert cost.extra_ns == pytest.approx(100 * MS * 0.6, rel=0.01)
    assert cost.units == pytest.approx(4_500, rel=0.001)
    assert cost.missed == pytest.approx(6_000, rel=0.001)


def test_a_window_that_goes_on_is_left_out() -> None:
    assert not intervals.costs(_made_up({range(9_000, 10_000): "full"}), SECOND)


def test_a_window_that_was_there_at_first_is_left_out() -> None:
    assert not intervals.costs(_made_up({range(1_000): "full"}), SECOND)


def test_windows_are_not_compared_with_each_other() -> None:
    """The second begins 200 ms after the first: the time before it is short, and the rest is not taken."""
    two = {range(5_000, 5_100): "sampled", range(5_300, 5_400): "full"}
    found = intervals.costs(_made_up(two), 2 * SECOND)
    assert [cost.level for cost in found] == ["sampled", "full"]
    assert [cost.extra_ns for cost in found] == pytest.approx([60 * MS, 60 * MS], rel=0.01)


def test_averages() -> None:
    found = [Cost("full", 1, cpu_ns=30, extra_ns=extra, units=90, missed=10) for extra in (10, 10, 16)]
    assert intervals.bare_ns(found) == 20 + 20 + 14
    assert intervals.possible_units(found) == 300
    added = intervals.added_percent(found, 1000)
    assert added.value == pytest.approx(3.6)
    # standard deviation of 1, 1, 1.6 is 0.3464; of their sum, that times the root of 3
    assert added.half == pytest.approx(1.96 * 0.3464 * 3**0.5, rel=0.001)
    missed = intervals.missed_percent(found, 300)
    assert missed.value == pytest.approx(10)
    assert missed.half == pytest.approx(0, abs=1e-9)
    assert added.text() == "3.60 ± 1.18"


def test_too_few() -> None:
    with pytest.raises(BenchError, match="2 intervals are too few"):
        intervals.added_percent([Cost("full", 1, 1, 1, 1, 1)] * 2, 1)
