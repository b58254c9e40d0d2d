"""From the events of a recording to what the BPF maps would have held: the same counts of the same intervals. Pure.

What :class:`Replay` returns goes through :mod:`schedtrace.join` as a live session's snapshot does. bpf/goroutine.h and
bpf/thread.h do with one event at a time what is done here with many.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from schedtrace import abi
from schedtrace.abi import GoroutineState as State
from schedtrace.abi import LostReason, OffCpu, WakeCause
from schedtrace.events import CGROUP, STOP, SWITCH, WAIT, Array, EventType, Flag, of_type
from schedtrace.histogram import SLOTS
from schedtrace.lives import NOBODY, Lives
from schedtrace.session import Snapshot
from schedtrace.thread_watch import ThreadSnapshot

_BOUNDS_NS = np.array([1000 << k for k in range(SLOTS - 1)], np.int64)
_UNSEEN = 0xFF  # STATE_UNSEEN of goroutine.h
_STATS = np.dtype(abi.TargetStats)
_TOTALS = np.dtype(abi.Totals)
_THREAD_STATS = np.dtype(abi.ThreadStats)
_OFF_CPU_TOTALS = np.dtype(abi.OffCpuTotals)
_GOROUTINE = np.dtype(abi.Goroutine)
_LIVING = np.dtype([("number", "<i8"), ("goroutine", _GOROUTINE)])
_NONE = _UNSEEN
_HISTOGRAM = np.dtype(abi.Histogram)
_MOST_STOP_REASONS = 1 << 8
_KEPT_NS = 1_000_000_000


@dataclass(frozen=True)
class Range:
    """A part of a recording: [since_ns, until_ns) of CLOCK_MONOTONIC. Intervals belong to it that end in it; time in a
    state is cut at its ends."""

    since_ns: int
    until_ns: int


class Replay:
    """Counts the events of one target. Give it all events of a recording, in order, then ask for the snapshot.

    ``selected``: by number of goroutine (:class:`Lives`), whether it counts, and False at the end; None: all do, and
    threads. ``threads_since_ns``: from when on these count, which are watched a little earlier than goroutines; 0: from
    the start of the range.
    """

    def __init__(self, slot: int, span: Range, selected: Array | None = None, threads_since_ns: int = 0) -> None:
        self._slot, self._span, self._selected = slot, span, selected
        self._threads_since_ns = threads_since_ns or span.since_ns
        self._thread_stats = np.zeros(1, _THREAD_STATS)[0]
        self._off_cpu_functions: dict[int, Any] = {}
        self._waits = np.zeros(0, WAIT)  # whose transitions are still to come
        self._lives = Lives()
        self._stats = np.zeros(1, _STATS)[0]
        # The same with intervals cut at the start of the range, as time in a state is to be counted.
        self._cut = np.zeros(1, _STATS)[0]
        self._living = np.zeros(0, _LIVING)
        self._functions: dict[int, Any] = {}
        self._threads: set[int] = set()
        self.stops: Array = np.zeros(_MOST_STOP_REASONS, _HISTOGRAM)
        """Of the world, by the number of the reason, as records of struct histogram: those whose beginning is known."""

    def add(self, events: Array) -> None:
        """Count these."""
        events = events[(events["slot"] == self._slot) & (events["time_ns"] < self._span.until_ns)]
        before = len(self._lives.table)
        moves, numbers = self._lives.follow(events)
        known = numbers != NOBODY
        parts = self._parts(moves, of_type(events, EventType.WAIT))
        if self._selected is not None:
            known &= self._selected[numbers]
            moves, numbers, parts, known = moves[known], numbers[known], parts[known], known[known]
        inside = moves["time_ns"] >= self._span.since_ns
        for name in ("kernel_ns", "undivided_ns"):
            self._stats[name] += parts[name][inside].sum()
        self._count(moves[inside], known[inside])
        self._live(moves[known], numbers[known], inside[known], before)
        if self._selected is None:
            self._count_threads(of_type(events, EventType.THREAD_ON, EventType.THREAD_OFF))
            self._count_off_cpu(of_type(events, EventType.OFF_CPU))
            self._count_stops(of_type(events, EventType.STOP))
            self._threads.update(np.unique(moves["tid"][inside]).tolist())
            cgroups: Array = of_type(events, EventType.CGROUP).view(CGROUP)
            if len(cgroups):
                self._stats["cgroup_id"] = max(int(cgroups["cgroup_id"].max()), int(self._stats["cgroup_id"]))

    def _parts(self, moves: Array, waits: Array) -> Any:
        """What the wait was for that each of these ends: a record of :data:`WAIT`. Of one whose event is missing,
        nothing is known."""
        parts = np.zeros(len(moves), WAIT)
        divided = np.flatnonzero((moves["flags"] & Flag.DIVIDED) != 0)
        parts["undivided_ns"][divided] = _length_ns(moves[divided])
        self._waits = np.concatenate([self._waits, waits])
        if len(self._waits):
            _, of_wait, of_move = np.intersect1d(
                _time_and_g(self._waits), _time_and_g(moves[divided]), return_indices=True
            )
            for name in ("kernel_ns", "undivided_ns"):
                parts[name][divided[of_move]] = self._waits[name][of_wait]
            missing = np.ones(len(self._waits), bool)
            missing[of_wait] = False
            missing &= self._waits["time_ns"] + np.uint64(_KEPT_NS) > self._waits["time_ns"].max()
            self._waits = self._waits[missing]
        return parts

    def _count(self, moves: Array, known: Array) -> None:
        size = int(State.COUNT)
        taken_back = (moves["flags"] & Flag.TAKEN_BACK) != 0
        kind = moves["old"].astype(np.int64) * size + moves["new"]
        transitions = np.bincount(kind[~taken_back], minlength=size * size)
        transitions -= np.bincount(kind[taken_back], minlength=size * size)
        self._stats["transitions"] += transitions.astype(np.uint64)
        lost = self._stats["lost"]
        lost[LostReason.INCONSISTENT] += int(((moves["flags"] & Flag.INCONSISTENT) != 0).sum())
        ends = moves[known & ~taken_back]
        left, begun_before, whole = _whole(ends)
        waits = np.isin(left, (State.RUNNABLE, State.WAITING))
        lost[LostReason.BEGAN_BEFORE] += int((waits & begun_before).sum())
        for stats, ns in ((self._stats, _length_ns(ends)), (self._cut, _length_ns(ends, self._span.since_ns))):
            slots = np.searchsorted(_BOUNDS_NS, _length_ns(ends))  # the smallest k with ns <= 1000 << k
            latency, wait = whole & (left == State.RUNNABLE), whole & (left == State.WAITING)
            _record(stats["sched_latency"], ends["cause"][latency], slots[latency], ns[latency])
            _record(stats["wait"], ends["reason"][wait], slots[wait], ns[wait])
            partial_wait = ~whole & (left == State.WAITING)
            reasons = ends["reason"][partial_wait]
            stats["partial_waits"] += np.bincount(reasons, minlength=abi.REASON_COUNT).astype(np.uint64)
            stats["partial_wait_ns"] += _sums(reasons, ns[partial_wait], abi.REASON_COUNT)
            others = ~np.isin(left, (State.RUNNABLE, State.WAITING)) & ~begun_before
            partial = others | (~whole & (left == State.RUNNABLE))
            stats["partial_ns"] += _sums(left[partial], ns[partial], size)

    def _live(self, moves: Array, numbers: Array, inside: Array, before: int) -> None:
        """Totals of goroutines, and what those are doing that live."""
        table = self._lives.table
        fresh = np.zeros(len(table) - before, _LIVING)
        fresh["number"] = np.arange(before, len(table))
        fresh["goroutine"]["state"] = _NONE
        fresh["goroutine"]["since_ns"] = self._span.since_ns
        living = np.concatenate([self._living, fresh])
        places = np.searchsorted(living["number"], numbers)
        goroutines = living["goroutine"]
        goroutines["start_pc"] = table["start_pc"][living["number"]]
        self._total(goroutines["totals"], moves[inside], places[inside])
        taken_back = (moves["flags"] & Flag.TAKEN_BACK) != 0
        # Of several moves of one goroutine, the last one stays.
        goroutines["state"][places] = np.where(taken_back, moves["old"], moves["new"])
        goroutines["reason"][places] = moves["reason"]
        goroutines["cause"][places] = moves["cause"]
        since = np.where(taken_back, moves["since_ns"], moves["time_ns"])
        goroutines["since_ns"][places] = np.maximum(since, np.uint64(self._span.since_ns))
        ended = goroutines["state"] == State.DEAD
        self._end(goroutines["start_pc"][ended], goroutines["totals"][ended])
        # One whose structure another has now, and whose end was not seen: BPF has forgotten it.
        replaced = ~np.isin(living["number"], self._lives.current)
        unwanted = self._selected is not None and ~self._selected[living["number"]]
        self._living = living[~(ended | replaced | unwanted)]

    def _end(self, start_pcs: Array, totals: Any) -> None:
        """What ended goroutines did goes to their functions."""
        functions, group = np.unique(start_pcs, return_inverse=True)
        sums = np.zeros(len(functions), _TOTALS)
        for name in abi.TOTALS:
            (np.maximum if name.startswith("max_") else np.add).at(sums[name], group, totals[name])
        for start_pc, more in zip(functions.tolist(), sums, strict=True):
            into = self._functions.setdefault(start_pc, np.zeros(1, _TOTALS)[0])
            for name in abi.TOTALS:
                into[name] = max(into[name], more[name]) if name.startswith("max_") else into[name] + more[name]

    def _total(self, totals: Any, moves: Array, places: Array) -> None:
        old, new, cause = moves["old"], moves["new"], moves["cause"]
        taken_back = (moves["flags"] & Flag.TAKEN_BACK) != 0
        woken = ~taken_back & (new == State.RUNNABLE) & (old != State.WAITING)
        runs = ~taken_back & (new == State.RUNNING)
        preempted, yielded = woken & (cause == WakeCause.PREEMPTED), woken & (cause == WakeCause.YIELDED)
        left, begun_before, whole = _whole(moves)
        whole, shown = whole & ~taken_back, ~taken_back
        ns, cut_ns = _length_ns(moves), _length_ns(moves, self._span.since_ns)
        parks = (new == State.WAITING) & (old == State.RUNNING)
        counted = {
            "goroutines": (old == State.DEAD) & (new != State.SYSCALL),
            "exits": new == State.DEAD,
            "parks": parks & shown,
            "readies": shown & (new == State.RUNNABLE) & (old == State.WAITING),
            "runs": runs & (old == State.RUNNABLE),
            "preempted": preempted,
            "yielded": yielded,
            "switches": runs & (old == State.WAITING),
            "syscalls": (old == State.SYSCALL) & (runs | (woken & ~preempted & ~yielded)),
        }
        times = {
            "runnable_ns": shown & (left == State.RUNNABLE),
            "running_ns": shown & (left == State.RUNNING) & ~begun_before,
            "waiting_ns": shown & (left == State.WAITING),
            "syscall_ns": shown & (left == State.SYSCALL) & ~begun_before,
        }
        count = len(totals)
        for name, which in counted.items():
            totals[name] += np.bincount(places[which], minlength=count).astype(np.uint64)
        totals["parks"] -= np.bincount(places[parks & taken_back], minlength=count).astype(np.uint64)
        for name, which in times.items():
            totals[name] += _sums(places[which], cut_ns[which], count)
        for name, state in (("max_runnable_ns", State.RUNNABLE), ("max_waiting_ns", State.WAITING)):
            which = whole & (left == state)
            np.maximum.at(totals[name], places[which], ns[which].astype(np.uint64))

    def _count_threads(self, switches: Array) -> None:
        switches = switches[switches["time_ns"] >= self._threads_since_ns]
        self._threads.update(np.unique(switches["tid"]).tolist())
        flags, lost = switches["flags"], self._thread_stats["lost"]
        lost[LostReason.SWITCH_UNSEEN] += int(((flags & Flag.UNSEEN) != 0).sum())
        lost[LostReason.BEGAN_BEFORE] += int(((flags & Flag.BEGAN_BEFORE) != 0).sum())
        on: Array = switches[(switches["type"] == EventType.THREAD_ON) & (switches["since_ns"] != 0)].view(SWITCH)
        on = on[on["time_ns"] >= on["since_ns"]]
        _record_one(self._thread_stats, "run_queue", _length_ns(on))

    def _count_off_cpu(self, intervals: Array) -> None:
        intervals = intervals[intervals["time_ns"] >= self._threads_since_ns]
        now, since = intervals["time_ns"].astype(np.int64), intervals["off_since_ns"].astype(np.int64)
        blocked = (intervals["flags"] & Flag.BLOCKED) != 0
        woken_ns = np.where(blocked, now - intervals["runnable_since_ns"].astype(np.int64), 0)
        off_ns = now - since
        blocked_ns = np.where(blocked, off_ns - woken_ns, 0)
        off_cpu = self._thread_stats["off_cpu"]
        for place, ns in (
            (OffCpu.PREEMPTED, off_ns[~blocked]),
            (OffCpu.BLOCKED, blocked_ns[blocked]),
            (OffCpu.WOKEN, woken_ns[blocked]),
        ):
            _record(off_cpu, np.full(len(ns), place, np.int64), np.searchsorted(_BOUNDS_NS, ns), ns)
        functions, group = np.unique(intervals["start_pc"], return_inverse=True)
        count = len(functions)
        sums = np.zeros(count, _OFF_CPU_TOTALS)
        sums["times"] = np.bincount(group, minlength=count)
        sums["run_queue_ns"] = _sums(group, off_ns - blocked_ns, count)
        sums["blocked_ns"] = _sums(group, blocked_ns, count)
        np.maximum.at(sums["max_ns"], group, off_ns.astype(np.uint64))
        for start_pc, more in zip(functions.tolist(), sums, strict=True):
            into = self._off_cpu_functions.setdefault(start_pc, np.zeros(1, _OFF_CPU_TOTALS)[0])
            for name in ("times", "run_queue_ns", "blocked_ns"):
                into[name] += more[name]
            into["max_ns"] = max(into["max_ns"], more["max_ns"])

    def _count_stops(self, stops: Array) -> None:
        stops = stops[(stops["time_ns"] >= self._span.since_ns) & (stops["since_ns"] != 0)].view(STOP)
        ns = _length_ns(stops)
        _record(self.stops, stops["reason"], np.searchsorted(_BOUNDS_NS, ns), ns)

    @property
    def threads(self) -> int:
        """How many threads did something in the range."""
        return len(self._threads)

    def snapshot(self) -> Snapshot:
        """What a live session would have read at the end of the range. Hits and foreign hits are not in the events."""
        functions = {start_pc: totals for start_pc, totals in self._functions.items() if any(totals)}
        return Snapshot(self._span.until_ns, self._stats, functions, self._living["goroutine"], 0)

    def thread_snapshot(self, *, goroutines_known: bool) -> ThreadSnapshot:
        """The same of threads."""
        return ThreadSnapshot(self._thread_stats, self._off_cpu_functions, goroutines_known, 0)

    def cut_stats(self) -> Any:
        """The counters with every interval cut at the range's start: for time in a state."""
        self._cut["transitions"] = self._stats["transitions"]
        return self._cut


