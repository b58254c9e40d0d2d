"""A recording as one page of HTML, which needs nothing else: no network, and its pictures no script.

Each target has: how long its goroutines waited to run, over time; what goroutines and threads did, over time; start
functions; the longest waits to run, and what ran instead.
"""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Iterator, Sequence
from datetime import UTC, datetime
from html import escape
from importlib import resources

import numpy as np

from schedtrace.abi import GoroutineState as State
from schedtrace.events import Array
from schedtrace.exported import LIMIT_TRACK, STOP_TRACK, Names, StopNames, Write, losses, remarks, shown
from schedtrace.formatting import count, duration, plural, share, short_function
from schedtrace.join import UNKNOWN_FUNCTION
from schedtrace.page_charts import Axis, Layer, heatmap, stacked
from schedtrace.picture import CANDIDATES, SLICES, Held, Picture, Wait, pictures
from schedtrace.recording import Recording
from schedtrace.timeline import BLOCKED, KERNEL_STATES, OFF_CPU, ON_CPU, RUNNABLE, Timeline
from schedtrace.window import CAUSES

_TOP_FUNCTIONS = 20
_TOP_REASONS = 4
_RAN = 4
_NS = 1e9

Cell = tuple[str, str | float]
"""What a cell shows, and what its column is sorted by."""


def write(recording: Recording, timeline: Timeline, out: Write) -> None:
    """Write it. Raises UnreadableRecording, and what ``out`` does."""
    names = Names(recording, timeline)
    found = pictures(timeline, sorted(recording.targets))
    for piece in _page(recording, timeline, names, found):
        out(piece.encode())


def _page(recording: Recording, timeline: Timeline, names: Names, found: Sequence[Picture]) -> Iterator[str]:
    style, script = (resources.files("schedtrace").joinpath(name).read_text() for name in ("page.css", "page.js"))
    policy = f"default-src 'none'; style-src 'unsafe-inline'; script-src '{_hash(script)}'; img-src data:"
    title = f"schedtrace: {', '.join(names.process(one.slot) for one in found)}"
    header = recording.header
    began = datetime.fromtimestamp(header.started_wall_ns / _NS, UTC) if header.started_wall_ns < 1 << 61 else None
    length_ns = timeline.last_ns - timeline.first_ns
    yield (
        f'<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8"><title>{escape(title)}</title>\n'
        f'<meta http-equiv="Content-Security-Policy" content="{policy}">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f'<link rel="icon" href="data:,">\n<style>\n{style}</style></head>\n<body>\n<h1>{escape(title)}</h1>\n'
    )
    when = f"{began:%Y-%m-%d %H:%M:%S} UTC" if began else "at a time that is not known"
    kept = f", of which {escape(shown(header.when))} was kept" if header.when else ""
    what = f"{plural(timeline.transitions, 'transition')} of {plural(len(timeline.lives), 'goroutine')}"
    where = f"Linux {escape(shown(header.kernel))}, {plural(header.cpus, 'CPU')}"
    yield f'<p class="quiet">Recorded {when}, for {duration(length_ns)}{kept}: {what} on '
    yield f"{plural(len(timeline.threads), 'thread')}. {where}.</p>\n"
    if missing := list(losses(recording, timeline)):
        yield f"<p><strong>Not all is here:</strong> {escape(shown('; '.join(missing)))}</p>\n"
    axis = Axis(found[0].slice_ns if found else 1, _holes(recording, timeline))
    for picture in found:
        yield f"<section>\n{''.join(_section(recording, names, picture, axis))}</section>\n"
    items = "".join(f"<li>{escape(one)}</li>" for one in remarks(recording, timeline))
    yield f"<h2>What is not here</h2>\n<ul>{items}</ul>\n"
    yield f'<div id="tip" role="status"></div>\n<script>{script}</script>\n</body></html>\n'


def _hash(script: str) -> str:
    return f"sha256-{base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()}"


def _holes(recording: Recording, timeline: Timeline) -> list[tuple[float, float]]:
    length_ns = max(timeline.last_ns - timeline.first_ns, 1)

    def place(time_ns: int) -> float:
        return min(max(time_ns - timeline.first_ns, 0) / length_ns, 1.0) * SLICES

    gaps = [(gap.since_ns, gap.until_ns) for gap in recording.gaps]
    lost = [(one.since_ns, one.until_ns) for one in recording.lost]
    return [(place(since_ns), place(until_ns)) for since_ns, until_ns in gaps + lost]


