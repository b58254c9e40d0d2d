"""The bench of the budget finds the cost of windows that is put into made-up samples."""

import pytest

from bench.agent_budget import Cost, Sample, window_costs

MS = 1_000_000


def test_cost_of_a_window() -> None:
    """Work takes 10 us a unit, 25 us in the window, which lasts from 5.0 to 5.1 s."""
    samples, cpu_ns, units = [], 0.0, 0.0
    for i in range(2000):
        time_ns = i * 5 * MS
        probed = 5_000 * MS <= time_ns < 5_100 * MS
        samples.append(Sample(time_ns, round(cpu_ns), round(units), probed))
        cpu_ns += 5 * MS
        units += 5 * MS / (25_000 if probed else 10_000)
    (cost,) = window_costs(samples)
    assert isinstance(cost, Cost)
    # from the last sample before it to the first after it
    assert cost.cpu_ns == pytest.approx(105 * MS)
    assert cost.extra_ns == pytest.approx(100 * MS * 0.6, rel=0.01)


def test_a_window_that_goes_on_is_left_out() -> None:
    samples = [Sample(i * MS, i * MS, i, probed=i > 5) for i in range(10)]
    assert not window_costs(samples)
