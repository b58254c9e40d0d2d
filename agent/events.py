"""The events of a recording, as numpy records. Pure.

All have 40 bytes and begin alike (:data:`EVENT`); ``type`` says which of the other records one is. bpf/event_types.h
has them as structs; the layout here is that of the file format (docs/recording.md) and does not follow when that one
changes.

Times are in nanoseconds of CLOCK_MONOTONIC. Of one goroutine or thread, events come in the order in which things
happened; of different ones, times may be out of order by the few microseconds that a BPF program can be held up for.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from schedtrace.event_abi import EventFlag as Flag
from schedtrace.event_abi import EventType

__all__ = (
    "CGROUP", "EVENT", "EVENT_BYTES", "GOROUTINE", "OFF_CPU", "STOP", "SWITCH", "THROTTLED", "TRANSITION", "WAIT",
    "Array", "EventType", "Flag", "of_type",
)  # fmt: skip

Array = np.ndarray[Any, Any]

EVENT_BYTES = 40


def _record(*fields: tuple[str, str, int]) -> np.dtype[Any]:
    names, formats, offsets = zip(*fields, strict=True)
    return np.dtype({"names": names, "formats": formats, "offsets": offsets, "itemsize": EVENT_BYTES})


_HEAD = (("time_ns", "<u8", 0), ("type", "u1", 8), ("flags", "u1", 9), ("slot", "<u2", 10), ("tid", "<u4", 12))

EVENT = _record(*_HEAD, ("body", "V24", 16))
"""What all events have: ``time_ns``; ``type``; ``flags``; ``slot``, the number of the target; ``tid``, the thread;
``body``, what else there is, so that numpy copies it too."""

TRANSITION = _record(
    *_HEAD,
    ("g", "<u8", 16),
    ("since_ns", "<u8", 24),
    ("cpu", "<u2", 32),
    ("old", "u1", 34),
    ("new", "u1", 35),
    ("left", "u1", 36),
    ("cause", "u1", 37),
    ("reason", "u1", 38),
)
"""The goroutine at address ``g`` went from state ``old`` to ``new`` on thread ``tid``, which is the waker's if it
became runnable. With that ends the interval [``since_ns``, ``time_ns``) in state ``left``, which differs from ``old``
where moves between can't be seen. ``cause``: why it became runnable, if ``new`` or ``left`` is runnable; ``reason``:
what it waits for, if ``new`` or ``left`` is waiting. States are the numbers in :data:`schedtrace.window.STATES`, causes
places in :data:`schedtrace.window.CAUSES`, reasons places in the target's ``reasons``."""

GOROUTINE = _record(*_HEAD, ("g", "<u8", 16), ("start_pc", "<u8", 24), ("goid", "<u8", 32))
"""The goroutine at address ``g`` has the start function at ``start_pc`` and the id ``goid``; 0: not known (yet)."""

SWITCH = _record(
    *_HEAD, ("since_ns", "<u8", 16), ("other_tid", "<u4", 24), ("prev_state", "<u4", 28), ("cpu", "<u2", 32)
)
"""THREAD_ON: ``tid``, runnable since ``since_ns`` (0: not known), runs on ``cpu``, in place of ``other_tid`` (0: idle).
THREAD_OFF: it runs no longer, ``other_tid`` does; ``prev_state`` are the kernel's bits of its state (0 in the lower
eight: it is runnable still, else blocked); ``since_ns`` is 0."""

CGROUP = _record(*_HEAD, ("cgroup_id", "<u8", 16), ("cpu", "<u2", 32))
"""From now on the target runs on ``cpu`` in cgroup2 ``cgroup_id`` (1: cgroup2 is not used)."""

OFF_CPU = _record(*_HEAD, ("off_since_ns", "<u8", 16), ("runnable_since_ns", "<u8", 24), ("start_pc", "<u8", 32))
"""Thread ``tid`` is on a CPU again, and was off it since ``off_since_ns`` while its goroutine, which had begun with the
function at ``start_pc``, ran for Go. It was blocked in the kernel until ``runnable_since_ns``, or not at all."""

WAIT = _record(*_HEAD, ("g", "<u8", 16), ("kernel_ns", "<u8", 24), ("undivided_ns", "<u8", 32))
"""Of the wait of the goroutine at ``g`` that ends with the transition at the same time, ``kernel_ns`` are the kernel's:
thread ``tid``, which runs it, was runnable and did not run; of ``undivided_ns`` nothing is known."""

STOP = _record(*_HEAD, ("since_ns", "<u8", 16), ("stopped_ns", "<u8", 24), ("reason", "u1", 32))
"""The world, which was to be stopped at ``since_ns`` (0: not known) and was at ``stopped_ns`` (0: not known), is to be
started again by thread ``tid``. ``reason``: place in the target's ``stop_reasons``, 0 if it is not known."""

THROTTLED = _record(*_HEAD, ("since_ns", "<u8", 16), ("throttled_ns", "<u8", 24), ("periods", "<u4", 32))
"""Between ``since_ns`` and ``time_ns`` the kernel's counters of the target's CPU limit grew by so many periods in which
it held back, and by ``throttled_ns``, summed over CPUs: it counts a time when it is over. ``tid`` is 0."""

_RECORDS = {
    EventType.TRANSITION: TRANSITION,
    EventType.GOROUTINE: GOROUTINE,
    EventType.THREAD_ON: SWITCH,
    EventType.THREAD_OFF: SWITCH,
    EventType.CGROUP: CGROUP,
    EventType.OFF_CPU: OFF_CPU,
    EventType.WAIT: WAIT,
    EventType.STOP: STOP,
    EventType.THROTTLED: THROTTLED,
}


def of_type(events: Array, *types: EventType) -> Array:
    """Those of an array of :data:`EVENT` that are of one of ``types``, which share a record: an array of it."""
    wanted = events["type"] == types[0]
    for other in types[1:]:
        wanted |= events["type"] == other
    found: Array = events[wanted].view(_RECORDS[types[0]])
    return found
