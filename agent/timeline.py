"""From the events of a recording to spans: who was in which state, from when to when, on which thread. Pure numpy.

What is exported in any format comes from here, block by block, so that memory does not grow with the recording, only
with the number of its goroutines and threads.

Times are nanoseconds of CLOCK_MONOTONIC. A span of a goroutine comes with the transition that ends it, which knows
since when it lasted, so that lost events and gaps leave holes and no wrong spans. Spans of one goroutine, of one thread
and of one thread's kernel states each come in the order of time and do not overlap.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np

from schedtrace.abi import GoroutineState as State
from schedtrace.events import EVENT, Array, EventType, Flag, of_type
from schedtrace.last_seen import LastSeen
from schedtrace.lives import NOBODY, Lives, wakers
from schedtrace.recording import Recording
from schedtrace.throttles import WANTS_CPU_MASK, Throttles
from schedtrace.window import STATES

UNCERTAIN = int(State.COUNT)
"""A state that is none: the one left was not the one seen last, so one of both was not."""
RUNNING_OR_SYSCALL = UNCERTAIN + 1
"""A state that is none: it went on since before the recording, and nobody knows which of both it was."""
STATE_NAMES = {**STATES, UNCERTAIN: "not known", RUNNING_OR_SYSCALL: "running or syscall"}
STATE_COUNT = RUNNING_OR_SYSCALL + 1
ON_CPU, RUNNABLE, BLOCKED, OFF_CPU = range(4)
"""States of threads for the kernel. OFF_CPU is at the end only: blocked, or woken and not yet running."""
KERNEL_STATES = ("on CPU", "runnable", "blocked", "off CPU")

SPAN = np.dtype(
    [
        *(("number", "<i8"), ("begin_ns", "<i8"), ("end_ns", "<i8"), ("flow", "<u8"), ("slot", "<u2"), ("tid", "<u4")),
        *(("cpu", "<u2"), ("state", "u1"), ("cause", "u1"), ("reason", "u1"), ("is_open", "?"), ("is_whole", "?")),
        ("end_tid", "<u4"),
    ]
)
"""Goroutine ``number`` of target ``slot`` in ``state`` (Go's number, or one from here). ``cause``, ``reason``: as in a
transition, for runnable and waiting. ``flow``: number of the wake that began it, 0: none or not known. ``tid``: the
thread it ran on or was in a system call on, ``cpu`` the CPU on which that began; 0 and 0: neither, or not known.
``end_tid``: the thread on which it was ended, 0 if it was not. ``is_open``: it still lasted when the recording ended.
``is_whole``: both ends were seen, and it is one that the histograms of the report hold."""

THREAD_SPAN = np.dtype([("tid", "<u4"), ("slot", "<u2"), ("cpu", "<u2"), ("begin_ns", "<i8"), ("end_ns", "<i8"),
                        ("state", "u1"), ("is_open", "?")])  # fmt: skip
"""What thread ``tid`` was for the kernel: one of :data:`KERNEL_STATES`, on ``cpu`` if it ran."""

_SEEN = np.dtype([("time_ns", "<i8"), ("flow", "<u8"), ("tid", "<u4"), ("slot", "<u2"), ("cpu", "<u2"), ("state", "u1"),
                  ("cause", "u1"), ("reason", "u1")])  # fmt: skip
_SWITCHED = np.dtype([("time_ns", "<i8"), ("slot", "<u2"), ("cpu", "<u2"), ("type", "u1"), ("prev_state", "<u4")])
_BLOCK_EVENTS = 1 << 16
_EXITED_MASK = 0x10 | 0x20 | 0x80  # EXIT_DEAD, EXIT_ZOMBIE, TASK_DEAD


@dataclass(frozen=True)
class Block:
    """A part of a recording, the next one in the file's order."""

    moves: Array
    """All its transitions, records of :data:`schedtrace.events.TRANSITION`."""
    numbers: Array
    """Of each one's goroutine; NOBODY where it is none of a goroutine's life."""
    wakers: Array
    """Number of the goroutine that woke this one by the transition; NOBODY: none did, or it is not known."""
    flows: Array
    """Number of the wake, from 1, where there is a waker; else 0."""
    spans: Array
    """Of goroutines, records of :data:`SPAN`, in the order in which they ended."""
    runs: Array
    """Those of the spans in which a goroutine had a thread, running or in a system call, for that thread's track."""
    kernel: Array
    """Records of :data:`THREAD_SPAN`."""
    stops: Array
    """Of the world, records of :data:`schedtrace.events.STOP`. One whose beginning is not known lasts no time here."""
    throttles: Array
    """Records of :data:`schedtrace.throttles.THROTTLE`."""


class Timeline:
    """The spans of a recording. Reads it once when it is made, and once more for each :meth:`blocks`."""

    def __init__(self, recording: Recording, advance: Callable[[int], object] = lambda _events: None) -> None:
        """``advance`` is told of each so many events read. Raises UnreadableRecording, OSError."""
        self._recording, self._advance = recording, advance
        lives = Lives()
        tids = np.zeros(0, np.uint64)
        self.first_ns = self.last_ns = recording.header.started_ns
        """When the first and the last thing happened, or recording began or ended if that was before or after."""
        self.transitions = 0
        """In the file."""
        stopped: set[int] = set()
        throttled: set[int] = set()
        for events in self._chunks():
            moves, _ = lives.follow(events)
            stopped.update(np.unique(of_type(events, EventType.STOP)["slot"]).tolist())
            held = of_type(events, EventType.THROTTLED)
            throttled.update(np.unique(held["slot"]).tolist())
            self.transitions += len(moves)
            self.last_ns = max(self.last_ns, int(events["time_ns"].max()))
            self.first_ns = min(self.first_ns, int(events["time_ns"].min()))
            events = events[events["type"] != EventType.THROTTLED] if len(held) else events  # those are of no thread
            tids = np.union1d(tids, events["slot"].astype(np.uint64) << np.uint64(32) | events["tid"])
        self.lives: Array = lives.table
        """Records of :data:`schedtrace.lives.LIFE`, by number, with all that became known of them."""
        self.threads: Array = np.array([(t >> 32, t & 0xFFFFFFFF) for t in tids.tolist()], "<i8").reshape(-1, 2)
        """Slot and tid of each thread."""
        self.stopped, self.throttled = sorted(stopped), sorted(throttled)
        """Slots of the targets whose world was stopped, and of those that a CPU limit held back."""
        ended = [end.time_ns for end in recording.ends.values()]
        self.last_ns = max([self.last_ns, *ended, *([recording.footer.time_ns] if recording.footer else [])])
        self.clipped = 0
        """Spans that would have begun before the one before them ended, and begin there instead: not in a file that
        is right. Counted by :meth:`blocks`."""

    def _chunks(self) -> Iterator[Array]:
        """Events, of several frames at once where these are small."""
        kept: list[Array] = []
        for events in self._recording.events():
            kept.append(events)
            self._advance(len(events))
            if sum(map(len, kept)) >= _BLOCK_EVENTS:
                yield np.concatenate(kept)
                kept = []
        if kept:
            yield np.concatenate(kept)

    def started_ns(self) -> Array:
        """When each target, by slot, began to be watched."""
        started = np.zeros(1 << 16, np.int64)
        for slot, target in self._recording.targets.items():
            if slot < len(started):
                started[slot] = target.started_ns
        return started

    def blocks(self) -> Iterator[Block]:
        """All of it. The last blocks have the spans that were open when the recording ended, and no transitions."""
        self.clipped = 0
        lives, seen = Lives(), _Goroutines(self.started_ns())
        threads, runs, waking = _Threads(), _Runs(), _Wakers()
        stopped, throttles = _Stops(), self._throttles()
        for events in self._chunks():
            moves, numbers = lives.follow(events)
            by, flows = waking.of(moves, numbers)
            spans = seen.spans(moves, numbers, flows)
            switches = of_type(events, EventType.THREAD_ON, EventType.THREAD_OFF)
            stops = stopped.of(of_type(events, EventType.STOP))
            held = throttles.of(switches, of_type(events, EventType.THROTTLED))
            yield Block(moves, numbers, by, flows, spans, runs.of(spans), threads.spans(switches), stops, held)
        ends = np.full(1 << 16, self.last_ns, np.int64)
        for slot, end in self._recording.ends.items():
            ends[slot & 0xFFFF] = end.time_ns
        spans, kernel = seen.open(ends, lives.current), threads.open(ends)
        no_moves, none = Lives().follow(np.zeros(0, EVENT))
        no_stops = stopped.of(of_type(np.zeros(0, EVENT), EventType.STOP))
        no_flows, no_spans, held = none.astype(np.uint64), spans[:0], throttles.rest()
        if len(held):
            yield Block(no_moves, none, none, no_flows, no_spans, no_spans, kernel[:0], no_stops, held)
        for start in range(0, max(len(spans), len(kernel)), _BLOCK_EVENTS):
            some, of_threads = (each[start : start + _BLOCK_EVENTS] for each in (spans, kernel))
            yield Block(no_moves, none, none, no_flows, some, runs.of(some), of_threads, no_stops, held[:0])
        self.clipped = seen.clipped + runs.clipped + threads.clipped + stopped.clipped

    def _throttles(self) -> Throttles:
        recording = self._recording
        gaps = [(gap.since_ns, gap.until_ns) for gap in recording.gaps]
        lost = [(one.since_ns, one.until_ns) for one in recording.lost]
        return Throttles(self.throttled, gaps + lost)


class _Goroutines:
    """What each goroutine did last."""

    def __init__(self, started_ns: Array) -> None:
        self._last = LastSeen(_SEEN)
        self._started_ns = started_ns
        self.clipped = 0

    def spans(self, moves: Array, numbers: Array, flows: Array) -> Array:
        of_life = numbers != NOBODY
        moves, numbers, flows = moves[of_life], numbers[of_life], flows[of_life]
        taken_back = (moves["flags"] & Flag.TAKEN_BACK) != 0
        now = np.zeros(len(moves), _SEEN)
        now["time_ns"] = np.where(taken_back, moves["since_ns"], moves["time_ns"])
        now["state"] = np.where(taken_back, moves["old"], moves["new"])
        now["flow"] = np.where(taken_back, 0, flows)
        for name in ("tid", "slot", "cpu", "cause", "reason"):
            now[name] = moves[name]
        found, before = self._last.replace(numbers, now)
        spans, certain = self._ended(moves, numbers, found, before)
        ends = ~taken_back & _is_shown(moves["left"])
        late = ends & found & certain & (spans["begin_ns"] < before["time_ns"])
        self.clipped += int(late.sum())
        floor = np.where(found, before["time_ns"], 0)
        spans["begin_ns"] = np.maximum(spans["begin_ns"], np.minimum(floor, spans["end_ns"]))
        shown: Array = spans[ends]
        return shown

    def _ended(self, moves: Array, numbers: Array, found: Array, before: Array) -> tuple[Array, Array]:
        spans = np.zeros(len(moves), SPAN)
        left, flags = moves["left"], moves["flags"]
        begun_before, inconsistent = (flags & Flag.BEGAN_BEFORE) != 0, (flags & Flag.INCONSISTENT) != 0
        has_thread = _has_thread(left)
        # The transition by which it began to run was made on its thread; so is the one by which it stops, unless
        # another thread has found it preempted.
        joined = found & (before["time_ns"] == moves["since_ns"].astype(np.int64))
        began = joined & _has_thread(before["state"])
        stopped = has_thread & _has_thread(moves["old"])
        spans["number"], spans["end_ns"], spans["slot"] = numbers, moves["time_ns"], moves["slot"]
        spans["end_tid"] = moves["tid"]
        since = np.maximum(moves["since_ns"].astype(np.int64), self._started_ns[moves["slot"]])
        spans["begin_ns"] = np.minimum(since, spans["end_ns"])
        spans["tid"] = np.where(has_thread & began, before["tid"], np.where(stopped, moves["tid"], 0))
        spans["cpu"] = np.where(has_thread & began, before["cpu"], np.where(stopped, moves["cpu"], 0))
        spans["flow"] = np.where(joined & (left == State.RUNNABLE), before["flow"], 0)
        spans["state"] = np.where(begun_before & has_thread, RUNNING_OR_SYSCALL, left)
        spans["state"][inconsistent] = UNCERTAIN
        spans["is_whole"] = ~begun_before & ~inconsistent & ((left != State.RUNNABLE) | (moves["new"] == State.RUNNING))
        # A transition tells the cause of the state it leads to, if that is runnable, else of the one that it ends.
        again = (left == State.RUNNABLE) & (moves["new"] == State.RUNNABLE)
        spans["cause"] = np.where(again & joined, before["cause"], moves["cause"])
        waits_again = (left == State.WAITING) & (moves["new"] == State.WAITING)
        spans["reason"] = np.where(waits_again & joined, before["reason"], moves["reason"])
        return spans, ~inconsistent

    def open(self, ends_ns: Array, current: Array) -> Array:
        """Of goroutines that have not ended, until the recording did. ``current``: numbers of those whose structure no
        other one has got."""
        numbers, last = self._last.all()
        lives = _is_shown(last["state"]) & np.isin(numbers, current)
        numbers, last = numbers[lives], last[lives]
        spans = np.zeros(len(numbers), SPAN)
        has_thread = _has_thread(last["state"])
        spans["number"], spans["begin_ns"], spans["is_open"] = numbers, last["time_ns"], True
        spans["end_ns"] = np.maximum(ends_ns[last["slot"]], last["time_ns"])
        for name in ("slot", "state", "cause", "reason", "flow"):
            spans[name] = last[name]
        for name in ("tid", "cpu"):
            spans[name] = np.where(has_thread, last[name], 0)
        return spans


class _Runs:
    """Which goroutine each thread ran until when."""

    def __init__(self) -> None:
        self._last = LastSeen(np.dtype([("end_ns", "<i8")]))
        self.clipped = 0

    def of(self, spans: Array) -> Array:
        runs: Array = spans[(spans["tid"] != 0) & (spans["state"] != UNCERTAIN)].copy()
        now = np.zeros(len(runs), [("end_ns", "<i8")])
        now["end_ns"] = runs["end_ns"]
        found, before = self._last.replace(runs["tid"].astype(np.int64), now)
        late = found & (runs["begin_ns"] < before["end_ns"])
        self.clipped += int(late.sum())
        runs["begin_ns"][late] = np.minimum(before["end_ns"][late], runs["end_ns"][late])
        return runs


class _Stops:
    """When the world of each target was last started again."""

    def __init__(self) -> None:
        self._last = LastSeen(np.dtype([("end_ns", "<i8")]))
        self.clipped = 0

    def of(self, stops: Array) -> Array:
        """As in a block."""
        known = stops["since_ns"] != 0
        now = np.zeros(len(stops), [("end_ns", "<i8")])
        now["end_ns"] = stops["time_ns"]
        found, before = self._last.replace(stops["slot"].astype(np.int64), now)
        self.clipped += int((known & found & (stops["since_ns"].astype(np.int64) < before["end_ns"])).sum())
        since_ns = np.maximum(stops["since_ns"].astype(np.int64), before["end_ns"])
        stops["since_ns"] = np.where(known, np.minimum(since_ns, now["end_ns"]), now["end_ns"])
        return stops


class _Threads:
    """What the kernel did to each thread last."""

    def __init__(self) -> None:
        self._last = LastSeen(_SWITCHED)
        self.clipped = 0

    def spans(self, switches: Array) -> Array:
        now = np.zeros(len(switches), _SWITCHED)
        for name in ("time_ns", "slot", "cpu", "type", "prev_state"):
            now[name] = switches[name]
        found, before = self._last.replace(switches["tid"].astype(np.int64), now)
        time_ns, since_ns = now["time_ns"], switches["since_ns"].astype(np.int64)
        on, unseen = now["type"] == EventType.THREAD_ON, (switches["flags"] & Flag.UNSEEN) != 0
        was_on = found & (before["type"] == EventType.THREAD_ON)
        was_off = found & (before["type"] == EventType.THREAD_OFF)
        waited = on & (since_ns != 0) & (since_ns <= time_ns)
        self.clipped += int((waited & found & (since_ns < before["time_ns"])).sum())
        since_ns = np.where(found, np.maximum(since_ns, before["time_ns"]), since_ns)
        blocked = waited & was_off & _is_blocked(before["prev_state"])
        parts = (
            _thread_spans(switches, was_on & ~on & ~unseen, before["time_ns"], time_ns, ON_CPU, before["cpu"]),
            _thread_spans(switches, blocked, before["time_ns"], since_ns, BLOCKED),
            _thread_spans(switches, waited, since_ns, time_ns, RUNNABLE),
        )
        all_spans = np.concatenate(parts)
        in_order: Array = all_spans[np.argsort(all_spans["begin_ns"], kind="stable")]
        return in_order

    def open(self, ends_ns: Array) -> Array:
        tids, last = self._last.all()
        off = last["type"] == EventType.THREAD_OFF
        lives = ~(off & ((last["prev_state"] & _EXITED_MASK) != 0))
        tids, last, off = tids[lives], last[lives], off[lives]
        spans = np.zeros(len(tids), THREAD_SPAN)
        spans["tid"], spans["slot"], spans["begin_ns"], spans["is_open"] = tids, last["slot"], last["time_ns"], True
        spans["end_ns"] = np.maximum(ends_ns[last["slot"]], last["time_ns"])
        wants_cpu = (last["prev_state"] & WANTS_CPU_MASK) == 0
        spans["state"] = np.where(off, np.where(wants_cpu, RUNNABLE, OFF_CPU), ON_CPU)
        spans["cpu"] = np.where(off, 0, last["cpu"])
        return spans


class _Wakers:
    """Who ran on each thread when the last block ended: who wakes somebody in the next may have begun to run before."""

    def __init__(self) -> None:
        self._moves = Lives().follow(np.zeros(0, EVENT))[0]
        self._numbers = np.zeros(0, np.int64)
        self._count = 0

    def of(self, moves: Array, numbers: Array) -> tuple[Array, Array]:
        """Wakers and flows, as in a block."""
        of_life = numbers != NOBODY
        before = len(self._moves)
        joined = np.concatenate([self._moves, moves[of_life]])
        joined_numbers = np.concatenate([self._numbers, numbers[of_life]])
        result = np.full(len(moves), NOBODY, np.int64)
        result[of_life] = wakers(joined, joined_numbers)[before:]
        woken = result != NOBODY
        flows = np.zeros(len(moves), np.uint64)
        flows[woken] = np.arange(self._count + 1, self._count + 1 + woken.sum(), dtype=np.uint64)
        self._count += int(woken.sum())
        changes = _has_thread(joined["old"]) | (joined["new"] == State.RUNNING)
        joined, joined_numbers = joined[changes], joined_numbers[changes]
        _, last = np.unique(joined["tid"][::-1], return_index=True)
        kept = np.sort(len(joined) - 1 - last)
        self._moves, self._numbers = joined[kept], joined_numbers[kept]
        return result, flows


def _thread_spans(
    switches: Array, which: Array, begin_ns: Array, end_ns: Array, state: int, cpu: Array | None = None
) -> Array:
    spans = np.zeros(int(which.sum()), THREAD_SPAN)
    spans["tid"], spans["slot"], spans["state"] = switches["tid"][which], switches["slot"][which], state
    spans["begin_ns"], spans["end_ns"] = begin_ns[which], np.maximum(end_ns, begin_ns)[which]
    if cpu is not None:
        spans["cpu"] = cpu[which]
    return spans


def _is_blocked(prev_state: Array) -> Array:
    blocked: Array = ((prev_state & WANTS_CPU_MASK) != 0) & ((prev_state & _EXITED_MASK) == 0)
    return blocked


def _has_thread(state: Array) -> Array:
    found: Array = np.isin(state, (State.RUNNING, State.SYSCALL))
    return found


def _is_shown(state: Array) -> Array:
    """Is that a state somebody is in?"""
    found: Array = ~np.isin(state, (State.IDLE, State.DEAD))
    return found
