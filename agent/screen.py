"""The live screen of ``attach``: what was seen so far as one frame of a given size, and what keys do to it. Pure.

A frame has as many lines as fit, none wider than the terminal; nothing in it is folded. Its parts share the height:
each gets its least, and what is left goes round until each has what it wants.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from rich.text import Text

from schedtrace.formatting import (
    bound,
    columns,
    count,
    duration,
    heading,
    keep_end,
    lines,
    printable,
    short_function,
)
from schedtrace.histogram import BOUNDS_SECONDS, Histogram
from schedtrace.histogram import total as merged
from schedtrace.report import (
    FUNCTION_TITLES,
    QUANTILE_TITLES,
    STATE_TITLES,
    cause_rows,
    cost_share,
    function_rows,
    losses,
    place_lines,
    quantile_row,
    size_and_limit,
    state_rows,
    throttled,
    title_line,
    what_samples_waited_for,
)
from schedtrace.report_samples import sampled_latency
from schedtrace.window import LivingGoroutine, Samples, Window

LEAST_WIDTH, LEAST_HEIGHT = 80, 24
"""What a terminal needs for all parts to be shown."""
_WIDE = 150
_HIGH = 30
_GAP = "   "
_HISTOGRAM_SHARE = 0.45  # of the width, beside the states
_MOST_STATES = 16

SORTS: tuple[tuple[str, Callable[[LivingGoroutine], int]], ...] = (
    ("longest wait to run", lambda g: g.max_runnable_ns),
    ("all waits to run", lambda g: g.runnable_ns),
    ("time in this state", lambda g: g.in_state_ns or 0),
)
"""What the worst goroutines can be sorted by, in the order that the key goes through them."""


@dataclass(frozen=True)
class View:
    """What is to be shown. ``latest``: all that was seen; ``frozen``: what stays on the screen while it is paused.
    ``has_keys``: there is a keyboard."""

    latest: Window
    frozen: Window | None = None
    sort: int = 0
    has_keys: bool = True

    @property
    def window(self) -> Window:
        """What is on the screen."""
        return self.frozen or self.latest


def press(view: View, key: str) -> View | None:
    """The view after a key; None if the key ends the session. Keys that mean nothing change nothing."""
    if key == "q":
        return None
    if key in ("p", " "):
        return replace(view, frozen=None if view.frozen else view.latest)
    if key == "s":
        return replace(view, sort=(view.sort + 1) % len(SORTS))
    return view


def frame(view: View, width: int, height: int) -> Text:
    """The view at that size: at most ``height`` lines of at most ``width`` cells."""
    # The last column stays free: a terminal that has been made narrower meanwhile has one to lose.
    inner = max(width - 1, 1)
    if width < LEAST_WIDTH or height < LEAST_HEIGHT:
        shown = _too_small(view, width, height)
    else:
        head, foot = _head(view, inner, height), _foot(view)
        body = _body(view, inner, height - len(head) - 1)
        shown = [*head, *body, *[Text()] * (height - len(head) - len(body) - 1), foot]
    return lines([_cut(line, inner) for line in shown[:height]])


def _too_small(view: View, width: int, height: int) -> list[Text]:
    """What matters most, first."""
    window = view.window
    count_, p50, _, p99, longest, total = quantile_row(window.sched_latency_total)
    parts = [
        Text(f"{width}×{height}: all is shown from {LEAST_WIDTH}×{LEAST_HEIGHT} on", "bold"),
        *([] if not view.frozen else [Text("PAUSED", "reverse")]),
        Text(f"{printable(window.target.name)} PID {window.target.pid}, {duration(window.duration_ns)}"),
        Text(f"waits to run: {count_}, {total}"),
        Text(f"p50 {p50}  p99 {p99}  max {longest}"),
        Text(f"threads, for a CPU: p99 {quantile_row(window.run_queue)[3]}"),
    ]
    if window.throttling and window.throttling.throttled_periods:
        parts.append(Text(f"THROTTLED for {duration(window.throttling.throttled_ns)}", "bold red"))
    parts.append(Text(f"lost: {count(sum(window.lost.values()))}"))
    return [*parts[: max(height - 1, 1)], _foot(view)]


def _head(view: View, width: int, height: int) -> list[Text]:
    window = view.window
    time = duration(window.duration_ns)
    right = Text(f"PAUSED at {time}", "reverse") if view.frozen else Text(f"for {time}")
    title = title_line(window)
    title.truncate(width - len(right) - 2, overflow="ellipsis", pad=True)
    parts = [Text.assemble(title, "  ", right)]
    if height >= _HIGH:
        parts += place_lines(window, width)
    parts.append(Text(f"{size_and_limit(window)}; est. cost {cost_share(window)} of a CPU"))
    lost = losses(window)
    said = f"{count(sum(n for n, _ in lost))} ({', '.join(f'{count(n)} {reason}' for n, reason in lost)})"
    parts.append(Text(f"lost: {said if lost else 'nothing'}"))
    if window.unseen:
        parts.append(Text(f"can't be seen here: {'; '.join(map(printable, window.unseen))}", "dim"))
    return parts


def _foot(view: View) -> Text:
    if not view.has_keys:
        return Text("Ctrl-C: end", "dim")
    pause = "go on" if view.frozen else "pause"
    if view.window.samples:
        return Text(f"q: end   p: {pause}", "dim")
    following = SORTS[(view.sort + 1) % len(SORTS)][0]
    return Text(f"q: end   p: {pause}   s: sort goroutines by {following}", "dim")


def _body(view: View, width: int, rows: int) -> list[Text]:
    """Beside each other histogram and states, below delays (on a wide terminal with functions), then goroutines."""
    if view.window.samples:
        return _samples(view.window, view.window.samples, rows)
    window, wide = view.window, width >= _WIDE
    left = int(width * (0.5 if wide else _HISTOGRAM_SHARE))
    right = width - left - len(_GAP)
    latency = window.sched_latency_total
    used = _used_slots(latency)
    causes = cause_rows(window)
    most_states = min(len(window.states), _MOST_STATES)
    heights = _share_out(
        rows,
        [
            (7, max(len(used), most_states) + 1),
            (4 + min(len(causes), 3), (4 if window.off_cpu is None else 5) + len(causes)),
            (5, len(window.worst) + 2),
        ],
    )
    upper = _beside(_histogram(latency, left, heights[0]), _states(window, right, heights[0], wide), left)
    if wide:
        middle = _beside(_delays(window, causes, left, heights[1]), _functions(window, right, heights[1]), left)
    else:
        middle = _delays(window, causes, width, heights[1])
    return [*upper, *middle, *_goroutines(view, width, heights[2], wide)]


def _samples(window: Window, samples: Samples, rows: int) -> list[Text]:
    """At the sampled level goroutines are not followed: causes, and what they waited for."""
    threads = columns(("", *QUANTILE_TITLES), [("threads, for a CPU", *quantile_row(window.run_queue))], "<>>>>>>")
    latency = sampled_latency(samples)[:3]  # without what a sample is
    parts = [*latency, *what_samples_waited_for(samples), Text(), threads]
    return [line for part in parts[1:] for line in part.split("\n", allow_blank=True)][:rows]


def _share_out(rows: int, parts: Sequence[tuple[int, int]]) -> list[int]:
    """How many of ``rows`` each part gets, of what it needs at least and what it wants."""
    given = [min(least, wanted) for least, wanted in parts]
    left = rows - sum(given)
    while left > 0 and any(g < wanted for g, (_, wanted) in zip(given, parts, strict=True)):
        for i, (_, wanted) in enumerate(parts):
            if given[i] < wanted and left > 0:
                given[i] += 1
                left -= 1
    return given


def _used_slots(histogram: Histogram) -> range:
    used = [k for k, n in enumerate(histogram.slots) if n]
    return range(used[0], used[-1] + 1) if used else range(0)


def _histogram(histogram: Histogram, width: int, rows: int) -> list[Text]:
    """Waits to run by length. Where there are fewer rows than slots in use, neighbours share a row."""
    title = Text("Waits to run, up to  times", "bold")
    used = _used_slots(histogram)
    if not used:
        return [title, Text("none has ended so far", "dim")]
    together = -(-len(used) // (rows - 1))
    groups = [used[i : i + together] for i in range(0, len(used), together)]
    sums = [sum(histogram.slots[k] for k in group) for group in groups]
    cells = []
    for group, n in zip(groups, sums, strict=True):
        last = group[-1] == len(BOUNDS_SECONDS) - 1
        upper = f"over {bound(BOUNDS_SECONDS[group[0] - 1])}" if last else bound(BOUNDS_SECONDS[group[-1]])
        cells.append((upper, count(n)))
    wide = [max(len(cell[i]) for cell in cells) for i in range(2)]
    wide[0] = max(wide[0], 9)
    longest = max(width - sum(wide) - 4, 1)
    bars = ("█" * -(-n * longest // max(sums)) for n in sums)  # rounded up: what there is can be seen
    return [
        title,
        *(
            Text.assemble(f"{upper:>{wide[0]}}  {n:>{wide[1]}}  ", (bar, "cyan"))
            for (upper, n), bar in zip(cells, bars, strict=True)
        ),
    ]


def _states(window: Window, width: int, rows: int, wide: bool) -> list[Text]:
    """How many goroutines are in which state at a time, on average."""
    titles = ("Where goroutines are", *STATE_TITLES[1:])
    cells = state_rows(window, max(rows - 2, 1) if len(window.states) > rows - 1 else rows - 1)
    if not cells:
        return [Text(titles[0], "bold"), Text("none was seen so far", "dim")]
    if wide:
        return _table(titles, cells, "<<>>>", width, flexible=1)
    narrow = [(reason or state, *numbers) for state, reason, *numbers, _ in cells]
    return _table((titles[0], *titles[2:4]), narrow, "<>>", width)


def _delays(window: Window, causes: Sequence[Sequence[str]], width: int, rows: int) -> list[Text]:
    """Waits to run by what made the goroutine runnable; what kept threads from running, and goroutines that ran for Go
    from doing so."""
    fixed = [
        ("all goroutines", *quantile_row(window.sched_latency_total)),
        ("threads, for a CPU", *quantile_row(window.run_queue)),
    ]
    if window.off_cpu is not None and rows > 4 + min(len(causes), 3):
        fixed.append(("running, off the CPU", *quantile_row(merged(tuple(window.off_cpu.values())))))
    shown = list(causes[: rows - 2 - len(fixed)])
    cells = [*shown, *fixed]
    some = f" ({len(shown)} of {len(causes)})" if len(shown) < len(causes) else ""
    titles = ("Sources of delay" + some, *QUANTILE_TITLES)
    if window.throttling is None:
        limit = Text("no CPU controller counts throttling here", "dim")
    elif window.throttling.throttled_periods:
        limit = Text(throttled(window.throttling), "bold red")
    else:
        limit = Text("not throttled by a CPU limit", "dim")
    return [*_table(titles, cells, "<>>>>>>", width), limit]


def _functions(window: Window, width: int, rows: int) -> list[Text]:
    cells = function_rows(window)[: rows - 1]
    titles = ("Who waited to run most, by start function", *FUNCTION_TITLES[1:])
    return _table(titles, cells, "<>>>>", width) if cells else []


def _goroutines(view: View, width: int, rows: int, wide: bool) -> list[Text]:
    """Those are known one by one that have moved since attach and live."""
    by, key = SORTS[view.sort]
    living = sorted(view.window.worst, key=lambda g: (-key(g), g.g))[: rows - 2]
    title = heading(f"Worst goroutines seen alive, by {by}", "longest, all: waits to run")
    if not living:
        return [title, Text("none was seen so far", "dim")]
    titles = ("began with", "is", "for", "longest", "all", "runs", "runtime.g")
    cells = [_goroutine_row(g, width // 3) for g in living]
    shown = len(titles) if wide else len(titles) - 1
    return [
        title,
        *_table(titles[:shown], [row[:shown] for row in cells], "<<>>>><"[:shown], width, title_style="dim"),
    ]


def _goroutine_row(g: LivingGoroutine, width: int) -> tuple[str, ...]:
    return (
        keep_end(short_function(g.function), width),
        g.reason or g.state or "moving",
        "-" if g.in_state_ns is None else duration(g.in_state_ns),
        duration(g.max_runnable_ns),
        duration(g.runnable_ns),
        count(g.runs),
        f"{g.g:#x}",
    )


def _table(
    titles: Sequence[str],
    rows: Sequence[Sequence[str]],
    align: str,
    width: int,
    flexible: int = 0,
    title_style: str = "bold",
) -> list[Text]:
    table = columns(titles, rows, align, flexible, width=width, indent="", title_style=title_style)
    return list(table.split("\n"))


def _beside(left: Sequence[Text], right: Sequence[Text], width: int) -> list[Text]:
    """Two blocks beside each other, the left one ``width`` cells wide."""
    result = []
    for i in range(max(len(left), len(right))):
        one = left[i].copy() if i < len(left) else Text()
        one.truncate(width, overflow="crop", pad=True)
        result.append(Text.assemble(one, _GAP, right[i]) if i < len(right) else one)
    return result


def _cut(line: Text, width: int) -> Text:
    """Names may hold characters that are two cells wide: what counts is cells."""
    line.truncate(width, overflow="ellipsis")
    line.rstrip()
    return line
