"""What a wait reason means: the cause of the wake that ends it, and whether the goroutine really waits. Pure.

Reasons are the runtime's own words (runtime2.go, waitReasonStrings), the same in every version that has them; their
numbers differ between versions, so that they are looked up in the target's own table. A reason that is not known here,
of a version still to come, counts as "other".
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from schedtrace.abi import OFFSET_UNKNOWN, REASON_COUNT, REASON_UNKNOWN, Target, WakeCause

COROUTINE = "coroutine"

_CAUSES: Mapping[str, WakeCause] = {
    "chan receive": WakeCause.CHANNEL,
    "chan send": WakeCause.CHANNEL,
    "chan receive (nil chan)": WakeCause.CHANNEL,
    "chan send (nil chan)": WakeCause.CHANNEL,
    "select": WakeCause.SELECT,
    "select (no cases)": WakeCause.SELECT,
    "semacquire": WakeCause.MUTEX,
    "sync.Cond.Wait": WakeCause.MUTEX,
    "sync.Mutex.Lock": WakeCause.MUTEX,
    "sync.RWMutex.RLock": WakeCause.MUTEX,
    "sync.RWMutex.Lock": WakeCause.MUTEX,
    "sync.WaitGroup.Wait": WakeCause.MUTEX,
    "IO wait": WakeCause.NETWORK,
    "sleep": WakeCause.TIMER,
    "timer goroutine (idle)": WakeCause.TIMER,
    # suspendG stopped it at a safe point (for its stack to be scanned) and lets it go on
    "preempted": WakeCause.PREEMPTED,
    "GC assist wait": WakeCause.GC,
    "GC sweep wait": WakeCause.GC,
    "GC scavenge wait": WakeCause.GC,
    "GC worker (idle)": WakeCause.GC,
    "GC weak to strong wait": WakeCause.GC,
    "wait for GC cycle": WakeCause.GC,
    "force gc (idle)": WakeCause.GC,
    "finalizer wait": WakeCause.GC,
    "cleanup wait": WakeCause.GC,
}

_RUNNING = frozenset(
    {
        "GC assist marking",
        "garbage collection",
        "garbage collection scan",
        "GC worker (active)",
        "GC mark termination",
        "stopping the world",
        "flushing proc caches",
        "trace goroutine status",
        "trace proc status",
        "page trace flush",
        "dumping heap",
        "debug call",
    }
)
"""The runtime calls a goroutine waiting for one of these while it runs on the system stack (isWaitingForSuspendG)."""

_SYNCTEST = (" (durable)", " (synctest)")
"""Inside testing/synctest the runtime adds one of these to the ordinary reason."""


def wake_cause(reason: str) -> WakeCause:
    """The cause of the wake that ends a wait for ``reason``."""
    for suffix in _SYNCTEST:
        reason = reason.removesuffix(suffix)
    return _CAUSES.get(reason, WakeCause.OTHER)


def really_runs(reason: str) -> bool:
    """True if a goroutine that waits for ``reason`` in fact runs, on the system stack."""
    return reason in _RUNNING


def reason_name(reasons: Sequence[str], number: int) -> str:
    """The name of wait reason ``number`` in a version's table; "unknown" where it was not read."""
    if number == REASON_UNKNOWN:
        return "unknown"
    if number < len(reasons) and reasons[number]:
        return reasons[number]
    return f"reason {number}"


def running_reasons(reasons: Sequence[str]) -> int:
    """Bit r: a goroutine that waits for reason r in fact runs on the system stack."""
    return sum(1 << number for number, reason in enumerate(reasons[:REASON_COUNT]) if really_runs(reason))


def target_record(offsets: Mapping[str, int], reasons: Sequence[str], *, stale_reasons: bool) -> Target:
    """The BPF side's record of a target, but for its slot.

    ``offsets`` maps "g.waitreason" and so on to bytes; one that is missing is not read. ``stale_reasons``: Go up to
    1.19 doesn't store a reason before it runs on the system stack, so that no reason can be trusted to say so.
    """

    def offset(name: str) -> int:
        return offsets.get(name, OFFSET_UNKNOWN)

    record = Target(
        g_waitreason=offset("g.waitreason"),
        g_preempt=offset("g.preempt"),
        g_schedlink=offset("g.schedlink"),
        g_syscallsp=offset("g.syscallsp"),
        g_startpc=offset("g.startpc"),
        g_coroarg=offset("g.coroarg"),
        g_coroexit=offset("g.coroexit"),
        coro_gp=offset("coro.gp"),
        g_goid=offset("g.goid"),
        coroutine_reason=REASON_UNKNOWN,
        running_reasons=0 if stale_reasons else running_reasons(reasons),
    )
    for number in range(REASON_COUNT):
        reason = reasons[number] if number < len(reasons) else ""
        record.cause_of_reason[number] = wake_cause(reason)
        if reason == COROUTINE:
            record.coroutine_reason = number
    return record
