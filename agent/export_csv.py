"""A recording as CSV: a row for each transition. docs/export.md describes the columns."""

from __future__ import annotations

import csv
import io
from collections.abc import Sequence

import numpy as np

from schedtrace import text_rows
from schedtrace.abi import REASON_COUNT
from schedtrace.abi import GoroutineState as State
from schedtrace.events import Array, Flag
from schedtrace.exported import Names, Write
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
    columns: list[Column] = []
    for field in fields:
        columns += [field, b","]
    return lines(len(moves), [*columns[:-1], b"\r\n"])


def _either(moves: Array, state: int) -> Array:
    either: Array = (moves["new"] == state) | (moves["left"] == state)
    return either


def _remark(flags: Array) -> Array:
    remark = np.zeros(len(flags), np.int64)
    for place, flag in enumerate(_REMARKS, 1):
        remark[(flags & flag) != 0] = place
    return remark
