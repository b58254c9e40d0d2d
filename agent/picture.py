"""What the exported page shows of one target: sums over slices of time, functions, the worst waits. Pure.

Durations are nanoseconds, times nanoseconds of CLOCK_MONOTONIC.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np

from schedtrace.abi import GoroutineState as State
from schedtrace.events import Array
from schedtrace.histogram import SLOTS
from schedtrace.timeline import KERNEL_STATES, SPAN, STATE_COUNT, Block, Timeline

SLICES = 120
WORST = 12
CANDIDATES = 500
"""So many of the longest waits are looked at for :attr:`Picture.worst`."""
_BOUNDS_NS = np.array([1000 << k for k in range(SLOTS - 1)], np.int64)


@dataclass(frozen=True)
class Function:
    """What the goroutines did that began with the function at ``start_pc``."""

    start_pc: int
    goroutines: int
    runs: int
    """How often one that waited to run got to run."""
    runnable_ns: int
    running_ns: int
    waiting_ns: int
    longest_runnable_ns: int


@dataclass(frozen=True)
class Wait:
    """One wait to run, and what happened meanwhile in the process."""

    number: int
    """Of the goroutine."""
    begin_ns: int
    end_ns: int
    cause: int
    tid: int
    """The thread on which it ran then."""
    ran: Sequence[tuple[int, int]]
    """Goroutines that ran meanwhile and for how long, the longest first."""
    threads_ns: Sequence[int]
    """How long the process's threads were in each of KERNEL_STATES, summed up over them."""
    thread_ns: Sequence[int]
    """The same for thread ``tid`` alone."""
    others: int
    """How many more of the longest waits were at the same time, at least in part."""


@dataclass
class Held:
    """How often something held the process back, for how long in all, and at most."""

    count: int = 0
    sum_ns: int = 0
    longest_ns: int = 0

    def add(self, lengths_ns: Array) -> None:
        """Those that lasted so long."""
        if len(lengths_ns):
            self.count += len(lengths_ns)
            self.sum_ns += int(lengths_ns.sum())
            self.longest_ns = max(self.longest_ns, int(lengths_ns.max()))

    def __add__(self, other: Held) -> Held:
        longest_ns = max(self.longest_ns, other.longest_ns)
        return Held(self.count + other.count, self.sum_ns + other.sum_ns, longest_ns)


@dataclass
class Picture:
    """One target. ``begin_ns`` + i × ``slice_ns`` is where slice i begins."""

    slot: int
    begin_ns: int
    slice_ns: int
    latency: Array
    """By slice in which the wait ended and place of the histogram: waits to run that were seen as a whole."""
    states: Array
    """By slice and state: time that goroutines spent in it."""
    waits: Array
    """By slice and wait reason: the part of that in state waiting."""
    kernel: Array
    """By slice and state of threads."""
    stops: dict[int, Held] = field(default_factory=dict)
    """Of the world, by reason."""
    throttles: Held = field(default_factory=Held)
    """By the CPU limit, as far as it is known when that was."""
    functions: list[Function] = field(default_factory=list)
    """Those whose goroutines waited longest to run come first."""
    worst: list[Wait] = field(default_factory=list)
    """The longest waits to run, the longest first, of those at the same time only one."""


