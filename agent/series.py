"""What the agent exports: totals per pod, container and process name. Pure.

Counters of a series are the sum over all processes that ever had its labels, so that they never go backwards when one
restarts. Durations are in nanoseconds.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TypeVar

from schedtrace.histogram import Histogram, add_histograms
from schedtrace.runtime_state import RuntimeState, RuntimeTotals

_Key = TypeVar("_Key")


@dataclass(frozen=True, order=True)
class Labels:
    """Whose series it is. Outside Kubernetes ``namespace`` and ``pod`` are empty, and ``container`` is what
    :class:`schedtrace.pods.Owner` says: the start of the container id, a systemd service, or nothing."""

    namespace: str
    pod: str
    container: str
    process: str
    """Base name of the executable."""


@dataclass(frozen=True)
class SeriesTotals:
    """Counters of one series; sums of them are totals too."""

    transitions: Mapping[tuple[str, str], int] = field(default_factory=dict)
    sched_latency: Mapping[str, Histogram] = field(default_factory=dict)
    """By wake cause."""
    wait: Mapping[str, Histogram] = field(default_factory=dict)
    """By wait reason."""
    state_ns: Mapping[str, int] = field(default_factory=dict)
    run_queue: Histogram = field(default_factory=Histogram)
    """Of threads: all the time that processes are watched, not only in windows."""
    off_cpu: Mapping[str, Histogram] = field(default_factory=dict)
    """By why, as in :data:`schedtrace.window.OFF_CPU`, all the time; nothing where it can't be told which goroutine a
    thread runs."""
    lost: Mapping[str, int] = field(default_factory=dict)
    overhead_ns: Mapping[str, int] = field(default_factory=dict)
    """Whose CPU time: "target", "agent"."""
    hits: Mapping[str, int] = field(default_factory=dict)
    """Of probes, by level."""
    seen_ns: Mapping[str, int] = field(default_factory=dict)
    """How long processes were watched, by level, added up over them: what probes count was counted in that time."""
    sampled_latency: Mapping[str, Histogram] = field(default_factory=dict)
    """By wake cause, at the sampled level."""
    delay_ns: Mapping[tuple[str, str], int] = field(default_factory=dict)
    """Of waits to run, by level and source."""
    runtime: RuntimeTotals | None = None
    """What Go runtimes have counted themselves, since the processes began; None where they can't be read."""

    def __add__(self, other: SeriesTotals) -> SeriesTotals:
        if self is NOTHING:
            return other
        return SeriesTotals(
            transitions=_add(self.transitions, other.transitions),
            sched_latency=add_histograms(self.sched_latency, other.sched_latency),
            wait=add_histograms(self.wait, other.wait),
            state_ns=_add(self.state_ns, other.state_ns),
            run_queue=self.run_queue + other.run_queue,
            off_cpu=add_histograms(self.off_cpu, other.off_cpu),
            lost=_add(self.lost, other.lost),
            overhead_ns=_add(self.overhead_ns, other.overhead_ns),
            hits=_add(self.hits, other.hits),
            seen_ns=_add(self.seen_ns, other.seen_ns),
            sampled_latency=add_histograms(self.sampled_latency, other.sampled_latency),
            delay_ns=_add(self.delay_ns, other.delay_ns),
            runtime=_add_if_any(self.runtime, other.runtime),
        )


NOTHING = SeriesTotals()


@dataclass(frozen=True, order=True)
class TargetInfo:
    """One way in which processes of a series are watched."""

    go_version: str
    level: str
    symbols: str


@dataclass(frozen=True)
class Series:
    """One set of labels at one scrape.

    ``throttled_ns`` is the container's cgroup's counter, None without a CPU controller; ``quota_cores`` None without a
    quota. ``threads`` and ``open_fds`` are sums over the living processes; ``runtimes`` are those of them that can be
    read.
    """

    labels: Labels
    totals: SeriesTotals
    infos: tuple[TargetInfo, ...]
    threads: int
    open_fds: int
    quota_cores: float | None
    throttled_ns: int | None
    runtimes: tuple[RuntimeState, ...] = ()


@dataclass(frozen=True)
class WatchedProcess:
    """What the agent does with one process now. ``level``: "passive" outside of windows; ``totals``: of its windows and
    its threads so far; ``budget_ns``: what its account holds, negative while a debt is paid, None without a limit."""

    pid: int
    name: str
    level: str
    totals: SeriesTotals
    budget_ns: float | None


@dataclass(frozen=True)
class NodeView:
    """Everything that the agent exports at one scrape."""

    series: tuple[Series, ...]
    attach_failures: Mapping[str, int]
    """Processes that could not be watched, by reason (a word of a bounded set)."""
    lost: Mapping[str, int]
    """What the agent lost that belongs to no series, by reason."""
    windows: Mapping[tuple[str, str], int] = field(default_factory=dict)
    """How many windows the governor has ended, or could not open, by level and by how."""


def _add(a: Mapping[_Key, int], b: Mapping[_Key, int]) -> Mapping[_Key, int]:
    if not a or not b:  # as at most times
        return a or b
    return {key: a.get(key, 0) + b.get(key, 0) for key in {**a, **b}}


def _add_if_any(a: RuntimeTotals | None, b: RuntimeTotals | None) -> RuntimeTotals | None:
    return a + b if a and b else a or b
