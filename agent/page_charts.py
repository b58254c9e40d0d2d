"""The pictures of the exported page, as inline SVG. Pure. Colours are the classes and variables of page.css."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

from schedtrace.events import Array
from schedtrace.formatting import amount, bound, count, duration, share
from schedtrace.histogram import BOUNDS_SECONDS, SLOTS
from schedtrace.picture import SLICES

WIDTH, LEFT, RIGHT = 1060, 64, 6
_PLOT = WIDTH - LEFT - RIGHT
_ROW, _AXIS, _TOP = 11, 22, 8
_STEPS = (1, 2, 5, 10)


@dataclass(frozen=True)
class Axis:
    """Time from left to right: slices of ``slice_ns`` from the recording's start. ``holes``: (begin, end) in slices of
    what was not recorded or lost."""

    slice_ns: int
    holes: Sequence[tuple[float, float]] = ()

    def when(self, i: int) -> str:
        """Slice i in words."""
        return f"{i * self.slice_ns / 1e9:.4g}-{(i + 1) * self.slice_ns / 1e9:.4g} s"


@dataclass(frozen=True)
class Layer:
    """A layer of a picture of shares. ``values``: one for each slice; ``colour``: a variable of page.css."""

    name: str
    colour: str
    values: Array


def heatmap(latency: Array, axis: Axis) -> str:
    """Waits to run by time and by how long they were: stronger where there are more. ``latency``: (SLICES, SLOTS)."""
    used = [k for k in range(SLOTS) if latency[:, k].any()]
    low, high = (min(used), max(used)) if used else (0, 3)
    rows = range(low, high + 1)
    height = len(rows) * _ROW
    most = math.log1p(float(latency.max()) or 1.0)
    cells = []
    for k in rows:
        y = _TOP + (high - k) * _ROW
        for i in latency[:, k].nonzero()[0].tolist():
            shade = 0.12 + 0.88 * math.log1p(int(latency[i, k])) / most
            cells.append(f'<rect class="heat" x="{_x(i):.1f}" y="{y}" width="{_PLOT / SLICES:.2f}" height="{_ROW}" '
                         f'fill-opacity="{shade:.2f}"/>')  # fmt: skip
    labels = [
        f'<text x="{LEFT - 6}" y="{_TOP + (high - k) * _ROW + _ROW - 2}" text-anchor="end">{_slot_name(k)}</text>'
        for k in rows
        if (high - k) % 2 == 0
    ]
    texts = [_heat_text(latency[i], axis.when(i)) for i in range(SLICES)]
    return _svg("How long goroutines waited to run, over time", height, axis, labels + cells, texts)


def _slot_name(k: int) -> str:
    return bound(BOUNDS_SECONDS[k]) if k < SLOTS - 1 else "more"


def _heat_text(counts: Array, when: str) -> str:
    lines = [f"≤ {_slot_name(k)}: {count(int(counts[k]))}" if k < SLOTS - 1 else f"more: {count(int(counts[k]))}"
             for k in range(SLOTS - 1, -1, -1) if counts[k]]  # fmt: skip
    return "\n".join([when, *(lines or ["no waits to run ended"])])


def stacked(title: str, layers: Sequence[Layer], axis: Axis, *, as_shares: bool) -> str:
    """Layers on top of each other, the first at the bottom: how many at a time on average, or what share of the sum."""
    height = 110
    sums = [sum(float(layer.values[i]) for layer in layers) for i in range(SLICES)]
    top = 1.0 if as_shares else _round_up(max([*sums, 0.0]))
    paths, lower = [], [0.0] * SLICES
    for layer in layers:
        values = [float(v) / s if as_shares and s else float(v) for v, s in zip(layer.values, sums, strict=True)]
        upper = [a + b for a, b in zip(lower, values, strict=True)]
        if any(values):
            paths.append(f'<path d="{_area(lower, upper, top, height)}" style="fill:var(--{layer.colour})"/>')
        lower = upper
    labels = []
    for part in (0.0, 0.5, 1.0):
        y = _TOP + height * (1 - part)
        text = f"{100 * part:.0f} %" if as_shares else amount(top * part)
        labels.append(f'<line class="grid" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y:.1f}" y2="{y:.1f}"/>')
        labels.append(f'<text x="{LEFT - 6}" y="{y + 4:.1f}" text-anchor="end">{text}</text>')
    texts = [_layers_text(layers, i, sums[i], axis.when(i), as_shares) for i in range(SLICES)]
    return _svg(title, height, axis, [*paths, *labels], texts) + _key(layers)


def _layers_text(layers: Sequence[Layer], i: int, total: float, when: str, as_shares: bool) -> str:
    lines = [when]
    for layer in reversed(layers):
        value = float(layer.values[i])
        if value:
            lines.append(f"{layer.name}: {share(value / total) if as_shares else amount(value)}")
    return "\n".join(lines)


def _key(layers: Sequence[Layer]) -> str:
    keys = "".join(
        f'<span class="key"><i style="background:var(--{layer.colour})"></i>{escape(layer.name)}</span>'
        for layer in reversed(layers)
        if layer.values.any()
    )
    return f"<figcaption>{keys}</figcaption>"


def _area(lower: Sequence[float], upper: Sequence[float], top: float, height: int) -> str:
    """Steps: each slice is one number."""
    points = []
    for values, order in ((upper, range(SLICES)), (lower, range(SLICES - 1, -1, -1))):
        for i in order:
            ends = (i, i + 1) if values is upper else (i + 1, i)
            points += [f"{_x(end):.1f},{_TOP + height * (1 - values[i] / top):.1f}" for end in ends]
    return "M" + "L".join(points) + "Z"


def _svg(title: str, height: int, axis: Axis, parts: Sequence[str], texts: Sequence[str]) -> str:
    bottom = _TOP + height
    holes = [
        f'<rect class="hole" x="{_x(begin):.1f}" y="{_TOP}" width="{max((end - begin) / SLICES * _PLOT, 1):.1f}" '
        f'height="{height}"/>'
        for begin, end in axis.holes
    ]
    data = escape(json.dumps({"left": LEFT, "width": _PLOT, "slices": SLICES, "texts": list(texts)}))
    return (
        f'<svg viewBox="0 0 {WIDTH} {bottom + _AXIS}" role="img" aria-label="{escape(title)}" data-slices="{data}">'
        f'<rect class="frame" x="{LEFT}" y="{_TOP}" width="{_PLOT}" height="{height}"/>{"".join(holes)}{"".join(parts)}'
        f"{_time_axis(axis, bottom)}"
        f'<line class="cursor" x1="0" x2="0" y1="{_TOP}" y2="{bottom}"/></svg>'
    )


def _time_axis(axis: Axis, bottom: int) -> str:
    length = SLICES * axis.slice_ns / 1e9
    step = _round_up(length / 8)
    parts = []
    for i in range(int(length / step) + 1):
        x = LEFT + i * step / length * _PLOT
        text = duration(i * step * 1e9)
        anchor = "middle" if x + 4 * len(text) < WIDTH else "end"
        parts.append(f'<line class="grid" x1="{x:.1f}" x2="{x:.1f}" y1="{_TOP}" y2="{bottom + 3}"/>')
        parts.append(f'<text x="{x:.1f}" y="{bottom + 16}" text-anchor="{anchor}">{text}</text>')
    return "".join(parts)


def _x(slices: float) -> float:
    return LEFT + slices / SLICES * _PLOT


def _round_up(value: float) -> float:
    """To 1, 2 or 5 and zeros."""
    if value <= 0:
        return 1.0
    unit = 10.0 ** math.floor(math.log10(value))
    return next(step * unit for step in _STEPS if step * unit >= value * (1 - 1e-9))
