"""What was counted of one process, as totals of its series."""

from __future__ import annotations

from collections import Counter

from schedtrace import join, target
from schedtrace.governor import Level
from schedtrace.plan import ProbePlan
from schedtrace.series import SeriesTotals
from schedtrace.session import Snapshot
from schedtrace.target import Bill
from schedtrace.thread_watch import ThreadSnapshot
from schedtrace.window import WaitParts


def thread_totals(threads: ThreadSnapshot, switches_ns: float) -> SeriesTotals:
    """Of its threads. ``switches_ns``: what counting them has cost it."""
    counts = join.thread_counts(threads, None)
    return SeriesTotals(
        run_queue=counts.run_queue,
        off_cpu=counts.off_cpu or {},
        lost=counts.lost,
        overhead_ns={"target": round(switches_ns)},
    )


def probe_totals(snapshot: Snapshot, plan: ProbePlan, level: Level, bill: Bill) -> SeriesTotals:
    """Of its goroutines. ``bill``: for the hits in this snapshot."""
    counts = join.counts(snapshot, target.reasons_of(plan), None)
    common = SeriesTotals(
        lost=counts.lost,
        overhead_ns={"target": round(bill.ns), "agent": round(bill.agent_ns)},
        hits={level: sum(counts.hits)},
        seen_ns={level: snapshot.seen_ns},
    )
    if level == "sampled":
        samples = join.samples(snapshot.samples, target.stops_of(plan))
        return common + SeriesTotals(sampled_latency=samples.sched_latency, delay_ns=_delays(level, samples.parts))
    state_ns = Counter[str]()
    for time in counts.states:
        state_ns[time.state] += time.time_ns
    return common + SeriesTotals(
        transitions=counts.transitions,
        sched_latency=counts.sched_latency,
        wait=counts.wait,
        state_ns=state_ns,
        delay_ns=_delays(level, counts.wait_parts),
    )


def _delays(level: Level, parts: WaitParts) -> dict[tuple[str, str], int]:
    """What waits to run were for, by level and source. Where stops of the world aren't known they are Go's queue's."""
    sources = {
        "go_queue": parts.queue_ns,
        "kernel_run_queue": parts.kernel_ns,
        "stop_the_world": parts.stopped_ns,
        "unknown": parts.undivided_ns,
    }
    return {(level, source): ns for source, ns in sources.items() if ns}
