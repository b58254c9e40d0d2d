"""bpf/types.h as ctypes: the structs and enums that BPF and user space share. :mod:`schedtrace.event_abi` has those of
events.

types.h is the authority. tests/unit/test_abi.py compares this module with types.h through debug info, and
:mod:`schedtrace.session` compares it once more with what BCC made of types.h before it attaches anything.
"""

from __future__ import annotations

import ctypes
import enum

from schedtrace import event_abi

HISTOGRAM_SLOTS = 25
REASON_COUNT = 64
REASON_UNKNOWN = 63
OFFSET_UNKNOWN = 0xFFFF
SITE_LIMIT = 32
STOP_LIMIT = 32
HITS_BATCH = 16
WAITS_KEPT = 4
STOP_REASON_UNKNOWN = 0
NO_LIMIT = 0xFFFFFFFFFFFFFFFF


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
    UNKNOWN = 11
    COUNT = 12


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
    RECORD = 15
    STOP_WORLD = 16
    START_WORLD = 17
    COUNT = 18


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
    THREAD_UNKNOWN = 9
    COUNT = 10


class OffCpu(enum.IntEnum):
    """enum off_cpu"""

    PREEMPTED = 0
    BLOCKED = 1
    WOKEN = 2
    COUNT = 3


class Duration(enum.IntEnum):
    """enum duration"""

    RUN = 0
    STOPPING_GC = 1
    STOPPING_OTHER = 2
    STOPPED_GC = 3
    STOPPED_OTHER = 4
    COUNT = 5


class StopPlace(enum.IntEnum):
    """enum stop_place"""

    UNKNOWN = 0
    PARK = 1
    YIELD = 2
    SYSCALL = 3
    PREEMPT = 4
    COUNT = 5


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
        ("hits", ctypes.c_uint64),
        ("hits_limit", ctypes.c_uint64),
        ("running_reasons", ctypes.c_uint64),
        ("stop_since_ns", ctypes.c_uint64),
        ("sites", ctypes.c_uint64 * SITE_LIMIT),
        ("kinds", ctypes.c_uint8 * SITE_LIMIT),
        ("slot", ctypes.c_uint32),
        ("window", ctypes.c_uint32),
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
        ("stop_reasons", ctypes.c_uint8),
        ("stop_reason", ctypes.c_uint8),
        ("start_told", ctypes.c_uint8),
        ("timed_often", ctypes.c_uint8),
        ("padding", ctypes.c_uint8),
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
        ("kernel_ns", ctypes.c_uint64),
        ("undivided_ns", ctypes.c_uint64),
        ("partial_ns", ctypes.c_uint64 * GoroutineState.COUNT),
        ("partial_wait_ns", ctypes.c_uint64 * REASON_COUNT),
        ("partial_waits", ctypes.c_uint64 * REASON_COUNT),
        ("hits", ctypes.c_uint64 * SITE_LIMIT),
        ("timed_ns", ctypes.c_uint64),
        ("timed", ctypes.c_uint64),
        ("lost", ctypes.c_uint64 * LostReason.COUNT),
        ("cgroup_id", ctypes.c_uint64),
    )


class Wait(ctypes.Structure):
    """struct wait"""

    _fields_ = (("begin_ns", ctypes.c_uint64), ("end_ns", ctypes.c_uint64))


class Sampler(ctypes.Structure):
    """struct sampler"""

    _fields_ = (
        ("histograms", ctypes.c_uint64 * Duration.COUNT),
        ("stops", ctypes.c_uint64 * STOP_LIMIT),
        ("places", ctypes.c_uint8 * STOP_LIMIT),
        ("mcall", ctypes.c_uint64),
        ("stopped", Wait),
        ("g_m", ctypes.c_uint16),
        ("m_curg", ctypes.c_uint16),
        ("g_status", ctypes.c_uint16),
        ("g_pc", ctypes.c_uint16),
        ("other_place", ctypes.c_uint8),
        ("padding", ctypes.c_uint8 * 7),
    )


class SampleStats(ctypes.Structure):
    """struct sample_stats"""

    _fields_ = (
        ("sched_latency", Histogram * WakeCause.COUNT),
        ("stop_the_world", Histogram * Duration.COUNT),
        ("no_wait", ctypes.c_uint64),
        ("kernel_ns", ctypes.c_uint64),
        ("stopped_ns", ctypes.c_uint64),
        ("undivided_ns", ctypes.c_uint64),
    )


