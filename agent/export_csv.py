"""A recording as CSV: a row for each transition, and for what happened to all of a process. docs/export.md describes
the columns."""

from __future__ import annotations

import csv
import io
from collections.abc import Sequence

import numpy as np

from schedtrace import text_rows
from schedtrace.abi import REASON_COUNT
from schedtrace.abi import GoroutineState as State
from schedtrace.events import Array, Flag
from schedtrace.exported import LIMIT_TRACK, STOP_TRACK, Names, StopNames, Write
from schedtrace.lives import NOBODY
from schedtrace.recording import Recording
from schedtrace.text_rows import Column, integers, lines, texts
from schedtrace.timeline import Block, Timeline
from schedtrace.window import CAUSES, STATES

COLUMNS = (
    "time_ns", "unix_ns", "pid", "goroutine", "goid", "function", "tid", "cpu", "from", "to", "left", "left_ns",
    "cause", "reason", "waker", "remark",
)  # fmt: skip
_REMARKS = {
    Flag.BEGAN_BEFORE: "began before",
    Flag.INCONSISTENT: "inconsistent",
    Flag.NO_INTERVAL: "no interval",
    Flag.TAKEN_BACK: "taken back",
}
"""In the order in which they are looked for, the last one winning."""


def write(recording: Recording, timeline: Timeline, out: Write) -> None:
    """Write it, piece by piece. Raises UnreadableRecording, and what ``out`` does."""
    names = Names(recording, timeline)
    table = _Tables(recording, names)
    out((",".join(COLUMNS) + "\r\n").encode())
    for block in timeline.blocks():
        if len(block.moves):
            out(_rows(recording, timeline, names, table, block))
        out(_stops(recording, table, block.stops))
        out(_throttles(recording, table, block.throttles))


class _Tables:
    """What is the same for all rows of a target."""

    def __init__(self, recording: Recording, names: Names) -> None:
        self.slots = sorted(recording.targets)
        self.pids = np.array([recording.targets[slot].target.pid for slot in self.slots], np.int64)
        self.states = [_quoted(STATES.get(state, str(state))) for state in range(State.COUNT)]
        self.causes = [_quoted(cause) for cause in CAUSES]
        found: dict[str, int] = {}
        self._reasons = [
            [found.setdefault(names.reason(slot, reason), len(found)) for reason in range(REASON_COUNT)]
            for slot in self.slots
        ]
        self.reasons = [_quoted(reason) for reason in found]
        self.stops = StopNames(recording)

    def reason_places(self, slot_places: Array, reasons: Array) -> Array:
        places: Array = np.array(self._reasons or [[0]], np.int64)[slot_places, reasons]
        return places


def _quoted(field: str) -> str:
    text = io.StringIO()
    csv.writer(text, lineterminator="").writerow([field])
    return text.getvalue()


def _rows(recording: Recording, timeline: Timeline, names: Names, tables: _Tables, block: Block) -> bytes:
    moves, numbers = block.moves, block.numbers
    slot_places = np.searchsorted(tables.slots, moves["slot"])
    of_life = numbers != NOBODY
    who, who_places = np.unique(numbers[of_life], return_inverse=True)
    lives = timeline.lives[who]
    places = np.full(len(moves), len(who), np.int64)
    places[of_life] = who_places
    functions = [*map(_quoted, names.functions(who.tolist())), ""]
    goids = [str(goid) if goid else "" for goid in lives["goid"].tolist()] + [""]
    time_ns, flags = moves["time_ns"].astype(np.int64), moves["flags"]
    no_interval = (flags & (Flag.NO_INTERVAL | Flag.TAKEN_BACK)) != 0
    left_ns = np.maximum(time_ns - moves["since_ns"].astype(np.int64), 0)
    runnable, waiting = (_either(moves, state) for state in (State.RUNNABLE, State.WAITING))
    has_waker = block.wakers != NOBODY
    header = recording.header
    fields: Sequence[Column] = (
        integers(time_ns - header.started_ns),
        integers(time_ns - header.started_ns + header.started_wall_ns),
        integers(tables.pids[slot_places]),
        text_rows.where(of_life, integers(np.where(of_life, numbers, 0))),
        texts(goids, places),
        texts(functions, places),
        integers(moves["tid"]),
        integers(moves["cpu"]),
        texts(tables.states, moves["old"]),
        texts(tables.states, moves["new"]),
        texts(tables.states, moves["left"]),
        text_rows.where(~no_interval, integers(left_ns)),
        text_rows.where(runnable & of_life, texts(tables.causes, moves["cause"])),
        text_rows.where(waiting & of_life, texts(tables.reasons, tables.reason_places(slot_places, moves["reason"]))),
        text_rows.where(has_waker, integers(np.where(has_waker, block.wakers, 0))),
        texts(["", *_REMARKS.values()], _remark(flags)),
    )
    return _lines(len(moves), fields)


def _lines(count: int, fields: Sequence[Column]) -> bytes:
    columns: list[Column] = []
    for field in fields:
        columns += [field, b","]
    return lines(count, [*columns[:-1], b"\r\n"])


def _stops(recording: Recording, tables: _Tables, stops: Array) -> bytes:
    """Rows for stops of the world, at their ends."""
    known = (stops["flags"] & Flag.BEGAN_BEFORE) == 0
    length_ns = stops["time_ns"].astype(np.int64) - stops["since_ns"].astype(np.int64)
    return _of_process(
        recording,
        tables,
        stops,
        stops["time_ns"].astype(np.int64),
        tid=integers(stops["tid"]),
        left=STOP_TRACK.encode(),
        left_ns=text_rows.where(known, integers(length_ns)),
        reason=texts(list(map(_quoted, tables.stops.names)), tables.stops.of(stops)),
        remark=texts([_REMARKS[Flag.BEGAN_BEFORE], ""], known.astype(np.int64)),
    )


def _throttles(recording: Recording, tables: _Tables, throttles: Array) -> bytes:
    """Rows for what a CPU limit held back, at their ends."""
    length_ns = throttles["end_ns"] - throttles["begin_ns"]
    counted = (b"periods=", integers(throttles["periods"]), b" throttled_ns=", integers(throttles["throttled_ns"]))
    return _of_process(
        recording,
        tables,
        throttles,
        throttles["end_ns"],
        left=LIMIT_TRACK.encode(),
        left_ns=text_rows.where(throttles["is_seen"], integers(length_ns)),
        reason=text_rows.joined(len(throttles), counted),
        remark=texts(["some time before", ""], throttles["is_seen"].astype(np.int64)),
    )


def _of_process(recording: Recording, tables: _Tables, records: Array, time_ns: Array, **fields: Column) -> bytes:
    """Rows that are about no goroutine: ``fields`` by column."""
    header = recording.header
    pids = np.array([*tables.pids, 0], np.int64)
    fields |= {
        "time_ns": integers(time_ns - header.started_ns),
        "unix_ns": integers(time_ns - header.started_ns + header.started_wall_ns),
        "pid": integers(pids[np.searchsorted(tables.slots, records["slot"])]),
    }
    return _lines(len(records), [fields.get(column, b"") for column in COLUMNS])


def _either(moves: Array, state: int) -> Array:
    either: Array = (moves["new"] == state) | (moves["left"] == state)
    return either


def _remark(flags: Array) -> Array:
    remark = np.zeros(len(flags), np.int64)
    for place, flag in enumerate(_REMARKS, 1):
        remark[(flags & flag) != 0] = place
    return remark
