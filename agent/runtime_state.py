"""What a Go runtime says of itself, and sums of that over processes. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from schedtrace.histogram import Histogram, add_histograms
from schedtrace.runtime_histogram import RuntimeHistogram

PROCESSOR_STATES = ("idle", "running", "syscall", "gcstop")
"""Of a P, by number; "dead" ones (4) are not in allp."""


@dataclass(frozen=True)
class Processor:
    """A P. ``state``: "idle", "running", "syscall" (up to Go 1.25) or "gcstop"; ``run_queue``: goroutines in its own
    queue, the one to run next included."""

    id: int
    state: str
    run_queue: int


@dataclass(frozen=True)
class RuntimeState:
    """What the runtime says of itself. Counts are since the program's start.

    ``sched_latency`` samples one in eight of the times that a goroutine stops running: how long it then was runnable
    until it ran; up to Go 1.25 system calls are sampled, too, as waits of 0. ``stop_the_world`` has "stopped_gc", from
    the wish to stop for the collector until all run again, and from Go 1.22 "stopped_other", for other reasons, and
    "stopping_gc" and "stopping_other", until all have stopped. ``goroutines`` are those that runtime.NumGoroutine
    counts, without the runtime's own. ``threads`` are the runtime's Ms that have not ended; where C code calls Go, one
    of them may have no thread. ``run_queue`` is the length of the global queue; goroutines that
    move between queues while these are read may be counted twice, or not at all. ``gc_cycles`` are completed ones;
    ``heap_goal_bytes`` is the heap's size at which the current one is to end. They are None where they are not known,
    the goal also where there is none (GOGC=off).
    """

    sched_latency: RuntimeHistogram
    stop_the_world: Mapping[str, RuntimeHistogram]
    gomaxprocs: int
    goroutines: int
    threads: int
    idle_threads: int
    processors: tuple[Processor, ...]
    idle_processors: int
    run_queue: int
    gc_cycles: int | None
    heap_goal_bytes: int | None


@dataclass(frozen=True)
class RuntimeTotals:
    """What runtimes have counted; sums of them are totals too. ``stop_the_world`` by the names of
    :attr:`RuntimeState.stop_the_world`; ``gc_cycles`` is None where it isn't known of any."""

    sched_latency: Histogram = field(default_factory=Histogram)
    stop_the_world: Mapping[str, Histogram] = field(default_factory=dict)
    gc_cycles: int | None = None

    @classmethod
    def of(cls, state: RuntimeState) -> RuntimeTotals:
        """Since the program's start."""
        stops = {name: histogram.histogram for name, histogram in state.stop_the_world.items()}
        return cls(state.sched_latency.histogram, stops, state.gc_cycles)

    def __add__(self, other: RuntimeTotals) -> RuntimeTotals:
        cycles = [each for each in (self.gc_cycles, other.gc_cycles) if each is not None]
        return RuntimeTotals(
            self.sched_latency + other.sched_latency,
            add_histograms(self.stop_the_world, other.stop_the_world),
            sum(cycles) if cycles else None,
        )

    def since(self, earlier: RuntimeTotals) -> RuntimeTotals:
        """What was counted after ``earlier``, of the same runtime. Raises ValueError if that was more."""
        none = Histogram()
        return RuntimeTotals(
            self.sched_latency.since(earlier.sched_latency),
            {name: one.since(earlier.stop_the_world.get(name, none)) for name, one in self.stop_the_world.items()},
            None if self.gc_cycles is None else self.gc_cycles - (earlier.gc_cycles or 0),
        )
