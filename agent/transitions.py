"""What the functions of the Go runtime do to the status of a goroutine, as far as probes are concerned.

Every change goes through ``runtime.casgstatus`` or, for a few, through a compare-and-swap of its own.
Checked against runtime/proc.go, coro.go, preempt.go, mgc*.go and stack.go of Go 1.19 and 1.21 to 1.27:

========================  ====================================================================================
running -> waiting        park_m, always passed to mcall by value
waiting -> runnable       ready; injectglist (netpoll, sysmon, sweepers), each goroutine of the list;
                          findRunnable, findRunnableGCWorker (schedule too up to 1.18), which run it at once;
                          park_m if the unlock function says no
runnable -> running       execute
idle -> dead -> runnable  newproc1, the second step; 1.23+: -> waiting for a coroutine
running -> runnable       goschedImpl (Gosched, preemption), goyield_m
running -> dead           gdestroy (up to 1.21 goexit0)
running <-> syscall       reentersyscall, entersyscallblock, exitsyscall. From 1.26 the first and the last
                          swap by themselves and call casgstatus only if that fails, or inside synctest
syscall -> runnable       exitsyscall0. From 1.26 exitsyscallNoP, running -> runnable: exitsyscall has always
                          moved to running before
running -> preempted      preemptPark, by casGToPreemptScan; suspendG then moves it to waiting by
                          casGFromPreempted, and resumeG makes it runnable through ready
running <-> waiting       coroswitch_m (1.23+, iter.Pull), by itself for both goroutines involved; calls
                          casgstatus for the same moves only if that fails, or inside synctest
dead <-> syscall          needm, dropm: a C thread begins to call into Go, or ends. exitsyscall follows needm
running -> waiting ->     goroutines that in fact go on, on the system stack: GC workers and assists, stopping
running                   the world and more, through casGToWaiting* since 1.22
running -> copystack ->   newstack, twice each time a stack grows
running
========================  ====================================================================================
"""

from collections.abc import Mapping
from dataclasses import dataclass

from schedtrace.abi import ProbeKind

IDLE, RUNNABLE, RUNNING, SYSCALL, WAITING, DEAD = 0, 1, 2, 3, 4, 6


@dataclass(frozen=True)
class OneTransition:
    """A function that makes one transition of its first argument each time it is called: a probe of that ``kind``.

    ``always`` is false for those that do so only where the compiler put another of these functions into them.
    """

    kind: ProbeKind
    old: int
    new: int
    always: bool = True


ONE_TRANSITION: Mapping[str, OneTransition] = {
    "park_m": OneTransition(ProbeKind.PARK, RUNNING, WAITING),
    "ready": OneTransition(ProbeKind.READY, WAITING, RUNNABLE),
    "execute": OneTransition(ProbeKind.RUN, RUNNABLE, RUNNING),
    "goschedImpl": OneTransition(ProbeKind.YIELD, RUNNING, RUNNABLE),
    "gosched_m": OneTransition(ProbeKind.YIELD, RUNNING, RUNNABLE, always=False),
    "gopreempt_m": OneTransition(ProbeKind.YIELD, RUNNING, RUNNABLE, always=False),
    "goyield_m": OneTransition(ProbeKind.YIELD, RUNNING, RUNNABLE),
    "gdestroy": OneTransition(ProbeKind.EXIT, RUNNING, DEAD),
    "goexit0": OneTransition(ProbeKind.EXIT, RUNNING, DEAD, always=False),
    "exitsyscall0": OneTransition(ProbeKind.SYSCALL_EXIT_NO_P, SYSCALL, RUNNABLE),
    "exitsyscallNoP": OneTransition(ProbeKind.SYSCALL_EXIT_NO_P, RUNNING, RUNNABLE),
}

# Compare-and-swaps that are their own and no copy of casgstatus.
OWN_SWAPS = frozenset({
    "casgstatus", "castogscanstatus", "casfrom_Gscanstatus", "casGToPreemptScan", "casGFromPreempted",
    "casgcopystack", "coroswitch_m", "allGsSnapshotSortedForGC",
})  # fmt: skip
SYSCALLS = frozenset({"reentersyscall", "entersyscall", "entersyscallblock", "exitsyscall"})
# Transitions that say nothing of scheduling; functions inside these ("markroot.func1") belong to them.
UNINTERESTING = frozenset({
    "casGToWaiting", "casGToWaitingForGC", "casGToWaitingForSuspendG", "gcBgMarkWorker", "gcAssistAlloc1",
    "markroot", "gcMarkTermination", "gcMarkDone", "forEachP", "forEachPInternal", "stopTheWorld",
    "stopTheWorldGC", "stopTheWorldWithSema", "traceAdvance", "writeheapdump_m", "debugCallWrap",
    "debugCallWrap1", "newstack", "copystack", "oneNewExtraM", "findGoroutineLeaks",
})  # fmt: skip
# These wake a goroutine that runs next: the probe on execute takes one that was waiting as woken just then.
SCHEDULER = frozenset({"findRunnable", "findrunnable", "schedule", "(*gcControllerState).findRunnableGCWorker"})
C_THREADS = frozenset({"needm", "dropm"})
# By how often each is called in the programs one wants to watch: servers that talk and wait.
HOTTEST = (
    "casgstatus", "execute", "park_m", "ready", "reentersyscall", "exitsyscall", "coroswitch_m",
    "injectglist", "findRunnable", "newproc1", "gdestroy", "goexit0", "goschedImpl", "exitsyscall0",
    "exitsyscallNoP",
)  # fmt: skip
# newproc1, or what the compiler put it into.
NEW_GOROUTINE = frozenset({"newproc1", "newproc.func1", "newcoro.func1"})


def is_uninteresting(function: str) -> bool:
    """Whether a function (without "runtime.") changes a status only in ways that say nothing of
    scheduling."""
    return function.split(".")[0] in UNINTERESTING
