"""When a CPU limit held back threads of a process, from what the kernel counted and what the threads did. Pure numpy.

The kernel holds back the threads on one CPU or another and counts that when it is over, summed over CPUs; the recorder
sees a little later that its counters have grown (:data:`schedtrace.events.THROTTLED`). When it was, the threads tell:
one was runnable and did not run, and none of the process ran on that CPU. The longest such times at the time of that
growth, one a CPU and period, are taken for it as far as they don't add up to more than what was counted. If they make
less than half of that, switches are missing, or others of the same cgroup were meant: then it is only known that there
was one.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import numpy as np

from schedtrace.events import THROTTLED, Array, EventType

THROTTLE = np.dtype([("slot", "<u2"), ("begin_ns", "<i8"), ("end_ns", "<i8"), ("periods", "<u4"),
                     ("throttled_ns", "<i8"), ("is_seen", "?")])  # fmt: skip
"""The limit of target ``slot`` held it back in so many ``periods``, for ``throttled_ns`` summed over CPUs. ``is_seen``:
from ``begin_ns``, on the first CPU, to ``end_ns``, on the last; else some time before ``end_ns``, and ``begin_ns`` is
the same. Of several that were counted at once, the first has all that was."""

_SWITCH = np.dtype([("time_ns", "<i8"), ("since_ns", "<i8"), ("tid", "<u4"), ("cpu", "<u2"), ("is_on", "?"),
                    ("wants_cpu", "?")])  # fmt: skip
_IDLE = np.dtype([("begin_ns", "<i8"), ("end_ns", "<i8"), ("cpu", "<u2")])
WANTS_CPU_MASK = 0xFF
"""None of these bits of prev_state: a thread that is taken off its CPU still wants to run."""
_KEPT_NS = 1_000_000_000  # more than goes by between two looks at the counters, if the recorder gets to run
_SOON_NS = 2_000_000  # after it was over threads run again
_MOST_AT_ONCE = 1000  # are looked at: no recorder looks at the counters as often, no machine has as many CPUs
_MOST_SWITCHES = 1 << 19  # in that time; more than any machine tried makes
_NEVER = (1 << 63) - 1
_REST = 0.05  # of what was counted: that much may be due to reasons that are too small to be told apart


class Throttles:
    """Finds them as the recording goes by."""

    def __init__(self, slots: Sequence[int], holes: Sequence[tuple[int, int]]) -> None:
        """``slots``: targets of which the recording has such events. ``holes``: (since, until) in ns of when switches
        may be missing."""
        self._targets = [_Target(slot, holes) for slot in slots]

    def of(self, switches: Array, throttled: Array) -> Array:
        """The next switches and :data:`THROTTLED` of the recording. Returns records of :data:`THROTTLE`, of those
        whose time has passed."""
        return np.concatenate([np.zeros(0, THROTTLE), *(target.add(switches, throttled) for target in self._targets)])

    def rest(self) -> Array:
        """There are no more events."""
        return np.concatenate([np.zeros(0, THROTTLE), *(target.rest() for target in self._targets)])


class _Target:
    def __init__(self, slot: int, holes: Sequence[tuple[int, int]]) -> None:
        self._slot, self._holes = slot, holes
        self._switches = np.zeros(0, _SWITCH)  # the last ones
        self._idle = np.zeros(0, _IDLE)
        self._pending = np.zeros(0, THROTTLED)
        self._last_end_ns = 0

    def add(self, switches: Array, throttled: Array) -> Array:
        own = switches[switches["slot"] == self._slot]
        more = np.zeros(len(own), _SWITCH)
        for name in ("time_ns", "since_ns", "tid", "cpu"):
            more[name] = own[name]
        more["is_on"] = own["type"] == EventType.THREAD_ON
        more["wants_cpu"] = ~more["is_on"] & ((own["prev_state"] & WANTS_CPU_MASK) == 0)
        self._switches = np.concatenate([self._switches, more])
        # What holds back a thread at the end of one block ends in the next.
        newest_ns = int(self._switches["time_ns"].max(initial=0))
        new = throttled[throttled["slot"] == self._slot]
        is_over = new["time_ns"] < np.uint64(newest_ns)
        found = self._resolved(np.concatenate([self._pending, new[is_over]]))
        self._pending = new[~is_over]
        self._switches = self._switches[self._switches["time_ns"] > newest_ns - _KEPT_NS][-_MOST_SWITCHES:]
        return found

    def rest(self) -> Array:
        """There is no more to come."""
        return self._resolved(self._pending)

    def _resolved(self, events: Array) -> Array:
        if not len(events):
            return np.zeros(0, THROTTLE)
        self._idle = _idle(self._switches)
        found = [self._throttle(event, is_looked_for=i < _MOST_AT_ONCE) for i, event in enumerate(events)]
        return np.concatenate([np.zeros(0, THROTTLE), *found])

    def _throttle(self, event: Array, *, is_looked_for: bool) -> Array:
        since_ns, until_ns, counted_ns = (int(event[name]) for name in ("since_ns", "time_ns", "throttled_ns"))
        held = np.zeros((0, 2), np.int64)
        if is_looked_for:
            held = self._held(since_ns, until_ns, counted_ns, max(int(event["periods"]), 1))
        if not len(held):
            held = np.full((1, 2), max(until_ns, self._last_end_ns))
        found = np.zeros(len(held), THROTTLE)
        found["slot"], found["begin_ns"], found["end_ns"] = self._slot, held[:, 0], held[:, 1]
        found["periods"][0], found["throttled_ns"][0] = event["periods"], counted_ns
        found["is_seen"] = held[:, 1] > held[:, 0]
        self._last_end_ns = int(held[-1, 1])
        return found

    def _held(self, since_ns: int, until_ns: int, counted_ns: int, periods: int) -> Array:
        """Times, in their order, in which threads were held back: (begin, end) of each; none if they can't be told."""
        idle = self._idle
        begun_ns = max(since_ns, self._last_end_ns)
        idle = idle[(idle["begin_ns"] < until_ns) & (idle["end_ns"] > begun_ns)]
        lengths = idle["end_ns"] - idle["begin_ns"]
        left_ns, chosen = counted_ns, []
        on_cpu: Counter[int] = Counter()
        # What was counted was over: those that go on for longer only if there are no others.
        goes_on = idle["end_ns"] > until_ns + _SOON_NS
        for i in np.lexsort((-lengths, goes_on))[:_MOST_AT_ONCE].tolist():
            cpu, length = int(idle["cpu"][i]), min(int(lengths[i]), left_ns)
            if left_ns <= _REST * counted_ns:
                break
            if on_cpu[cpu] < periods:
                on_cpu[cpu] += 1
                idle["end_ns"][i] = idle["begin_ns"][i] + length
                left_ns -= length
                chosen.append(i)
        held = np.sort(idle[chosen], order="begin_ns")
        if 2 * left_ns > counted_ns or self._may_be_wrong(held):
            return np.zeros((0, 2), np.int64)
        return self._joined(held)

    def _joined(self, held: Array) -> Array:
        """On whatever CPUs; none begins before the one before has ended."""
        joined: list[list[int]] = []
        for begin_ns, end_ns in zip(held["begin_ns"].tolist(), held["end_ns"].tolist(), strict=True):
            if joined and begin_ns <= joined[-1][1]:
                joined[-1][1] = max(joined[-1][1], end_ns)
            elif end_ns > self._last_end_ns:
                joined.append([max(begin_ns, self._last_end_ns), end_ns])
        return np.array(joined, np.int64).reshape(-1, 2)

    def _may_be_wrong(self, held: Array) -> bool:
        if not len(held):
            return True
        begin_ns, end_ns = int(held["begin_ns"].min()), int(held["end_ns"].max())
        return any(since_ns < end_ns and until_ns > begin_ns for since_ns, until_ns in self._holes)


