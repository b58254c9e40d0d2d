"""What was seen of one process in one window of time, by name. Pure.

A window is what :mod:`schedtrace.report` prints and what the JSON of ``attach`` holds. Durations are in nanoseconds.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from schedtrace.histogram import Histogram, total

STATES = {
    0: "idle",
    1: "runnable",
    2: "running",
    3: "syscall",
    4: "waiting",
    6: "dead",
    8: "copystack",
    9: "preempted",
    10: "leaked",
}
"""Go's numbers of goroutine states (runtime2.go) and their names."""

PASSIVE_LEVEL = "passive"
"""How a process is watched that gets no probes."""
WINDOWS_LEVEL = "full_in_windows"
"""How a process is watched that every goroutine is followed in, but only for a while now and then."""
FULL_LEVEL = "full"
"""How a process is watched that every goroutine is followed in."""

CAUSES = (
    "new",
    "preempted",
    "yielded",
    "channel",
    "select",
    "mutex/semaphore",
    "network",
    "timer/sleep",
    "syscall",
    "gc",
    "other",
)
"""Why a goroutine became runnable, in the order of ``enum wake_cause`` in bpf/types.h."""


@dataclass(frozen=True)
class Target:
    """The process that was watched."""

    pid: int
    exe: str
    name: str
    go_version: str
    level: str
    mode: str
    """Which probes: "casgstatus", "functions" or "mixed" (see plan.py)."""
    symbols: str
    cgroup_path: str
    cgroup_hierarchy: str
    cgroup_id: int
    quota_cores: float | None


@dataclass(frozen=True)
class StateTime:
    """Time that goroutines spent in a state, and how many times they entered it.

    ``reason`` is the wait reason, in the runtime's words, for "waiting" and empty for the others.
    """

    state: str
    reason: str
    time_ns: int
    count: int


@dataclass(frozen=True)
class FunctionTotals:
    """What all goroutines that were started with one function did."""

    function: str
    goroutines: int
    """Alive at the window's end, or ended in it."""
    created: int
    exits: int
    parks: int
    readies: int
    runs: int
    preempted: int
    yielded: int
    switches: int
    syscalls: int
    runnable_ns: int
    running_ns: int
    waiting_ns: int
    syscall_ns: int
    max_runnable_ns: int
    max_waiting_ns: int


@dataclass(frozen=True)
class LivingGoroutine:
    """One goroutine that had not ended when it was looked at. What it did counts from when it was first seen."""

    g: int
    """Address of its runtime.g, which tells it apart while it lives; a later goroutine may get the same."""
    function: str
    """That it began with."""
    state: str
    """Empty: it went from one to another while it was looked at."""
    reason: str
    """The wait reason while it waits, else empty."""
    in_state_ns: int | None
    """For how long it has been in that state, within the window; None with an empty state."""
    runs: int
    runnable_ns: int
    """All of its waits to run; one that goes on counts up to now, as it does in the next."""
    max_runnable_ns: int


@dataclass(frozen=True)
class ProbeHits:
    """One probe: the function, the instruction it sits on, and how often the target hit it."""

    function: str
    site: str
    emulated: bool
    hits: int


@dataclass(frozen=True)
class Throttling:
    """The cgroup's CPU throttling within the window (cpu.stat)."""

    periods: int
    throttled_periods: int
    throttled_ns: int


@dataclass(frozen=True)
class Window:
    """Everything seen of one target from ``attached`` to now (or between two looks)."""

    target: Target
    duration_ns: int
    transitions: Mapping[tuple[str, str], int]
    sched_latency: Mapping[str, Histogram]
    """By wake cause; only causes that occurred."""
    wait: Mapping[str, Histogram]
    """By wait reason: completed waits that began in the window."""
    states: tuple[StateTime, ...]
    functions: tuple[FunctionTotals, ...]
    run_queue: Histogram
    """Threads: runnable for the kernel, not running."""
    threads: int
    goroutines: int
    """Goroutines that are followed now."""
    probes: tuple[ProbeHits, ...]
    foreign_hits: int
    """Hits by other processes of the same executable."""
    unseen: tuple[str, ...]
    lost: Mapping[str, int]
    throttling: Throttling | None
    overhead_ns: int | None
    """Estimated CPU time that the probes cost the target; None if it could not be calibrated."""
    ended: str
    """Why the window ended, empty while it goes on."""
    worst: tuple[LivingGoroutine, ...] = ()
    """Those alive that come first by longest wait to run, by all waits to run, or by time in their present state, in no
    order."""

    @property
    def sched_latency_total(self) -> Histogram:
        """Scheduling latency over all causes."""
        return total(tuple(self.sched_latency.values()))
