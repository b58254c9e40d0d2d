"""What becomes of events on their way from the kernel to a file: all are written, or only the last seconds of them, at
the end or whenever a goroutine waits for too long. No step of Python is made for a single event.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection
from time import monotonic_ns
from typing import Protocol

import numpy as np

from schedtrace.abi import GoroutineState
from schedtrace.condition import Condition
from schedtrace.event_ring import EventRing
from schedtrace.events import CGROUP, EVENT, GOROUTINE, TRANSITION, Array, EventType, Flag, of_type
from schedtrace.recording import CONTROL_MOST_BYTES, Writer
from schedtrace.recording_frames import Gap, Lost, Trigger

KEPT_MOST_BYTES = 1 << 28
"""Of events kept in memory."""
END_BYTES = 1 << 18
"""Of a file's limit, what is left for its last frames."""
_FRAME_BYTES = 16  # more than a frame has before its events
_COMPACT_EVENTS = 1 << 14
_LOST_PAUSE_NS = 1_000_000_000
_LOST_A_TIME = 50  # no pause is longer than a fiftieth of what has gone by
_LOST_MOST_BYTES = CONTROL_MOST_BYTES // 8
_TRIGGERS_MOST_BYTES = CONTROL_MOST_BYTES // 4
_OLDER = "older than what was to be kept"


class Sink(Protocol):
    """Takes events in the order in which they come."""

    full: bool
    """The file has reached its limit."""

    def add(self, events: Array) -> None: ...

    def end(self) -> None:
        """The recording ends."""


class LeftOut:
    """Counts events that are not written."""

    def __init__(self) -> None:
        self.count = 0
        self._since_ns = self._until_ns = 0

    def add(self, events: Array) -> None:
        """These are not."""
        if len(events):
            self._since_ns = self._since_ns if self.count else int(events["time_ns"][0])
            self._until_ns = int(events["time_ns"][-1])
            self.count += len(events)

    def say(self, writer: Writer, why: str) -> None:
        """Write that they are missing, if any are, and begin anew."""
        if self.count:
            writer.frame(Gap(self._since_ns, max(self._until_ns, self._since_ns), self.count, why))
        self.count = 0


class Everything:
    """Writes all events, until the file has ``most_bytes``."""

    def __init__(self, writer: Writer, most_bytes: int) -> None:
        self._writer, self._most_bytes = writer, most_bytes
        self._left_out = LeftOut()
        self.full = False

    def add(self, events: Array) -> None:
        """Write these, as far as there is room."""
        room = max(self._most_bytes - END_BYTES - self._writer.bytes_written, 0) // EVENT.itemsize
        if self.full or len(events) > room:
            self._left_out.add(events[0 if self.full else room :])
            events = events[: 0 if self.full else room]
            self.full = True
        if len(events):
            self._writer.events(events)

    def end(self) -> None:
        """Say what there was no room for."""
        self._left_out.say(self._writer, "the file had reached its limit")


class Last:
    """Keeps the last seconds of events. They are written at the end or, with a condition, when it holds."""

    def __init__(
        self, writer: Writer, most_bytes: int, kept_ns: int, condition: Condition | None = None, pause_ns: int = 0
    ) -> None:
        """``pause_ns``: not twice within that time is something written because the condition holds. If it holds again
        before, it is written then, as far as it is still kept."""
        self._writer, self._most_bytes = writer, most_bytes
        self._kept_ns, self._condition, self._pause_ns = kept_ns, condition, pause_ns
        self._chunks: deque[Array] = deque()
        self._bytes = 0
        # Of what was left out: who goroutines are that may still live, and in which cgroup CPUs run.
        self._known = np.zeros(0, EVENT)
        self._known_compact = 0
        self._left_out = LeftOut()
        self._pause_until_ns = 0
        self._pending: Trigger | None = None
        self.triggers = 0
        """How often something was written because the condition held."""
        self.full = False

    def add(self, events: Array) -> None:
        """Keep these, and let go of what is too old."""
        if not len(events):
            return
        self._chunks.append(events)
        self._bytes += events.nbytes
        newest_ns = int(events["time_ns"][-1])
        if self._condition and not self._pending:
            self._pending = first_wait(events, self._condition)
        if self._pending and newest_ns >= self._pause_until_ns:
            self._pause_until_ns = newest_ns + self._pause_ns
            self._write_pending()
        while self._chunks and (
            self._bytes > KEPT_MOST_BYTES or int(self._chunks[0]["time_ns"][-1]) < newest_ns - self._kept_ns
        ):
            self._leave_out(self._chunks.popleft())
        if self._pending and self._pending.time_ns < newest_ns - self._kept_ns:
            self._pending = None

    def _write_pending(self) -> None:
        self.triggers += 1
        self._write(self._pending)
        self._pending = None
        self.full |= self._writer.control_bytes > _TRIGGERS_MOST_BYTES

    def end(self) -> None:
        """Write what is kept, if no condition says when; else, that it is left out."""
        if not self._condition:
            self._write(None)
        elif self._pending:
            self._write_pending()
        for events in self._chunks:
            self._left_out.add(events)
        self._chunks.clear()
        self._left_out.say(self._writer, _OLDER if not self._condition else "nothing happened that was waited for")

    def _leave_out(self, events: Array) -> None:
        self._bytes -= events.nbytes
        moves: Array = events.view(TRANSITION)
        tells = (events["type"] == EventType.GOROUTINE) | (events["type"] == EventType.CGROUP)
        tells |= _deaths(moves)
        self._left_out.add(events)
        self._known = np.concatenate([self._known, events[tells]])
        if len(self._known) > 2 * self._known_compact + _COMPACT_EVENTS:
            self._known = latest(self._known)
            self._known_compact = len(self._known)

    def _write(self, trigger: Trigger | None) -> None:
        known = latest(self._known)
        room = self._most_bytes - END_BYTES - self._writer.bytes_written - known.nbytes
        while self._chunks and self._bytes + _FRAME_BYTES * len(self._chunks) > room:
            self.full = True
            self._leave_out(self._chunks.popleft())
            known = latest(self._known)
        if self._condition and not self._chunks:
            return
        self._left_out.say(self._writer, _OLDER)
        if trigger:
            self._writer.frame(trigger)
        if len(known):
            self._writer.events(known)
        while self._chunks:
            self._writer.events(self._chunks.popleft())
        self._known, self._known_compact = np.zeros(0, EVENT), 0
        self._bytes = 0


