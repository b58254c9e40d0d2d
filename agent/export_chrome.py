"""A recording as Chrome's JSON trace events, which Perfetto and the legacy viewer (chrome://tracing, Catapult) open.

Viewers know processes and threads only. Each target becomes three processes: its goroutines, its threads by what they
ran, and its threads for the kernel; and a fourth for what happens to all of it, if anything does. All "threads" have
numbers of their own, since viewers mix up equal ones.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence

import numpy as np

from schedtrace.abi import GoroutineState as State
from schedtrace.events import Array
from schedtrace.exported import (
    LIMIT_TRACK,
    SOME_TIME_NAME,
    STOP_TRACK,
    THROTTLED_NAME,
    Names,
    StateNames,
    StopNames,
    Write,
    batches,
    remarks,
    shown,
    stopping_ns,
)
from schedtrace.lives import NOBODY
from schedtrace.recording import Recording
from schedtrace.text_rows import Column, integers, lines, texts, thousandths, where
from schedtrace.timeline import KERNEL_STATES, ON_CPU, RUNNABLE, STATE_COUNT, Block, Timeline

GOROUTINES, THREADS, KERNEL, WHOLE = range(4)
"""Added to four times the place of a target among all, and 1, they give the number of a process."""
_KINDS = ("goroutines", "threads: what they ran", "threads: on CPUs", "the process")
FIRST_GOROUTINE = 10_000_000  # more than any thread's number
FIRST_KERNEL = 1_000_000_000
FIRST_STOPS, FIRST_LIMIT = 2_000_000_000, 2_100_000_000  # to which the place of the target is added
_COLOURS: Mapping[int, str] = {  # names of colours that the legacy viewer knows
    State.RUNNING: "thread_state_running",
    State.RUNNABLE: "thread_state_runnable",
    State.WAITING: "thread_state_sleeping",
    State.SYSCALL: "thread_state_iowait",
}


def write(recording: Recording, timeline: Timeline, out: Write) -> None:
    """Write it, piece by piece. Raises UnreadableRecording, and what ``out`` does."""
    names = Names(recording, timeline)
    rows = _Rows(recording, timeline, names)
    header = recording.header
    about = {
        "schedtrace": shown(header.schedtrace),
        "kernel": shown(header.kernel),
        "started_unix_ns": header.started_wall_ns,
        "remarks": remarks(recording, timeline),
    }
    out(f'{{"displayTimeUnit":"ns","otherData":{json.dumps(about)},"traceEvents":[\n'.encode())
    for metadata in _metadata(recording, timeline, names):
        out("".join(f"{json.dumps(one, separators=(',', ':'))},\n" for one in metadata).encode())
    for block in timeline.blocks():
        for piece in (rows.spans(block.spans), rows.runs(block.runs), rows.kernel(block.kernel), *rows.wakes(block)):
            out(piece)
        out(rows.stops(block.stops))
        out(rows.throttles(block.throttles))
    end = {"ph": "i", "s": "g", "name": "end of the recording", "pid": 1, "tid": 0}
    end["ts"] = (timeline.last_ns - timeline.first_ns) / 1000
    out(f"{json.dumps(end)}\n]}}\n".encode())


def process_number(place: int, kind: int) -> int:
    """Of a target, by its place among all in the order of their slots."""
    return len(_KINDS) * place + kind + 1


def _metadata(recording: Recording, timeline: Timeline, names: Names) -> Iterator[list[dict[str, object]]]:
    slots = sorted(recording.targets)
    found = []
    for place, slot in enumerate(slots):
        pid = recording.targets[slot].target.pid
        tracks = ((STOP_TRACK, FIRST_STOPS, timeline.stopped), (LIMIT_TRACK, FIRST_LIMIT, timeline.throttled))
        shown_tracks = [(name, first + place) for name, first, slots_there in tracks if slot in slots_there]
        for name, number in shown_tracks:
            found.append(_name("thread_name", process_number(place, WHOLE), number, name))
        for kind, what in enumerate(_KINDS if shown_tracks else _KINDS[:WHOLE]):
            number = process_number(place, kind)
            found.append(_name("process_name", number, 0, f"{names.process(slot)} {pid}, {what}"))
            found.append({"ph": "M", "name": "process_sort_index", "pid": number, "args": {"sort_index": number}})
    for slot, tid in timeline.threads.tolist():
        place = slots.index(slot)
        found.append(_name("thread_name", process_number(place, THREADS), tid, f"M, thread {tid}"))
        found.append(_name("thread_name", process_number(place, KERNEL), FIRST_KERNEL + tid, f"thread {tid}"))
    yield found
    for numbers in batches(len(timeline.lives)):
        places = np.searchsorted(slots, timeline.lives["slot"][numbers]).tolist()
        yield [
            _name("thread_name", process_number(place, GOROUTINES), FIRST_GOROUTINE + number, name)
            for number, place, name in zip(numbers, places, names.goroutines(numbers), strict=True)
        ]


def _name(what: str, process: int, thread: int, name: str) -> dict[str, object]:
    return {"ph": "M", "name": what, "pid": process, "tid": thread, "args": {"name": name}}


class _Rows:
    """Events, a line each."""

    def __init__(self, recording: Recording, timeline: Timeline, names: Names) -> None:
        self._names, self._states, self._stops = names, StateNames(recording, names), StopNames(recording)
        self._start_ns = timeline.first_ns
        self._slots = np.array(sorted(recording.targets), np.int64)
        self._state_names = [json.dumps(name) for name in self._states.names]
        self._colours = [_colour(_COLOURS.get(state)) for state in range(STATE_COUNT)]

    def spans(self, spans: Array) -> bytes:
        name = texts(self._state_names, self._states.of(spans))
        thread, colours = spans["number"] + FIRST_GOROUTINE, texts(self._colours, spans["state"])
        return self._complete(spans, name, self._process(spans, GOROUTINES), thread, colours)

    def runs(self, runs: Array) -> bytes:
        who, places = np.unique(runs["number"], return_inverse=True)
        name = texts([json.dumps(one) for one in self._names.goroutines(who.tolist())], places)
        return self._complete(runs, name, self._process(runs, THREADS), runs["tid"])

    def kernel(self, spans: Array) -> bytes:
        name = texts([json.dumps(state) for state in KERNEL_STATES], spans["state"])
        colours = [_colour(_KERNEL_COLOURS.get(state)) for state in range(len(KERNEL_STATES))]
        tid = spans["tid"].astype(np.int64) + FIRST_KERNEL
        return self._complete(spans, name, self._process(spans, KERNEL), tid, texts(colours, spans["state"]))

    def _complete(self, spans: Array, name: Array, process: Array, thread: Array, colour: Column = b"") -> bytes:
        ran = (spans["tid"] != 0) if "number" in (spans.dtype.names or ()) else spans["state"] == ON_CPU
        begin = np.maximum(spans["begin_ns"] - self._start_ns, 0)
        length = spans["end_ns"] - spans["begin_ns"]
        form = np.where(ran, 1, 0) + np.where(spans["is_open"], 2, 0)
        fields: Sequence[Column] = (
            b'{"ph":"X","name":', name, b',"pid":', integers(process), b',"tid":', integers(thread),
            b',"ts":', *thousandths(begin), b',"dur":', *thousandths(length),
            colour, texts(_ARGUMENTS, form), where(ran, integers(spans["cpu"])), texts(_ARGUMENTS_END, form), b"},\n",
        )  # fmt: skip
        return lines(len(spans), fields)

    def stops(self, stops: Array) -> bytes:
        """Of the world."""
        name = texts([json.dumps(one) for one in self._stops.names], self._stops.of(stops))
        since, known = stops["since_ns"].astype(np.int64), stops["stopped_ns"] != 0
        fields: Sequence[Column] = (
            b'{"ph":"X","name":', name, *self._whole(stops, FIRST_STOPS, since), b',"dur":',
            *thousandths(stops["time_ns"].astype(np.int64) - since), b',"args":{"tid":', integers(stops["tid"]),
            texts(["", ',"stopping_ns":'], known.astype(np.int64)),
            where(known, integers(stopping_ns(stops))), b"}},\n",
        )  # fmt: skip
        return lines(len(stops), fields)

    def throttles(self, throttles: Array) -> bytes:
        """By the CPU limit; of no length where it is not known when it was."""
        name = texts([json.dumps(SOME_TIME_NAME), json.dumps(THROTTLED_NAME)], throttles["is_seen"].astype(np.int64))
        fields: Sequence[Column] = (
            b'{"ph":"X","name":', name, *self._whole(throttles, FIRST_LIMIT, throttles["begin_ns"]), b',"dur":',
            *thousandths(throttles["end_ns"] - throttles["begin_ns"]), b',"args":{"periods":',
            integers(throttles["periods"]), b',"throttled_ns":', integers(throttles["throttled_ns"]), b"}},\n",
        )  # fmt: skip
        return lines(len(throttles), fields)

    def _whole(self, records: Array, first_thread: int, begin_ns: Array) -> Sequence[Column]:
        places = np.searchsorted(self._slots, records["slot"].astype(np.int64))
        return (
            b',"pid":', integers(self._process(records, WHOLE)), b',"tid":', integers(first_thread + places), b',"ts":',
            *thousandths(np.maximum(begin_ns - self._start_ns, 0)),
        )  # fmt: skip

    def wakes(self, block: Block) -> Iterator[bytes]:
        """Arrows, from the goroutine that ran to the one that it woke."""
        woken = block.wakers != NOBODY
        moves, wakers = block.moves[woken], block.wakers[woken]
        yield self._flow(b"s", moves["time_ns"], moves, wakers, block.flows[woken], b"")
        # Bound to the span that begins here, which is that of the woken goroutine.
        yield self._flow(b"f", moves["time_ns"], moves, block.numbers[woken], block.flows[woken], b',"bp":"e"')

    def _flow(self, kind: bytes, time_ns: Array, moves: Array, numbers: Array, flows: Array, more: bytes) -> bytes:
        fields: Sequence[Column] = (
            b'{"ph":"', kind, b'","name":"wakes","cat":"wake","id":', integers(flows), b',"pid":',
            integers(self._process(moves, GOROUTINES)), b',"tid":', integers(numbers + FIRST_GOROUTINE), b',"ts":',
            *thousandths(time_ns.astype(np.int64) - self._start_ns), more, b"},\n",
        )  # fmt: skip
        return lines(len(moves), fields)

    def _process(self, records: Array, kind: int) -> Array:
        places: Array = len(_KINDS) * np.searchsorted(self._slots, records["slot"].astype(np.int64)) + kind + 1
        return places


_KERNEL_COLOURS = {ON_CPU: "thread_state_running", RUNNABLE: "thread_state_runnable"}
_ARGUMENTS = ("", ',"args":{"cpu":', ',"args":{"until":"the end"', ',"args":{"until":"the end","cpu":')
_ARGUMENTS_END = ("", "}", "}", "}")


def _colour(name: str | None) -> str:
    return f',"cname":"{name}"' if name else ""
