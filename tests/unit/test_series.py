"""Totals add up."""

from schedtrace.histogram import Histogram
from schedtrace.runtime_state import RuntimeTotals
from schedtrace.series import SeriesTotals


def _histogram(slot: int, ns: int) -> Histogram:
    return Histogram(tuple(int(i == slot) for i in range(25)), ns, ns)


def test_sum() -> None:
    first = SeriesTotals(
        transitions={("runnable", "running"): 1},
        sched_latency={"new": _histogram(1, 1_500)},
        wait={"sleep": _histogram(10, 900_000)},
        state_ns={"running": 10},
        run_queue=_histogram(0, 500),
        off_cpu={"preempted": _histogram(3, 5_000)},
        lost={"inconsistent_state": 1},
        overhead_ns=7,
    )
    second = SeriesTotals(
        transitions={("runnable", "running"): 2, ("running", "dead"): 1},
        sched_latency={"new": _histogram(1, 1_800), "gc": _histogram(2, 3_000)},
        state_ns={"running": 5, "waiting": 3},
        run_queue=_histogram(0, 700),
        off_cpu={"preempted": _histogram(3, 6_000), "woken": _histogram(0, 10)},
        overhead_ns=3,
    )
    total = first + second
    assert total.transitions == {("runnable", "running"): 3, ("running", "dead"): 1}
    assert total.sched_latency["new"].slots[:3] == (0, 2, 0)
    assert (total.sched_latency["new"].sum_ns, total.sched_latency["new"].max_ns) == (3_300, 1_800)
    assert total.sched_latency["gc"] == _histogram(2, 3_000)
    assert total.wait == {"sleep": _histogram(10, 900_000)}
    assert total.state_ns == {"running": 15, "waiting": 3}
    assert total.run_queue.count == 2
    assert {reason: h.sum_ns for reason, h in total.off_cpu.items()} == {"preempted": 11_000, "woken": 10}
    assert (total.lost, total.overhead_ns) == ({"inconsistent_state": 1}, 10)
    assert SeriesTotals() + first == first


def test_sum_of_runtimes() -> None:
    first = RuntimeTotals(_histogram(1, 1_500), {"stopped_gc": _histogram(2, 3_000)}, None)
    second = RuntimeTotals(_histogram(1, 1_600), {"stopped_other": _histogram(3, 5_000)}, 4)
    total = (SeriesTotals(runtime=first) + SeriesTotals() + SeriesTotals(runtime=second)).runtime
    assert total == RuntimeTotals(
        _histogram(1, 1_500) + _histogram(1, 1_600),
        {"stopped_gc": _histogram(2, 3_000), "stopped_other": _histogram(3, 5_000)},
        4,
    )
    assert SeriesTotals().runtime is None
    since = total.since(first)
    assert (since.sched_latency.count, since.stop_the_world["stopped_gc"].count, since.gc_cycles) == (1, 0, 4)
