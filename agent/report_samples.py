"""Rows of numbers about histograms, and what the sampled level saw, for people. Pure."""

from collections.abc import Mapping

from rich.text import Text

from schedtrace.formatting import columns, count, duration, heading, paragraph, rough_duration, share
from schedtrace.histogram import Histogram
from schedtrace.window import Samples, WaitParts

QUANTILES = ("p50", "p90", "p99", "max")
_ABOUT = (
    "The runtime's own sample, as it is: of each goroutine every eighth time that it stops running; of new ones up to "
    "one in four. A goroutine that does the same few things in turn is caught at the same one each time, so that "
    "causes are not sampled evenly."
)
_STOPS = {
    "stopping_gc": "stopping for GC",
    "stopping_other": "stopping for others",
    "stopped_gc": "stopped for GC",
    "stopped_other": "stopped for others",
}


def quantiles(histogram: Histogram) -> tuple[str, ...]:
    """Count, and what :data:`QUANTILES` names."""
    found = (quantile(histogram, q) for q in (0.5, 0.9, 0.99))
    return count(histogram.count), *found, maximum(histogram)


def quantile(histogram: Histogram, q: float) -> str:
    """As right as its bucket tells."""
    return rough_duration(histogram.quantile_seconds(q))


def maximum(histogram: Histogram) -> str:
    """The longest."""
    return duration(histogram.max_ns) if histogram.count else "-"


def sampled_latency(samples: Samples) -> list[Text]:
    """How long goroutines of the sample waited to run."""
    title = heading("Goroutines waiting to run, a sample", "by what made them runnable")
    causes = sorted(samples.sched_latency.items(), key=lambda item: -item[1].sum_ns)
    if not causes:
        return [Text(), title, paragraph("none of the sample ran in this time")]
    whole = samples.sched_latency_total
    rows = [(cause, *quantiles(h), _mean(h)) for cause, h in (*causes, *([("all", whole)] if len(causes) > 1 else []))]
    return [Text(), title, columns(("cause", "samples", *QUANTILES, "mean"), rows, "<>>>>>>"), paragraph(_ABOUT)]


def parts_of_waits(parts: WaitParts | None, whose: str) -> list[Text]:
    """What goroutines waited for that waited to run; ``whose``: which goroutines these are."""
    if parts is None or not parts.total_ns:
        return []
    queue = "for another goroutine to stop running (Go's queues)"
    if parts.stopped_ns is None:
        queue = "in Go's queues, or while the world was stopped"
    rows = [
        (share(ns / parts.total_ns), what, duration(ns))
        for ns, what in (
            (parts.queue_ns, queue),
            (parts.kernel_ns, "for the kernel to run the thread that was to run them"),
            (parts.stopped_ns or 0, "for the world to be started again"),
            (parts.undivided_ns, "not known which"),
        )
        if ns
    ]
    title = heading("What they waited for", f"of all time that {whose} waited to run")
    return [Text(), title, columns(("share", "what", "time"), rows, "><>")]


def stops_of_the_world(samples: Samples) -> list[Text]:
    """Each stop, not a sample."""
    if not samples.stop_the_world:
        return []
    named = {_STOPS[name]: histogram for name, histogram in samples.stop_the_world.items() if histogram.count}
    return stops_by_name("all; until the last has stopped, and until all run again", named)


def stops_by_name(remark: str, named: Mapping[str, Histogram]) -> list[Text]:
    """Histograms of stops."""
    title = heading("Stops of the world", remark)
    if not named:
        return [Text(), title, paragraph("none")]
    rows = [(name, *quantiles(h), duration(h.sum_ns)) for name, h in named.items()]
    return [Text(), title, columns(("stop", "count", *QUANTILES, "total"), rows, "<>>>>>>")]


def _mean(histogram: Histogram) -> str:
    return duration(histogram.sum_ns / histogram.count) if histogram.count else "-"
