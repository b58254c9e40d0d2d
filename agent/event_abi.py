"""bpf/event_types.h as ctypes: the events that BPF sends for a recording. They are kept the same as those of
:mod:`schedtrace.abi`.
"""

from __future__ import annotations

import ctypes
import enum


class EventType(enum.IntEnum):
    """enum event_type: what happened. In a file, other numbers are of a later version, and to be passed over.
    :mod:`schedtrace.events` has the records."""

    TRANSITION = 1
    """A goroutine went from one state to another."""
    GOROUTINE = 2
    """Who the goroutine at an address is, before its first transition or when its id is known."""
    THREAD_ON = 3
    """A thread was put on a CPU."""
    THREAD_OFF = 4
    """A thread was taken off its CPU."""
    CGROUP = 5
    """From now on this CPU runs the target in another cgroup."""
    OFF_CPU = 6
    """A thread is on a CPU again that was off it while its goroutine ran for Go."""
    WAIT = 7
    """What a goroutine waited for that begins to run: comes before its transition."""
    STOP = 8
    """The world is to be started again that was stopped."""
    THROTTLED = 9
    """The CPU limit has held the target back. The recorder's own: no program sends it."""


class EventFlag(enum.IntEnum):
    """enum event_flag: bits of an event's ``flags``."""

    BEGAN_BEFORE = 1
    """Nobody saw the interval begin: ``since_ns`` is the recording's start, or 0 for a thread."""
    INCONSISTENT = 2
    """The state left was not the one seen last: the interval is not known."""
    NO_INTERVAL = 4
    """A transition that doesn't change what the goroutine does (a stack that grows, a goroutine's structure that is
    made), or of a goroutine that is not followed: no interval ends, none begins."""
    TAKEN_BACK = 8
    """The transition ``old`` to ``new`` that came before was none: the goroutine has been in ``old`` all the time since
    then. No interval ends; the next one begins at the transition that is taken back."""
    FIRST = 16
    """Of GOROUTINE: a goroutine not seen before, whatever was at that address until now."""
    UNSEEN = 32
    """Of a thread: the kernel didn't report a switch in between; its wait for a CPU is lost."""
    DIVIDED = 64
    """Of a transition: a WAIT says what the wait was for that ends. Without, all of it was in a queue of Go's."""
    BLOCKED = 128
    """Of OFF_CPU: the thread slept in the kernel until ``runnable_since_ns``; else it wanted to run all the time."""


_EVENT_HEAD = (
    ("time_ns", ctypes.c_uint64),
    ("type", ctypes.c_uint8),
    ("flags", ctypes.c_uint8),
    ("slot", ctypes.c_uint16),
    ("tid", ctypes.c_uint32),
)


class TransitionEvent(ctypes.Structure):
    """struct transition_event"""

    _fields_ = (
        *_EVENT_HEAD,
        ("g", ctypes.c_uint64),
        ("since_ns", ctypes.c_uint64),
        ("cpu", ctypes.c_uint16),
        ("old", ctypes.c_uint8),
        ("new", ctypes.c_uint8),
        ("left", ctypes.c_uint8),
        ("cause", ctypes.c_uint8),
        ("reason", ctypes.c_uint8),
        ("padding", ctypes.c_uint8),
    )


class GoroutineEvent(ctypes.Structure):
    """struct goroutine_event"""

    _fields_ = (*_EVENT_HEAD, ("g", ctypes.c_uint64), ("start_pc", ctypes.c_uint64), ("goid", ctypes.c_uint64))


class SwitchEvent(ctypes.Structure):
    """struct switch_event"""

    _fields_ = (
        *_EVENT_HEAD,
        ("since_ns", ctypes.c_uint64),
        ("other_tid", ctypes.c_uint32),
        ("prev_state", ctypes.c_uint32),
        ("cpu", ctypes.c_uint16),
        ("padding", ctypes.c_uint8 * 6),
    )


class CgroupEvent(ctypes.Structure):
    """struct cgroup_event"""

    _fields_ = (
        *_EVENT_HEAD,
        ("cgroup_id", ctypes.c_uint64),
        ("unused", ctypes.c_uint64),
        ("cpu", ctypes.c_uint16),
        ("padding", ctypes.c_uint8 * 6),
    )


class OffCpuEvent(ctypes.Structure):
    """struct off_cpu_event"""

    _fields_ = (
        *_EVENT_HEAD,
        ("off_since_ns", ctypes.c_uint64),
        ("runnable_since_ns", ctypes.c_uint64),
        ("start_pc", ctypes.c_uint64),
    )


class WaitEvent(ctypes.Structure):
    """struct wait_event"""

    _fields_ = (
        *_EVENT_HEAD,
        ("g", ctypes.c_uint64),
        ("kernel_ns", ctypes.c_uint64),
        ("undivided_ns", ctypes.c_uint64),
    )


class StopEvent(ctypes.Structure):
    """struct stop_event"""

    _fields_ = (
        *_EVENT_HEAD,
        ("since_ns", ctypes.c_uint64),
        ("stopped_ns", ctypes.c_uint64),
        ("reason", ctypes.c_uint8),
        ("padding", ctypes.c_uint8 * 7),
    )


STRUCTS: dict[str, type[ctypes.Structure]] = {
    "transition_event": TransitionEvent,
    "goroutine_event": GoroutineEvent,
    "switch_event": SwitchEvent,
    "cgroup_event": CgroupEvent,
    "off_cpu_event": OffCpuEvent,
    "wait_event": WaitEvent,
    "stop_event": StopEvent,
}

ENUMS: dict[str, tuple[str, type[enum.IntEnum]]] = {
    "event_type": ("EVENT_", EventType),
    "event_flag": ("FLAG_", EventFlag),
}
