"""The bench of the budget reads the agent's bill."""

from dataclasses import astuple
from typing import cast

import pytest

from bench.agent_budget import Bill
from bench.agents import MeasuredAgent
from bench.measurement import Spread
from bench.switch_cost import GOROUTINE, NO_GOROUTINE

METRICS = """# TYPE schedtrace_overhead_seconds_total counter
schedtrace_overhead_seconds_total{namespace="",pod="a",whose="agent"} 0.25
schedtrace_overhead_seconds_total{namespace="",pod="a",whose="target"} 1.5
schedtrace_overhead_seconds_total{namespace="",pod="b",whose="target"} 0.5
schedtrace_thread_run_queue_seconds_bucket{pod="a",le="1.0"} 7
schedtrace_thread_run_queue_seconds_count{pod="a"} 1000
schedtrace_goroutine_off_cpu_seconds_count{pod="a",reason="blocked"} 200
schedtrace_goroutine_off_cpu_seconds_count{pod="a",reason="preempted"} 100
"""


class _Agent:
    def get(self, path: str) -> str:
        assert path == "/metrics"
        return METRICS


def test_bill() -> None:
    bill = Bill.of(cast(MeasuredAgent, _Agent()))
    assert astuple(bill) == (2e9, 0.25e9, 1000, 300)
    since = bill - Bill(1e9, 0.05e9, 400, 100)
    assert astuple(since) == (1e9, 0.2e9, 600, 200)
    more = {GOROUTINE: Spread(500, 0, 0), NO_GOROUTINE: Spread(300, 0, 0)}
    assert since.switches_ns(more) == pytest.approx(200 * 500 + 400 * 300)
