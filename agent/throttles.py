"""When a CPU limit held back threads of a process, from what the kernel counted and what the threads did. Pure numpy.

The kernel holds back the threads on one CPU or another and counts that when it is over, summed over CPUs; the recorder
sees a little later that its counters have grown (:data:`schedtrace.events.THROTTLED`). When it was, the threads tell:
one was runnable and did not run, and none of the process ran on that CPU. The longest such times at the time of that
growth, one a CPU and period, are taken for it as far as they don't add up to more than what was counted. If they make
less than half of that, switches are missing, or others of the same cgroup were meant: then it is only known that there
was one.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from schedtrace.events import THROTTLED, Array, EventType

THROTTLE = np.dtype([("slot", "<u2"), ("begin_ns", "<i8"), ("end_ns", "<i8"), ("periods", "<u4"),
                     ("throttled_ns", "<i8"), ("is_seen", "?")])  # fmt: skip
"""The limit of target ``slot`` held it back in so many ``periods``, for ``throttled_ns`` summed over CPUs. ``is_seen``:
from ``begin_ns``, on the first CPU, to ``end_ns``, on the last; else some time before ``end_ns``, and ``begin_ns`` is
the same. Of several that were counted at once, the first has all that was."""

_WAIT = np.dtype([("begin_ns", "<i8"), ("end_ns", "<i8"), ("cpu", "<u2")])
_KEPT_NS = 1_000_000_000  # more than goes by between two looks at the counters, if the recorder gets to run
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
        found = [target.add(switches, throttled) for target in self._targets]
        return np.concatenate([np.zeros(0, THROTTLE), *found])

    def rest(self) -> Array:
        """There are no more events."""
        return np.concatenate([np.zeros(0, THROTTLE), *(target.resolve(1 << 63) for target in self._targets)])


class _Target:
    def __init__(self, slot: int, holes: Sequence[tuple[int, int]]) -> None:
        self._slot, self._holes = slot, holes
        self._waits = np.zeros(0, _WAIT)  # of threads for a CPU, as they ended
        self._pending = np.zeros(0, THROTTLED)
        self._last_end_ns = 0

    def add(self, switches: Array, throttled: Array) -> Array:
        self._pending = np.concatenate([self._pending, throttled[throttled["slot"] == self._slot]])
        on = switches[(switches["slot"] == self._slot) & (switches["type"] == EventType.THREAD_ON)]
        if not len(on):
            return np.zeros(0, THROTTLE)
        waits = np.zeros(len(on), _WAIT)
        waits["cpu"], waits["end_ns"] = on["cpu"], on["time_ns"]
        waits["begin_ns"] = np.where(on["since_ns"] == 0, on["time_ns"], on["since_ns"])
        self._waits = np.concatenate([self._waits, waits])
        return self.resolve(int(waits["end_ns"].max()))

    def resolve(self, until_ns: int) -> Array:
        """Those that were counted before ``until_ns``, up to which all switches are known."""
        ready = self._pending["time_ns"] < np.uint64(until_ns)
        found = [self._throttle(event) for event in self._pending[ready]]
        self._pending = self._pending[~ready]
        kept_ns = min([until_ns, *self._pending["since_ns"].tolist()]) - _KEPT_NS
        self._waits = self._waits[self._waits["end_ns"] > kept_ns]
        return np.concatenate([np.zeros(0, THROTTLE), *found])

    def _throttle(self, event: Array) -> Array:
        since_ns, until_ns, counted_ns = (int(event[name]) for name in ("since_ns", "time_ns", "throttled_ns"))
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
        waits = self._alone(self._waits[(self._waits["begin_ns"] < until_ns) & (self._waits["end_ns"] > since_ns)])
        lengths = waits["end_ns"] - waits["begin_ns"]
        left_ns, chosen, on_cpu = counted_ns, [], {}
        for i in np.argsort(-lengths, kind="stable").tolist():
            cpu = int(waits["cpu"][i])
            if left_ns <= _REST * counted_ns or not lengths[i]:
                break
            if on_cpu.get(cpu, 0) < periods:
                on_cpu[cpu] = on_cpu.get(cpu, 0) + 1
                waits["end_ns"][i] = waits["begin_ns"][i] + min(int(lengths[i]), left_ns)
                left_ns -= min(int(lengths[i]), left_ns)
                chosen.append(i)
        held = np.sort(waits[chosen], order="begin_ns")
        if 2 * left_ns > counted_ns or self._may_be_wrong(held):
            return np.zeros((0, 2), np.int64)
        return self._joined(held)

    def _alone(self, waits: Array) -> Array:
        """The same waits, each until some thread of the process ran on its CPU."""
        waits = waits.copy()
        for cpu in np.unique(waits["cpu"]).tolist():
            own = np.flatnonzero(waits["cpu"] == cpu)
            ran_ns = np.sort(self._waits["end_ns"][self._waits["cpu"] == cpu])
            following = ran_ns[np.minimum(np.searchsorted(ran_ns, waits["begin_ns"][own], "right"), len(ran_ns) - 1)]
            ends_ns = np.minimum(waits["end_ns"][own], following)
            waits["end_ns"][own] = np.maximum(ends_ns, waits["begin_ns"][own])
        return waits

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
