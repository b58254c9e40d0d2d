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
WINDOWS_LEVEL = "windows"
"""How a process is watched that is at times, now and then, at the sampled or the full level."""
SAMPLED_LEVEL = "sampled"
"""How a process is watched of which only what the runtime samples itself is seen."""
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
    "unknown",
)
"""Why a goroutine became runnable, in the order of ``enum wake_cause`` in bpf/types.h."""
STOPS = ("stopping_gc", "stopping_other", "stopped_gc", "stopped_other")
"""Stops of the world, in the order of ``enum duration`` behind its first: until all Ps have stopped, and from the wish
to stop until all run again; for the garbage collector, and for other reasons."""


OFF_CPU = ("preempted", "blocked", "woken")
"""Why a goroutine that runs for Go is off the CPU, in the order of ``enum off_cpu`` in bpf/types.h: the kernel ran
something else, and its thread waited for a CPU; the thread slept in the kernel; woken from that, it waited for one."""


@dataclass(frozen=True)
class Target:
    """The process that was watched."""

    pid: int
    exe: str
    name: str
    go_version: str
    level: str
    mode: str
    """Which probes: "casgstatus" or "functions"; at the sampled level "record" (see plan.py)."""
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
class OffCpuTotals:
    """How often and how long goroutines that were started with one function ran for Go and were off the CPU: waiting on
    the kernel's run queue, blocked in the kernel, and both together at most in one go."""

    function: str
    times: int = 0
    run_queue_ns: int = 0
    blocked_ns: int = 0
    max_ns: int = 0

    def __add__(self, other: OffCpuTotals) -> OffCpuTotals:
        return OffCpuTotals(
            self.function,
            self.times + other.times,
            self.run_queue_ns + other.run_queue_ns,
            self.blocked_ns + other.blocked_ns,
            max(self.max_ns, other.max_ns),
        )


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
class WaitParts:
    """What goroutines waited for that waited to run."""

    total_ns: int
    """All of it: the sum of the histograms of scheduling latency."""
    kernel_ns: int
    """The thread that then ran the goroutine was runnable and not running."""
    stopped_ns: int | None
    """It ran, and the world was stopped; None where stops aren't seen."""
    undivided_ns: int
    """Nothing is known of the thread."""

    @property
    def queue_ns(self) -> int:
        """Nothing of that: in a queue of Go's, or if stops aren't seen while the world was stopped."""
        return max(self.total_ns - self.kernel_ns - (self.stopped_ns or 0) - self.undivided_ns, 0)


@dataclass(frozen=True)
class Samples:
    """What the runtime itself measured and the sampled level saw: of the times that goroutines wait to run a sample of
    about one in eight, of stops of the world all. Nothing is multiplied."""

    sched_latency: Mapping[str, Histogram]
    """By wake cause; only causes that occurred."""
    no_wait: int
    """Samples of what is no wait to run."""
    stop_the_world: Mapping[str, Histogram]
    """By one of :data:`STOPS`: all that this runtime records."""
    parts: WaitParts

    @property
    def sched_latency_total(self) -> Histogram:
        """Over all causes."""
        return total(tuple(self.sched_latency.values()))


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
    run_queue: Histogram | None
    """Threads: runnable for the kernel, not running; None if only some goroutines are meant."""
    off_cpu: Mapping[str, Histogram] | None
    """Goroutines that run for Go while their thread is off the CPU, by why (all of :data:`OFF_CPU`); None if it can't
    be told which goroutine a thread runs."""
    off_cpu_functions: tuple[OffCpuTotals, ...]
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
    wait_parts: WaitParts | None = None
    """Of all time in ``sched_latency``; None at the sampled level."""
    stops: Mapping[str, Histogram] | None = None
    """Of the world, by reason: from when it was to be stopped until it was to be started again. Only of recordings, and
    None where these can't tell."""
    samples: Samples | None = None
    """At the sampled level, where goroutines are not followed: no transitions, states, waits and functions then."""

    @property
    def sched_latency_total(self) -> Histogram:
        """Scheduling latency over all causes: of all runs, or of the sample."""
        return self.samples.sched_latency_total if self.samples else total(tuple(self.sched_latency.values()))
