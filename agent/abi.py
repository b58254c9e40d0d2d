"""bpf/types.h as ctypes: the structs and enums that BPF and user space share.

types.h is the authority. tests/unit/test_abi.py compares this module with types.h through debug info, and
:mod:`schedtrace.session` compares it once more with what BCC made of types.h before it attaches anything.
"""

from __future__ import annotations

import ctypes
import enum

HISTOGRAM_SLOTS = 25
REASON_COUNT = 64
REASON_UNKNOWN = 63
OFFSET_UNKNOWN = 0xFFFF
SITE_LIMIT = 32


class GoroutineState(enum.IntEnum):
    """enum goroutine_state"""

    IDLE = 0
    RUNNABLE = 1
    RUNNING = 2
    SYSCALL = 3
    WAITING = 4
    DEAD = 6
    COPYSTACK = 8
    PREEMPTED = 9
    LEAKED = 10
    DEADEXTRA = 11
    COUNT = 12


class WakeCause(enum.IntEnum):
    """enum wake_cause"""

    NEW = 0
    PREEMPTED = 1
    YIELDED = 2
    CHANNEL = 3
    SELECT = 4
    MUTEX = 5
    NETWORK = 6
    TIMER = 7
    SYSCALL = 8
    GC = 9
    OTHER = 10
    COUNT = 11


class ProbeKind(enum.IntEnum):
    """enum probe_kind"""

    UNKNOWN = 0
    CASGSTATUS = 1
    PARK = 2
    READY = 3
    READY_LIST = 4
    RUN = 5
    CREATE = 6
    CREATED = 7
    YIELD = 8
    STOP = 9
    EXIT = 10
    SYSCALL = 11
    SYSCALL_EXIT = 12
    SYSCALL_EXIT_NO_P = 13
    COROUTINE_SWITCH = 14
    COUNT = 15


class LostReason(enum.IntEnum):
    """enum lost_reason"""

    GOROUTINES_FULL = 0
    FUNCTIONS_FULL = 1
    THREADS_FULL = 2
    INCONSISTENT = 3
    UNREADABLE = 4
    LIST_TOO_LONG = 5
    BEGAN_BEFORE = 6
    SWITCH_UNSEEN = 7
    PROBE_UNKNOWN = 8
    COUNT = 9


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


class Histogram(ctypes.Structure):
    """struct histogram"""

    _fields_ = (
        ("slots", ctypes.c_uint64 * HISTOGRAM_SLOTS),
        ("sum_ns", ctypes.c_uint64),
        ("max_ns", ctypes.c_uint64),
    )


class Target(ctypes.Structure):
    """struct target"""

    _fields_ = (
        ("attached_ns", ctypes.c_uint64),
        ("running_reasons", ctypes.c_uint64),
        ("sites", ctypes.c_uint64 * SITE_LIMIT),
        ("kinds", ctypes.c_uint8 * SITE_LIMIT),
        ("slot", ctypes.c_uint32),
        ("g_waitreason", ctypes.c_uint16),
        ("g_preempt", ctypes.c_uint16),
        ("g_schedlink", ctypes.c_uint16),
        ("g_syscallsp", ctypes.c_uint16),
        ("g_startpc", ctypes.c_uint16),
        ("g_coroarg", ctypes.c_uint16),
        ("g_coroexit", ctypes.c_uint16),
        ("coro_gp", ctypes.c_uint16),
        ("g_goid", ctypes.c_uint16),
        ("coroutine_reason", ctypes.c_uint8),
        ("padding", ctypes.c_uint8 * 1),
        ("cause_of_reason", ctypes.c_uint8 * REASON_COUNT),
    )


class GoroutineKey(ctypes.Structure):
    """struct goroutine_key"""

    _fields_ = (("g", ctypes.c_uint64), ("tgid", ctypes.c_uint32), ("padding", ctypes.c_uint32))


TOTALS = (
    "goroutines",
    "exits",
    "parks",
    "readies",
    "runs",
    "preempted",
    "yielded",
    "switches",
    "syscalls",
    "runnable_ns",
    "running_ns",
    "waiting_ns",
    "syscall_ns",
    "max_runnable_ns",
    "max_waiting_ns",
)
"""The fields of struct totals."""


class Totals(ctypes.Structure):
    """struct totals"""

    _fields_ = tuple((name, ctypes.c_uint64) for name in TOTALS)


class Goroutine(ctypes.Structure):
    """struct goroutine"""

    _fields_ = (
        ("since_ns", ctypes.c_uint64),
        ("start_pc", ctypes.c_uint64),
        ("state", ctypes.c_uint8),
        ("reason", ctypes.c_uint8),
        ("cause", ctypes.c_uint8),
        ("partial", ctypes.c_uint8),
        ("switched", ctypes.c_uint8),
        ("named", ctypes.c_uint8),
        ("padding", ctypes.c_uint8 * 2),
        ("totals", Totals),
    )


class FunctionKey(ctypes.Structure):
    """struct function_key"""

    _fields_ = (("start_pc", ctypes.c_uint64), ("slot", ctypes.c_uint32), ("padding", ctypes.c_uint32))


class TargetStats(ctypes.Structure):
    """struct target_stats"""

    _fields_ = (
        ("transitions", ctypes.c_uint64 * (GoroutineState.COUNT * GoroutineState.COUNT)),
        ("sched_latency", Histogram * WakeCause.COUNT),
        ("wait", Histogram * REASON_COUNT),
        ("run_queue", Histogram),
        ("partial_ns", ctypes.c_uint64 * GoroutineState.COUNT),
        ("partial_wait_ns", ctypes.c_uint64 * REASON_COUNT),
        ("partial_waits", ctypes.c_uint64 * REASON_COUNT),
        ("hits", ctypes.c_uint64 * SITE_LIMIT),
        ("lost", ctypes.c_uint64 * LostReason.COUNT),
        ("cgroup_id", ctypes.c_uint64),
    )


class ProcessEvent(ctypes.Structure):
    """struct process_event"""

    _fields_ = (("tgid", ctypes.c_uint32), ("padding", ctypes.c_uint32))


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


class Thread(ctypes.Structure):
    """struct thread"""

    _fields_ = (
        ("runnable_since_ns", ctypes.c_uint64),
        ("slot", ctypes.c_uint32),
        ("on_cpu", ctypes.c_uint32),
    )


STRUCTS: dict[str, type[ctypes.Structure]] = {
    "histogram": Histogram,
    "target": Target,
    "goroutine_key": GoroutineKey,
    "totals": Totals,
    "goroutine": Goroutine,
    "function_key": FunctionKey,
    "target_stats": TargetStats,
    "process_event": ProcessEvent,
    "transition_event": TransitionEvent,
    "goroutine_event": GoroutineEvent,
    "switch_event": SwitchEvent,
    "cgroup_event": CgroupEvent,
    "thread": Thread,
}
"""Struct name in types.h -> its ctypes twin."""

ENUMS: dict[str, tuple[str, type[enum.IntEnum]]] = {
    "goroutine_state": ("STATE_", GoroutineState),
    "wake_cause": ("CAUSE_", WakeCause),
    "probe_kind": ("KIND_", ProbeKind),
    "lost_reason": ("LOST_", LostReason),
    "event_type": ("EVENT_", EventType),
    "event_flag": ("FLAG_", EventFlag),
}
"""Enum name in types.h -> prefix of its constants there, and its twin."""