def _deaths(moves: Array) -> Array:
    dead = (moves["type"] == EventType.TRANSITION) & (moves["new"] == GoroutineState.DEAD)
    dying: Array = dead & ((moves["flags"] & Flag.NO_INTERVAL) == 0)
    return dying


def latest(events: Array) -> Array:
    """Of events that say who goroutines are, that they end, or which cgroup a CPU runs: those that still say something
    at the end of them, in their order."""
    is_cgroup = events["type"] == EventType.CGROUP
    is_name = events["type"] == EventType.GOROUTINE
    subject = np.where(is_cgroup, events.view(CGROUP)["cpu"].astype(np.uint64), events.view(GOROUTINE)["g"])
    order = np.lexsort((subject, is_cgroup, events["slot"]))  # which leaves the order of events about the same
    slot, cgroup, subject = events["slot"][order], is_cgroup[order], subject[order]
    starts = np.ones(len(order), bool)
    starts[1:] = (slot[1:] != slot[:-1]) | (cgroup[1:] != cgroup[:-1]) | (subject[1:] != subject[:-1])
    last = np.flatnonzero(np.append(starts[1:], True)[: len(order)])
    # What is said of a goroutine begins with its first event; of a CPU, only the last one counts.
    first = starts | (is_name & ((events["flags"] & Flag.FIRST) != 0))[order] | cgroup
    begin = np.maximum.accumulate(np.where(first, np.arange(len(order)), 0))[last]
    says = (is_name | is_cgroup)[order]
    chosen = np.union1d(begin[says[last]], last[says[last]])
    kept: Array = events[np.sort(order[chosen[says[chosen]]])]
    return kept


def first_wait(events: Array, condition: Condition) -> Trigger | None:
    """The first of these events for which the condition holds, if any."""
    moves: Array = events.view(TRANSITION)
    ran = (moves["type"] == EventType.TRANSITION) & (moves["left"] == GoroutineState.RUNNABLE)
    ran &= (moves["new"] == GoroutineState.RUNNING) & ((moves["flags"] | Flag.DIVIDED) == Flag.DIVIDED)
    ran &= moves["time_ns"] - moves["since_ns"] > np.uint64(condition.latency_ns)
    if not ran.any():
        return None
    move = moves[int(np.argmax(ran))]
    time_ns = int(move["time_ns"])
    return Trigger(time_ns, int(move["slot"]), int(move["g"]), time_ns - int(move["since_ns"]))


class Recorder:
    """Moves events from a session's buffer to a file, as long as :meth:`drain` is called often enough."""

    def __init__(self, ring: EventRing, writer: Writer, sink: Sink, slots: Collection[int]) -> None:
        """``slots``: numbers of the targets."""
        self._ring, self._writer, self._sink = ring, writer, sink
        self.functions: dict[int, set[int]] = {slot: set() for slot in slots}
        """Addresses of the start functions seen, by target."""
        self._lost = np.zeros_like(ring.lost_by_cpu())
        self._began_ns = self._looked_ns = monotonic_ns()

    @property
    def lost(self) -> int:
        """Events that found no room in the buffer."""
        return int(self._ring.lost_by_cpu().sum())

    def drain(self) -> int:
        """Take all that there is; how many events that was."""
        begin, limit = self._ring.taken, self._ring.sent  # what comes meanwhile is for the next time
        while len(events := self._ring.read()):
            self._note_functions(events)
            self._sink.add(events)
            if self._ring.taken >= limit:
                break
        self._look_for_lost()
        return self._ring.taken - begin

    def add(self, events: Array) -> None:
        """Put in what does not come from the kernel."""
        if len(events):
            self._sink.add(events)

    def end(self) -> None:
        """There will be no more."""
        self._sink.end()
        self._look_for_lost(at_end=True)

    def _note_functions(self, events: Array) -> None:
        for names in (of_type(events, EventType.GOROUTINE), of_type(events, EventType.OFF_CPU)):
            for slot in np.unique(names["slot"]).tolist():
                self.functions[slot].update(np.unique(names["start_pc"][names["slot"] == slot]).tolist())

    def _look_for_lost(self, *, at_end: bool = False) -> None:
        """Say what was lost; more and more seldom, so that it doesn't fill a file where all is lost all the time."""
        lost, now_ns = self._ring.lost_by_cpu(), monotonic_ns()
        pause_ns = max((self._looked_ns - self._began_ns) // _LOST_A_TIME, _LOST_PAUSE_NS)
        soon = now_ns - self._looked_ns < pause_ns or self._writer.control_bytes > _LOST_MOST_BYTES
        if (soon or (lost == self._lost).all()) and not at_end:
            return
        for cpu in np.flatnonzero(lost != self._lost).tolist():
            self._writer.frame(Lost(cpu, int(lost[cpu] - self._lost[cpu]), self._looked_ns, now_ns))
        self._lost, self._looked_ns = lost, now_ns