def _section(recording: Recording, names: Names, picture: Picture, axis: Axis) -> Iterator[str]:
    target = recording.targets[picture.slot].target
    quota = f"; CPU limit {target.quota_cores:.2f} cores" if target.quota_cores else ""
    who = f"PID {target.pid}, {escape(shown(target.go_version))}{quota}"
    yield f'<h2>{escape(names.process(picture.slot))} <span class="quiet">{who}</span></h2>\n'
    yield _figure(
        "Waiting to run",
        "How long goroutines were runnable until they ran, over time: stronger where there were more.",
        heatmap(picture.latency, axis),
    )
    slice_ns = picture.slice_ns
    active = [
        Layer("running", "running", picture.states[:, State.RUNNING] / slice_ns),
        Layer("syscall", "syscall", picture.states[:, State.SYSCALL] / slice_ns),
        Layer("runnable", "runnable", picture.states[:, State.RUNNABLE] / slice_ns),
        Layer("another state, or not known", "other", _others(picture) / slice_ns),
    ]
    yield _figure(
        "Goroutines that were not waiting",
        "How many at a time, on average.",
        stacked("Goroutines that were not waiting, over time", active, axis, as_shares=False),
    )
    shares = [*active, *_waits(picture, names)]
    yield _figure(
        "What goroutines did",
        "Shares of the time of all goroutines, by state and wait reason.",
        stacked("Shares of states, over time", shares, axis, as_shares=True),
    )
    threads = [
        Layer(KERNEL_STATES[ON_CPU], "running", picture.kernel[:, ON_CPU] / slice_ns),
        Layer("runnable, waiting for a CPU", "runnable", picture.kernel[:, RUNNABLE] / slice_ns),
    ]
    yield _figure(
        "Threads",
        "For the kernel: how many at a time, on average. Those that are blocked are left out.",
        stacked("Threads on CPUs and waiting for one, over time", threads, axis, as_shares=False),
    )
    yield from _held(StopNames(recording), picture)
    yield from _functions(recording, picture)
    yield from _worst(names, picture)


def _figure(title: str, remark: str, picture: str) -> str:
    return f'<h3>{title}</h3>\n<p class="quiet">{remark}</p>\n<figure>{picture}</figure>\n'


def _others(picture: Picture) -> Array:
    named = [State.RUNNING, State.SYSCALL, State.RUNNABLE, State.WAITING]
    others: Array = np.delete(picture.states, named, axis=1).sum(axis=1)
    return others


def _waits(picture: Picture, names: Names) -> Iterator[Layer]:
    sums = picture.waits.sum(axis=0)
    order = np.argsort(-sums, kind="stable")
    for i, reason in enumerate(order[:_TOP_REASONS].tolist()):
        if sums[reason]:
            name = names.reason(picture.slot, reason) or "reason not known"
            yield Layer(f"waiting: {name}", f"wait-{i}", picture.waits[:, reason] / picture.slice_ns)
    rest = picture.waits[:, order[_TOP_REASONS:]].sum(axis=1)
    yield Layer("waiting: other reasons", f"wait-{_TOP_REASONS}", rest / picture.slice_ns)


_HELD_REMARK = """What held it back: the world was stopped, or the CPU limit kept threads on some CPU from running, as
far as it is known when."""


def _held(names: StopNames, picture: Picture) -> Iterator[str]:
    held = {LIMIT_TRACK: picture.throttles} if picture.throttles.count else {}
    for reason, one in picture.stops.items():
        name = f"{STOP_TRACK}: {names.name(picture.slot, reason)}"
        held[name] = held.get(name, Held()) + one
    rows: list[list[Cell]] = [
        [(what, what), (count(one.count), one.count), *((duration(ns), ns) for ns in (one.sum_ns, one.longest_ns))]
        for what, one in sorted(held.items(), key=lambda item: -item[1].sum_ns)
    ]
    if rows:
        yield f'<h3>The process as a whole</h3>\n<p class="quiet">{_HELD_REMARK}</p>\n'
        yield _table(("held back by", "times", "in all", "longest"), rows, text_columns={0})