def _whole(moves: Array) -> tuple[Array, Array, Array]:
    """The state left; whether nobody saw it begin; whether the interval goes into a histogram. See leave() of
    bpf/goroutine.h."""
    left = moves["left"]
    begun_before = (moves["flags"] & Flag.BEGAN_BEFORE) != 0
    partial = begun_before | ((moves["flags"] & Flag.INCONSISTENT) != 0)
    return left, begun_before, ~partial & ((left != State.RUNNABLE) | (moves["new"] == State.RUNNING))


def _length_ns(ends: Array, cut_ns: int = 0) -> Array:
    """Lengths of intervals, counted from ``cut_ns`` at the earliest."""
    since = np.maximum(ends["since_ns"], np.uint64(cut_ns)).astype(np.int64)
    length: Array = np.maximum(ends["time_ns"].astype(np.int64) - since, 0)
    return length


def _sums(places: Array, ns: Array, size: int) -> Array:
    """Sums by place. numpy adds up in float64: in two halves, it is exact for sums below 2**84."""
    low = np.bincount(places, ns & 0xFFFFFFFF, size).astype(np.uint64)
    high = np.bincount(places, ns >> 32, size).astype(np.uint64)
    return low + (high << np.uint64(32))


def _time_and_g(events: Array) -> Array:
    """What tells a transition to running from all others."""
    keys = np.empty(len(events), [("time_ns", "<u8"), ("g", "<u8")])
    keys["time_ns"], keys["g"] = events["time_ns"], events["g"]
    return keys


def _record_one(stats: Any, name: str, ns: Array) -> None:
    """Put lengths into one histogram."""
    histograms = stats[name].reshape(1)
    _record(histograms, np.zeros(len(ns), np.int64), np.searchsorted(_BOUNDS_NS, ns), ns)
    stats[name] = histograms[0]


def _record(histograms: Any, places: Array, slots: Array, ns: Array) -> None:
    """Put lengths into an array of histograms."""
    size = len(histograms)
    counts = np.bincount(places.astype(np.int64) * SLOTS + slots, minlength=size * SLOTS)
    histograms["slots"] += counts.reshape(size, SLOTS).astype(np.uint64)
    histograms["sum_ns"] += _sums(places, ns, size)
    np.maximum.at(histograms["max_ns"], places.astype(np.int64), ns.astype(np.uint64))
