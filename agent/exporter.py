"""What the agent exports to Prometheus: a collector for prometheus_client over a callable that looks at the node.

Every look gives totals since the agent began. From one scrape to the next is kept what was shown: that goes first under
the limit, and its text is used again where nothing has changed.
"""

from __future__ import annotations

import platform
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from importlib.metadata import version
from itertools import chain

from prometheus_client.core import Metric

from schedtrace import exposition
from schedtrace.exposition import Family, Row
from schedtrace.histogram import Histogram
from schedtrace.metrics import OF_NODE, OF_SERIES
from schedtrace.runtime_state import PROCESSOR_STATES, RuntimeState, RuntimeTotals
from schedtrace.series import Labels, NodeView, Series, SeriesTotals

DEFAULT_MAX_SERIES = 60_000
"""A pod has 100 to 400 series, so this holds the pods of a full node (the kubelet's default is at most 110)."""

_NS = 1e9
# By the first part of the names in RuntimeState.stop_the_world.
_STOPS = {
    "stopped": "schedtrace_runtime_stop_the_world_seconds",
    "stopping": "schedtrace_runtime_stopping_seconds",
}


class Exporter:
    """A collector for a prometheus_client registry, and its text without one.

    ``look`` gives the node's totals; it is called once for each scrape. ``max_series`` bounds how many series (samples
    of one scrape) there are about targets: what doesn't fit is left out by whole sets of labels, and counted. Sets that
    were exported before go first, so that newcomers push nothing out; among others the order of the labels decides.
    ``build`` are labels of schedtrace_build_info besides the versions of schedtrace and Python. Not for use by several
    threads at once.
    """

    def __init__(
        self,
        look: Callable[[], NodeView],
        max_series: int = DEFAULT_MAX_SERIES,
        build: Mapping[str, str] | None = None,
    ) -> None:
        self._look = look
        self._max_series = max_series
        self._build = {"version": version("schedtrace"), "python": platform.python_version(), **(build or {})}
        build_info = Family("schedtrace_build_info", "info", "This agent.", tuple(self._build))
        self._families = (*OF_SERIES, *OF_NODE, build_info)
        self._shown: dict[Labels, _Shown] = {}
        self._left_out_total = 0
        self.left_out = 0
        """Sets of labels that didn't fit at the last scrape."""

    def describe(self) -> Iterable[Metric]:
        """All families without samples; the registry asks for this to know the names."""
        return [exposition.metric(family, ()) for family in self._families]

    def collect(self) -> Iterable[Metric]:
        """The families of one scrape. Raises what ``look`` raises."""
        shown, rows = self._scrape()
        return [
            exposition.metric(family, [*chain(*(one.rows.get(family.name, ()) for one in shown)), *rows[family.name]])
            for family in self._families
        ]

    def text(self, *, openmetrics: bool) -> Iterator[bytes]:
        """What prometheus_client makes of :meth:`collect`, much sooner, in pieces: all of it can be megabytes. The look
        is taken before the first piece. Raises what ``look`` raises."""
        shown, rows = self._scrape()
        for family in self._families:
            yield exposition.head(family, openmetrics=openmetrics)
            yield b"".join([one.lines[family.name] for one in shown if family.name in one.lines])
            yield exposition.lines(family, rows[family.name])
        if openmetrics:
            yield exposition.END_OF_OPENMETRICS

    def _scrape(self) -> tuple[list[_Shown], Mapping[str, list[Row]]]:
        """What is shown of series, by labels, and what belongs to no series, by family."""
        view = self._look()
        self._fit(view.series)
        rows: dict[str, list[Row]] = {family.name: [] for family in self._families}
        rows["schedtrace_lost_total"] = [(("", "", "", "", reason), n) for reason, n in sorted(view.lost.items())]
        failures = sorted(view.attach_failures.items())
        rows["schedtrace_attach_failures_total"] = [((reason,), n) for reason, n in failures]
        rows["schedtrace_governor_windows_total"] = [*sorted(view.windows.items())]
        rows["schedtrace_series_left_out_total"] = [((), self._left_out_total)]
        rows["schedtrace_build_info"] = [(tuple(self._build.values()), 1)]
        return [self._shown[labels] for labels in sorted(self._shown)], rows

    def _fit(self, series: Iterable[Series]) -> None:
        """Show of these what fits."""
        before, self._shown = self._shown, {}
        left, self.left_out = self._max_series, 0
        for each in sorted(series, key=lambda one: (one.labels not in before, one.labels)):
            shown = before.pop(each.labels, None)  # so that not all of them are there twice
            if shown and shown.series == each:
                rows, samples = shown.rows, shown.samples
            else:
                rows = _rows(each)
                samples = sum(map(exposition.samples, rows.values()))
            if samples > left:
                self.left_out += 1
                self._left_out_total += samples
                continue
            left -= samples
            if shown is None or rows is not shown.rows:
                shown = _Shown.of(each, samples, rows, shown)
            self._shown[each.labels] = shown