def _functions(recording: Recording, picture: Picture) -> Iterator[str]:
    some, more = picture.functions[:_TOP_FUNCTIONS], len(picture.functions) - _TOP_FUNCTIONS
    rows: list[list[Cell]] = []
    for one in some:
        name = shown(recording.symbols.get((picture.slot, one.start_pc), UNKNOWN_FUNCTION))
        mean = one.runnable_ns / one.runs if one.runs else 0.0
        times = (mean, one.longest_runnable_ns, one.runnable_ns, one.running_ns, one.waiting_ns)
        numbers: list[Cell] = [(count(n), n) for n in (one.goroutines, one.runs)]
        rows.append([(short_function(name), name), *numbers, *((duration(ns), ns) for ns in times)])
    titles = ("function", "goroutines", "runs", "mean wait to run", "longest", "runnable", "running", "waiting")
    rest = f"; {count(more)} more" if more > 0 else ""
    yield f'<h3>Start functions</h3>\n<p class="quiet">By the function that goroutines began with{rest}.</p>\n'
    yield _table(titles, rows, text_columns={0})


_WORST_REMARK = f"""Of waits at the same time only the longest; others: how many more, of the {CANDIDATES} longest.
Ran instead: goroutines of this process that ran meanwhile, and for how long. Threads: how long the process's threads
were on CPUs, and how long runnable without one, summed up over them; then what the thread did that ran the goroutine in
the end."""


def _worst(names: Names, picture: Picture) -> Iterator[str]:
    rows: list[list[Cell]] = []
    for wait in picture.worst:
        at_ns, length = wait.begin_ns - picture.begin_ns, wait.end_ns - wait.begin_ns
        texts = (names.goroutines([wait.number])[0], CAUSES[wait.cause])
        more = (_ran(names, wait), _threads(wait.threads_ns), _thread(wait, length))
        rows.append([
            (f"{at_ns / _NS:.6f} s", at_ns), (duration(length), length), *((text, text) for text in texts),
            (count(wait.others), wait.others), *((text, text) for text in more),
        ])  # fmt: skip
    titles = ("since", "waited", "goroutine", "woken by", "others", "ran instead", "threads", "the thread it got")
    yield f'<h3>The longest waits to run, and what ran instead</h3>\n<p class="quiet">{_WORST_REMARK}</p>\n'
    yield _table(titles, rows, text_columns={2, 3, 5, 6, 7})


def _ran(names: Names, wait: Wait) -> str:
    some = wait.ran[:_RAN]
    labels = names.goroutines([number for number, _ in some])
    parts = [f"{_together(duration(ns))} {label}" for label, (_, ns) in zip(labels, some, strict=True)]
    if rest := wait.ran[_RAN:]:
        parts.append(f"{_together(duration(sum(ns for _, ns in rest)))} {plural(len(rest), 'other')}")
    return "\n".join(parts) or "no goroutine of this process"


def _threads(ns: Sequence[int]) -> str:
    return "\n".join(_together(f"{duration(ns[state])} {KERNEL_STATES[state]}") for state in (ON_CPU, RUNNABLE))


def _together(text: str) -> str:
    return text.replace(" ", "\u00a0")


def _thread(wait: Wait, length: int) -> str:
    known = sum(wait.thread_ns)
    if not known:
        return f"thread {wait.tid}\nnot known"
    blocked = wait.thread_ns[BLOCKED] + wait.thread_ns[OFF_CPU]
    parts = (("on CPU", wait.thread_ns[ON_CPU]), ("runnable", wait.thread_ns[RUNNABLE]), ("blocked", blocked))
    return "\n".join([f"thread {wait.tid}", *(_together(f"{share(ns / length)} {name}") for name, ns in parts if ns)])


def _table(titles: Sequence[str], rows: Sequence[Sequence[Cell]], text_columns: set[int]) -> str:
    kinds = [' class="text"' if i in text_columns else "" for i in range(len(titles))]
    head = "".join(
        f'<th scope="col"{kind}><button type="button">{escape(title)}</button></th>'
        for kind, title in zip(kinds, titles, strict=True)
    )
    body = "".join(f"<tr>{''.join(map(_cell, kinds, row))}</tr>\n" for row in rows)
    return f'<div class="scroll"><table><thead><tr>{head}</tr></thead>\n<tbody>{body}</tbody></table></div>\n'


def _cell(kind: str, cell: Cell) -> str:
    text, key = cell
    return f'<td{kind} data-value="{escape(str(key))}">{escape(text)}</td>'