def _idle(switches: Array) -> Array:
    """When threads of the process waited for a CPU that none of them was on. One that was taken off a CPU waits for
    that one, wherever it is put on again; one that was woken, for the one that it is put on."""
    by_thread = switches[np.lexsort((np.arange(len(switches)), switches["tid"]))]
    before = np.roll(by_thread, 1)
    is_taken_off = (before["tid"] == by_thread["tid"]) & before["wants_cpu"]
    is_taken_off[:1] = False
    waits, is_taken_off = by_thread[by_thread["is_on"]], is_taken_off[by_thread["is_on"]]
    found = np.zeros(len(waits), _IDLE)
    found["end_ns"] = waits["time_ns"]
    found["cpu"] = np.where(is_taken_off, before[by_thread["is_on"]]["cpu"], waits["cpu"])
    is_known = (waits["since_ns"] != 0) & (waits["since_ns"] < waits["time_ns"])
    found["begin_ns"] = np.where(is_known, waits["since_ns"], waits["time_ns"])
    for cpu in np.unique(found["cpu"]).tolist():
        of_cpu = np.flatnonzero(found["cpu"] == cpu)
        there = np.sort(switches[switches["cpu"] == cpu], order="time_ns", kind="stable")
        on_ns = np.append(there["time_ns"][there["is_on"]], _NEVER)
        off_ns = np.insert(there["time_ns"][~there["is_on"]], 0, 0)
        begin_ns, end_ns, first = found["begin_ns"][of_cpu], found["end_ns"][of_cpu], is_taken_off[of_cpu]
        next_ns = on_ns[np.searchsorted(on_ns, begin_ns)]
        last_ns = off_ns[np.searchsorted(off_ns, end_ns, "right") - 1]
        found["end_ns"][of_cpu] = np.where(first, np.minimum(end_ns, next_ns), end_ns)
        found["begin_ns"][of_cpu] = np.where(first, begin_ns, np.maximum(begin_ns, last_ns))
    sound: Array = found[found["begin_ns"] < found["end_ns"]]
    return sound