def pictures(timeline: Timeline, slots: Sequence[int]) -> list[Picture]:
    """A picture of each target. Reads the recording twice. Raises UnreadableRecording, OSError."""
    length_ns = max(timeline.last_ns - timeline.first_ns, 1)
    slice_ns = -(-length_ns // SLICES)
    makers = {slot: _Maker(slot, timeline, slice_ns) for slot in slots}
    for block in timeline.blocks():
        for maker in makers.values():
            maker.add(block)
    meanwhile = [_Meanwhile(span, others) for maker in makers.values() for span, others in maker.worst()]
    if meanwhile:
        for block in timeline.blocks():
            for one in meanwhile:
                one.add(block)
    found = []
    for slot, maker in makers.items():
        maker.picture.functions = maker.functions()
        maker.picture.worst = [one.wait() for one in meanwhile if one.slot == slot]
        found.append(maker.picture)
    return found


class _Maker:
    """Sums up the spans of one target."""

    def __init__(self, slot: int, timeline: Timeline, slice_ns: int) -> None:
        self._slot = slot
        self.picture = Picture(
            slot,
            timeline.first_ns,
            slice_ns,
            np.zeros((SLICES, SLOTS), np.int64),
            np.zeros((SLICES, STATE_COUNT)),
            np.zeros((SLICES, 64)),
            np.zeros((SLICES, len(KERNEL_STATES))),
        )
        self._candidates = np.zeros(0, SPAN)
        lives = timeline.lives
        of_slot = lives["slot"] == slot
        self._pcs, self._goroutines = np.unique(lives["start_pc"][of_slot], return_counts=True)
        self._function_of = np.searchsorted(self._pcs, lives["start_pc"])  # right for those of this target
        self._sums = np.zeros((len(self._pcs), STATE_COUNT))
        self._runs = np.zeros(len(self._pcs), np.int64)
        self._longest = np.zeros(len(self._pcs), np.int64)

    def add(self, block: Block) -> None:
        picture = self.picture
        spans = block.spans[block.spans["slot"] == self._slot]
        kernel = block.kernel[block.kernel["slot"] == self._slot]
        self._spread(picture.states, spans, spans["state"])
        waits = spans[spans["state"] == State.WAITING]
        self._spread(picture.waits, waits, waits["reason"])
        self._spread(picture.kernel, kernel, kernel["state"])
        self._add_held(block)
        latencies = spans[(spans["state"] == State.RUNNABLE) & spans["is_whole"]]
        ns = latencies["end_ns"] - latencies["begin_ns"]
        when = np.clip((latencies["end_ns"] - picture.begin_ns) // picture.slice_ns, 0, SLICES - 1)
        place = when * SLOTS + np.searchsorted(_BOUNDS_NS, ns)
        picture.latency += np.bincount(place, minlength=SLICES * SLOTS).reshape(SLICES, SLOTS)
        self._add_to_functions(spans, latencies, ns)
        candidates = np.concatenate([self._candidates, latencies])
        waited = candidates["end_ns"] - candidates["begin_ns"]
        self._candidates = candidates[np.argsort(-waited, kind="stable")[:CANDIDATES]]

    def _add_held(self, block: Block) -> None:
        stops = block.stops[block.stops["slot"] == self._slot]
        lengths_ns = stops["time_ns"].astype(np.int64) - stops["since_ns"].astype(np.int64)
        for reason in np.unique(stops["reason"]).tolist():
            self.picture.stops.setdefault(reason, Held()).add(lengths_ns[stops["reason"] == reason])
        throttles = block.throttles[(block.throttles["slot"] == self._slot) & block.throttles["is_seen"]]
        self.picture.throttles.add(throttles["end_ns"] - throttles["begin_ns"])

    def worst(self) -> Iterator[tuple[Array, int]]:
        """The longest waits, and how many more there were at the same time: often all wait for the same thing."""
        left = self._candidates
        for _ in range(WORST):
            if not len(left):
                return
            longest = left[0]
            at_once = (left["begin_ns"] < longest["end_ns"]) & (left["end_ns"] > longest["begin_ns"])
            at_once[0] = True
            yield longest, int(at_once.sum()) - 1
            left = left[~at_once]

    def _spread(self, into: Array, spans: Array, group: Array) -> None:
        into += spread(spans["begin_ns"] - self.picture.begin_ns, spans["end_ns"] - self.picture.begin_ns, group,
                       into.shape[1], self.picture.slice_ns)  # fmt: skip

    def _add_to_functions(self, spans: Array, latencies: Array, latencies_ns: Array) -> None:
        if not len(self._pcs):
            return
        where = self._function_of[spans["number"]] * STATE_COUNT + spans["state"]
        sums = np.bincount(where, spans["end_ns"] - spans["begin_ns"], self._sums.size)
        self._sums += sums.reshape(self._sums.shape)
        functions = self._function_of[latencies["number"]]
        self._runs += np.bincount(functions, minlength=len(self._pcs))
        np.maximum.at(self._longest, functions, latencies_ns)

    def functions(self) -> list[Function]:
        found = [
            Function(
                int(pc),
                int(self._goroutines[i]),
                int(self._runs[i]),
                int(self._sums[i, State.RUNNABLE]),
                int(self._sums[i, State.RUNNING]),
                int(self._sums[i, State.WAITING]),
                int(self._longest[i]),
            )
            for i, pc in enumerate(self._pcs.tolist())
        ]
        return sorted(found, key=lambda one: (-one.runnable_ns, -one.running_ns))


class _Meanwhile:
    """What happened during one wait."""

    def __init__(self, span: Array, others: int) -> None:
        self.slot, self._others = int(span["slot"]), others
        self._span = span
        self._begin, self._end, self._tid = int(span["begin_ns"]), int(span["end_ns"]), int(span["end_tid"])
        self._ran: dict[int, int] = {}
        self._threads = np.zeros(len(KERNEL_STATES))
        self._thread = np.zeros(len(KERNEL_STATES))

    def add(self, block: Block) -> None:
        runs, ns = self._during(block.runs[block.runs["state"] == State.RUNNING])
        who, places = np.unique(runs["number"], return_inverse=True)
        for number, sum_ns in zip(who.tolist(), np.bincount(places, ns, len(who)).tolist(), strict=True):
            self._ran[number] = self._ran.get(number, 0) + int(sum_ns)
        kernel, ns = self._during(block.kernel)
        self._threads += np.bincount(kernel["state"], ns, len(KERNEL_STATES))
        own = kernel["tid"] == self._tid
        self._thread += np.bincount(kernel["state"][own], ns[own], len(KERNEL_STATES))

    def _during(self, spans: Array) -> tuple[Array, Array]:
        spans = spans[(spans["slot"] == self.slot) & (spans["begin_ns"] < self._end) & (spans["end_ns"] > self._begin)]
        return spans, np.minimum(spans["end_ns"], self._end) - np.maximum(spans["begin_ns"], self._begin)

    def wait(self) -> Wait:
        ran = sorted(((n, ns) for n, ns in self._ran.items() if ns), key=lambda one: -one[1])
        return Wait(
            int(self._span["number"]),
            self._begin,
            self._end,
            int(self._span["cause"]),
            self._tid,
            ran,
            self._threads.astype(np.int64).tolist(),
            self._thread.astype(np.int64).tolist(),
            self._others,
        )


def spread(begin_ns: Array, end_ns: Array, group: Array, groups: int, slice_ns: int) -> Array:
    """How much of each slice of time the spans cover, by group: (SLICES, groups) of nanoseconds. Times count from the
    start of the first slice; what is outside of all slices is left out."""
    begin, end = (np.clip(times, 0, SLICES * slice_ns) for times in (begin_ns, end_ns))
    first, last = np.minimum(begin // slice_ns, SLICES - 1), np.minimum(end // slice_ns, SLICES - 1)
    group = group.astype(np.int64)
    one = first == last
    size = SLICES * groups
    result = np.bincount((first * groups + group)[one], (end - begin)[one], size).astype(np.float64)
    several = ~one
    first, last, begin, end, group = (values[several] for values in (first, last, begin, end, group))
    result += np.bincount(first * groups + group, (first + 1) * slice_ns - begin, size)
    result += np.bincount(last * groups + group, end - last * slice_ns, size)
    # Those in between are covered as a whole.
    more = np.bincount((first + 1) * groups + group, minlength=size)
    more -= np.bincount(last * groups + group, minlength=size)
    covered: Array = result.reshape(SLICES, groups) + np.cumsum(more.reshape(SLICES, groups), axis=0) * float(slice_ns)
    return covered
