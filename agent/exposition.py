"""Metric families, as objects of prometheus_client and as text. Pure.

prometheus_client spends 10 to 20 µs on each line of text, and a histogram is 27 lines: a third of a second of CPU for
fifty pods, every fifteen seconds. :func:`lines` writes them for the two usual formats, in which they are the same, in a
twentieth of that. That it says the same as the library is tested against the library, and all other formats are left to
the library.

Formats: prometheus.io/docs/instrumenting/exposition_formats, OpenMetrics 1.0.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate
from typing import Literal

from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    InfoMetricFamily,
    Metric,
)

from schedtrace.histogram import BOUNDS_SECONDS, Histogram

Kind = Literal["counter", "gauge", "histogram", "info"]

# As Go writes them, which Python does too in this range.
_BOUNDS = tuple("+Inf" if math.isinf(bound) else repr(bound) for bound in BOUNDS_SECONDS)
_BUCKETS = "".join(f'\0{bound}"}} %d\n' for bound in _BOUNDS)
"""The lines of a histogram's buckets, with a 0 character for what each begins with: one operation for all of them."""
END_OF_OPENMETRICS = b"# EOF\n"
_SUFFIXES: dict[Kind, str] = {"counter": "_total", "info": "_info", "gauge": "", "histogram": ""}
_NS = 1e9


@dataclass(frozen=True)
class Family:
    """One metric. ``name`` is that of its samples, so it ends in _total for a counter and in _info for an info, whose
    value is always 1. ``help`` is one line without quotes and backslashes."""

    name: str
    kind: Kind
    help: str
    labels: tuple[str, ...]

    @property
    def base_name(self) -> str:
        """The name without the suffix of its kind."""
        return self.name.removesuffix(_SUFFIXES[self.kind])


Row = tuple[tuple[str, ...], float | Histogram]
"""Label values, in the order of the family's labels, and a value: for a histogram a histogram, which always has
labels."""


def metric(family: Family, rows: Iterable[Row]) -> Metric:
    """The family as prometheus_client has it."""
    if family.kind == "histogram":
        histogram = HistogramMetricFamily(family.base_name, family.help, labels=family.labels)
        for values, value in rows:
            assert isinstance(value, Histogram)
            counts = map(float, accumulate(value.slots))
            histogram.add_metric(values, list(zip(_BOUNDS, counts, strict=True)), value.sum_ns / _NS)
        return histogram
    if family.kind == "info":
        info = InfoMetricFamily(family.base_name, family.help, labels=family.labels)
        for values, _ in rows:
            info.add_metric(values, {})
        return info
    make = CounterMetricFamily if family.kind == "counter" else GaugeMetricFamily
    plain = make(family.base_name, family.help, labels=family.labels)
    for values, value in rows:
        assert not isinstance(value, Histogram)
        plain.add_metric(values, value)
    return plain


def head(family: Family, *, openmetrics: bool) -> bytes:
    """What comes before the lines of a family, in the Prometheus text format 0.0.4 or in OpenMetrics 1.0."""
    name, kind = (family.base_name if openmetrics else family.name), str(family.kind)
    if kind == "info" and not openmetrics:
        kind = "gauge"
    return f"# HELP {name} {family.help}\n# TYPE {name} {kind}\n".encode()


def samples(rows: Sequence[Row]) -> int:
    """How many lines that will be."""
    histograms = sum(isinstance(value, Histogram) for _, value in rows)
    return len(rows) + (len(BOUNDS_SECONDS) + 1) * histograms


def lines(family: Family, rows: Iterable[Row]) -> bytes:
    """Rows in either format."""
    parts: list[str] = []
    for values, value in rows:
        labels = ",".join(f'{key}="{_escape(text)}"' for key, text in zip(family.labels, values, strict=True))
        if isinstance(value, Histogram):
            parts.append(_histogram_lines(family.name, labels, value))
        else:
            parts.append(f"{family.name}{{{labels}}} {value}\n" if labels else f"{family.name} {value}\n")
    return "".join(parts).encode()


def _histogram_lines(name: str, labels: str, histogram: Histogram) -> str:
    counts = tuple(accumulate(histogram.slots))
    head = f'{name}_bucket{{{labels},le="'.replace("%", "%%")
    buckets = _BUCKETS.replace("\0", head) % counts
    return f"{buckets}{name}_count{{{labels}}} {counts[-1]}\n{name}_sum{{{labels}}} {histogram.sum_ns / _NS}\n"


@lru_cache(maxsize=1 << 12)
def _escape(value: str) -> str:
    return value.replace("\\", r"\\").replace("\n", r"\n").replace('"', r"\"")