@dataclass(frozen=True)
class _Shown:
    """One set of labels, with its samples as rows and as text, by family: kept, since little changes between two
    scrapes."""

    series: Series
    samples: int
    rows: Mapping[str, list[Row]]
    lines: Mapping[str, bytes]

    @classmethod
    def of(cls, series: Series, samples: int, rows: Mapping[str, list[Row]], before: _Shown | None) -> _Shown:
        """``before``: the same labels at the last scrape."""
        lines = {}
        for family in OF_SERIES:
            if own_rows := rows.get(family.name):
                same = before if before and before.rows.get(family.name) == own_rows else None
                lines[family.name] = same.lines[family.name] if same else exposition.lines(family, own_rows)
        return cls(series, samples, rows, lines)


def _rows(series: Series) -> dict[str, list[Row]]:
    """By family."""
    labels = series.labels
    base = tuple(map(_printable, (labels.namespace, labels.pod, labels.container, labels.process)))
    rows: dict[str, list[Row]] = {}
    for name, own, value in _values(series):
        rows.setdefault(name, []).append(((*base, *map(_printable, own)), value))
    return rows


_Value = tuple[str, tuple[str, ...], float | Histogram]
"""Name, own labels, value."""


def _values(series: Series) -> Iterator[_Value]:
    """Everything exported of one set of labels."""
    totals = series.totals
    yield from _histograms(totals)
    yield from _counters(totals)
    yield "schedtrace_thread_run_queue_seconds", (), totals.run_queue
    if totals.runtime:
        yield from _runtime_totals(totals.runtime)
    if series.runtimes:
        yield from _runtime_gauges(series.runtimes)
    if series.throttled_ns is not None:
        yield "schedtrace_cfs_throttled_seconds_total", (), series.throttled_ns / _NS
    if series.quota_cores is not None:
        yield "schedtrace_cpu_quota_cores", (), series.quota_cores
    yield "schedtrace_threads", (), series.threads
    yield "schedtrace_open_fds", (), series.open_fds
    for info in series.infos:
        yield "schedtrace_target_info", (info.go_version, info.level, info.symbols), 1


def _histograms(totals: SeriesTotals) -> Iterator[_Value]:
    for name, by_reason in (
        ("schedtrace_goroutine_sched_latency_seconds", totals.sched_latency),
        ("schedtrace_goroutine_wait_seconds", totals.wait),
        ("schedtrace_goroutine_off_cpu_seconds", totals.off_cpu),
        ("schedtrace_sampled_sched_latency_seconds", totals.sampled_latency),
    ):
        for reason, histogram in sorted(by_reason.items()):
            yield name, (reason,), histogram


def _counters(totals: SeriesTotals) -> Iterator[_Value]:
    for states, n in sorted(totals.transitions.items()):
        yield "schedtrace_goroutine_transitions_total", states, n
    for source, time_ns in sorted(totals.delay_ns.items()):
        yield "schedtrace_sched_delay_seconds_total", source, time_ns / _NS
    for name, times_ns in (
        ("schedtrace_goroutine_state_seconds_total", totals.state_ns),
        ("schedtrace_overhead_seconds_total", totals.overhead_ns),
        ("schedtrace_seen_seconds_total", totals.seen_ns),
    ):
        for label, time_ns in sorted(times_ns.items()):
            yield name, (label,), time_ns / _NS
    for name, counts in (("schedtrace_probe_hits_total", totals.hits), ("schedtrace_lost_total", totals.lost)):
        for label, n in sorted(counts.items()):
            yield name, (label,), n


def _runtime_totals(totals: RuntimeTotals) -> Iterator[_Value]:
    yield "schedtrace_runtime_sched_latency_seconds", (), totals.sched_latency
    for name, histogram in sorted(totals.stop_the_world.items()):
        phase, _, reason = name.partition("_")
        if histogram.count:
            yield _STOPS[phase], (reason,), histogram
    if totals.gc_cycles is not None:
        yield "schedtrace_runtime_gc_cycles_total", (), totals.gc_cycles


def _runtime_gauges(runtimes: Sequence[RuntimeState]) -> Iterator[_Value]:
    yield "schedtrace_gomaxprocs", (), sum(runtime.gomaxprocs for runtime in runtimes)
    yield "schedtrace_goroutines", (), sum(runtime.goroutines for runtime in runtimes)
    goals = [runtime.heap_goal_bytes for runtime in runtimes if runtime.heap_goal_bytes is not None]
    if goals:
        yield "schedtrace_runtime_heap_goal_bytes", (), sum(goals)
    processors = [processor for runtime in runtimes for processor in runtime.processors]
    states = Counter(processor.state for processor in processors)
    for state in PROCESSOR_STATES:
        yield "schedtrace_runtime_processors", (state,), states[state]
    yield "schedtrace_runtime_run_queue", ("global",), sum(runtime.run_queue for runtime in runtimes)
    yield "schedtrace_runtime_run_queue", ("local",), sum(processor.run_queue for processor in processors)
    idle = sum(runtime.idle_threads for runtime in runtimes)
    yield "schedtrace_runtime_threads", ("idle",), idle
    yield "schedtrace_runtime_threads", ("other",), sum(runtime.threads for runtime in runtimes) - idle


@lru_cache(maxsize=1 << 12)
def _printable(text: str) -> str:
    """A label value that any terminal and any parser can take: names of executables are bytes that strangers choose.
    No two texts give the same."""
    if text.isprintable() and "\\" not in text:
        return text
    return "".join(
        c if c.isprintable() and c != "\\" else c.encode("unicode_escape", "surrogatepass").decode() for c in text
    )