class ProcessEvent(ctypes.Structure):
    """struct process_event"""

    _fields_ = (("tgid", ctypes.c_uint32), ("padding", ctypes.c_uint32))


class Window(ctypes.Structure):
    """struct window"""

    _fields_ = (("until_ns", ctypes.c_uint64),)


class WindowEnd(ctypes.Structure):
    """struct window_end"""

    _fields_ = (("window", ctypes.c_uint32), ("padding", ctypes.c_uint32))


class Process(ctypes.Structure):
    """struct process"""

    _fields_ = (
        ("allm", ctypes.c_uint64),
        ("running_reasons", ctypes.c_uint64),
        ("pid_namespace", ctypes.c_uint64),
        ("pid_namespace_device", ctypes.c_uint64),
        ("m_procid", ctypes.c_uint16),
        ("m_curg", ctypes.c_uint16),
        ("m_alllink", ctypes.c_uint16),
        ("g_m", ctypes.c_uint16),
        ("g_atomicstatus", ctypes.c_uint16),
        ("g_waitreason", ctypes.c_uint16),
        ("g_startpc", ctypes.c_uint16),
        ("by_function", ctypes.c_uint8),
        ("is_recorded", ctypes.c_uint8),
        ("event_slot", ctypes.c_uint32),
        ("padding", ctypes.c_uint32),
    )


class ProcessSlot(ctypes.Structure):
    """struct process_slot"""

    _fields_ = (("slot", ctypes.c_uint32), ("padding", ctypes.c_uint32))


class ThreadStats(ctypes.Structure):
    """struct thread_stats"""

    _fields_ = (
        ("run_queue", Histogram),
        ("off_cpu", Histogram * OffCpu.COUNT),
        ("lost", ctypes.c_uint64 * LostReason.COUNT),
    )


class OffCpuTotals(ctypes.Structure):
    """struct off_cpu_totals"""

    _fields_ = (
        ("times", ctypes.c_uint64),
        ("run_queue_ns", ctypes.c_uint64),
        ("blocked_ns", ctypes.c_uint64),
        ("max_ns", ctypes.c_uint64),
    )


class Thread(ctypes.Structure):
    """struct thread"""

    _fields_ = (
        ("runnable_since_ns", ctypes.c_uint64),
        ("m", ctypes.c_uint64),
        ("next_m", ctypes.c_uint64),
        ("look_again_ns", ctypes.c_uint64),
        ("off_since_ns", ctypes.c_uint64),
        ("start_pc", ctypes.c_uint64),
        ("waits", Wait * WAITS_KEPT),
        ("waited", ctypes.c_uint32),
        ("slot", ctypes.c_uint32),
        ("procid", ctypes.c_uint32),
        ("on_cpu", ctypes.c_uint8),
        ("off_cpu", ctypes.c_uint8),
        ("padding", ctypes.c_uint8 * 2),
    )


STRUCTS: dict[str, type[ctypes.Structure]] = {
    "histogram": Histogram,
    "target": Target,
    "goroutine_key": GoroutineKey,
    "totals": Totals,
    "goroutine": Goroutine,
    "function_key": FunctionKey,
    "target_stats": TargetStats,
    "sampler": Sampler,
    "sample_stats": SampleStats,
    "process_event": ProcessEvent,
    "window": Window,
    "window_end": WindowEnd,
    "process": Process,
    "process_slot": ProcessSlot,
    "thread_stats": ThreadStats,
    "off_cpu_totals": OffCpuTotals,
    "wait": Wait,
    "thread": Thread,
    **event_abi.STRUCTS,
}
"""Struct name in types.h and what it includes -> its ctypes twin."""

ENUMS: dict[str, tuple[str, type[enum.IntEnum]]] = {
    "goroutine_state": ("STATE_", GoroutineState),
    "wake_cause": ("CAUSE_", WakeCause),
    "probe_kind": ("KIND_", ProbeKind),
    "lost_reason": ("LOST_", LostReason),
    "duration": ("DURATION_", Duration),
    "stop_place": ("PLACE_", StopPlace),
    "off_cpu": ("OFF_CPU_", OffCpu),
    **event_abi.ENUMS,
}
"""Enum name there -> prefix of its constants, and its twin."""
