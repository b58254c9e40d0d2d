"""What a recording, or a part of it, says of its targets: the windows that ``attach`` would have shown.

Reads neither the kernel nor a process, only the file.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from math import inf

import numpy as np

from schedtrace import join
from schedtrace.abi import GoroutineState
from schedtrace.errors import SchedtraceError
from schedtrace.events import Array, EventType
from schedtrace.lives import Lives
from schedtrace.recording import Recording
from schedtrace.recording_frames import RecordedTarget, TargetEnd
from schedtrace.replay import Range, Replay
from schedtrace.window import STATES, ProbeHits, Window

LOST_EVENTS = "recording_buffer_full"
"""Name of the events that the kernel had no room for."""
_NS = 1e9


@dataclass(frozen=True)
class Selection:
    """A part of a recording. Seconds count from its start."""

    since_seconds: float = 0.0
    until_seconds: float = inf
    goroutine: int | None = None
    """A goroutine's id."""
    function: str = ""
    """Pattern (* and ?) for the function that goroutines began with."""
    pid: int | None = None

    @property
    def is_of_goroutines(self) -> bool:
        """Are some goroutines meant, and not the process?"""
        return self.goroutine is not None or bool(self.function)

    @property
    def is_all(self) -> bool:
        """Is nothing left out of a target?"""
        return not self.is_of_goroutines and not self.since_seconds and self.until_seconds == inf


ALL = Selection()


def windows(recording: Recording, selection: Selection = ALL) -> list[Window]:
    """A window for each target. Raises UnreadableRecording; SchedtraceError if what is selected is not in it."""
    targets = [t for t in recording.targets.values() if selection.pid in (None, t.target.pid)]
    if not targets:
        there = ", ".join(str(t.target.pid) for t in recording.targets.values()) or "none"
        raise SchedtraceError(f"{recording.name}: no process {selection.pid} in it; there is {there}")
    last_ns = _last_ns(recording)
    spans = {t.slot: span for t in targets if (span := _range(recording, t, selection, last_ns))}
    if not spans:
        pids = " or ".join(str(t.target.pid) for t in targets)
        said = f"the recording is {(last_ns - recording.header.started_ns) / _NS:.3f} s long"
        raise SchedtraceError(f"{recording.name}: nothing of process {pids} in that time; {said}")
    found = [
        window
        for t in targets
        if t.slot in spans and (window := _window(recording, t, selection, spans[t.slot]))
    ]
    if not found:
        raise SchedtraceError(f"{recording.name}: no such goroutine in it")
    return found


def _last_ns(recording: Recording) -> int:
    """When it ended or, where it was cut, the last that is known of."""
    if recording.footer:
        return recording.footer.time_ns
    last = [int(events["time_ns"].max()) for events in recording.events()]
    return max([*last, *(end.time_ns for end in recording.ends.values()), recording.header.started_ns])


def _covered(recording: Recording) -> Range:
    """From the first to the last thing that happened, of those that are in the file."""
    first_ns, last_ns = [], []
    for events in recording.events():
        happened = ~np.isin(events["type"], (EventType.GOROUTINE, EventType.CGROUP))
        if happened.any():
            first_ns.append(int(events["time_ns"][happened].min()))
            last_ns.append(int(events["time_ns"][happened].max()))
    if not first_ns:
        raise SchedtraceError(f"{recording.name}: no events in it; {recording.header.when or 'nothing'} did not happen")
    return Range(min(first_ns), max(last_ns) + 1)


def _window(recording: Recording, recorded: RecordedTarget, selection: Selection, span: Range) -> Window | None:
    end = recording.ends.get(recorded.slot)
    selected = None
    if selection.is_of_goroutines:
        selected = _selected(recording, recorded.slot, selection)
        if not selected.any():
            return None
    from_start = not selection.since_seconds and not recording.gaps
    replay = Replay(recorded.slot, span, selected, recording.header.started_ns if from_start else 0)
    for events in recording.events():
        replay.add(events)
    whole = end if selection.is_all and not recording.gaps else None
    snapshot = replay.snapshot()
    if whole:
        hits = snapshot.stats["hits"]
        hits[: len(whole.hits)] = whole.hits[: len(hits)]
        snapshot = replace(snapshot, foreign_hits=whole.foreign_hits)
    name_of = _namer(recording, recorded.slot)
    counts = join.counts(snapshot, recorded.reasons, name_of)
    thread_snapshot = replay.thread_snapshot(goroutines_known=recorded.goroutines_of_threads)
    threads = None if selection.is_of_goroutines else join.thread_counts(thread_snapshot, name_of)
    cut = replay.cut_stats()
    lost = whole.lost if whole else join.lost_in_all(counts.lost, threads.lost if threads else {})
    return Window(
        target=replace(recorded.target, cgroup_id=end.cgroup_id) if end else recorded.target,
        duration_ns=span.until_ns - span.since_ns,
        transitions=counts.transitions,
        sched_latency=counts.sched_latency,
        wait=counts.wait,
        states=join.state_times(cut, snapshot.goroutines, snapshot.time_ns, recorded.reasons),
        functions=counts.functions,
        run_queue=threads.run_queue if threads else None,
        off_cpu=threads.off_cpu if threads else None,
        off_cpu_functions=threads.functions if threads else (),
        threads=whole.threads if whole else replay.threads,
        goroutines=counts.goroutines,
        probes=tuple(
            ProbeHits(probe.function, probe.site, probe.emulated, n)
            for probe, n in zip(recorded.probes, counts.hits, strict=False)
        )
        if whole
        else (),
        foreign_hits=counts.foreign_hits,
        unseen=(*recorded.unseen, *_remarks(recording, recorded, selection), *_differences(whole, counts)),
        lost={reason: n for reason, n in {**lost, LOST_EVENTS: _lost_events(recording, span)}.items() if n},
        throttling=whole.throttling if whole else None,
        overhead_ns=whole.overhead_ns if whole else None,
        ended=end.ended if whole and end else "",
        wait_parts=counts.wait_parts if recorded.waits_divided else None,
        stops=join.stops(replay.stops, recorded.stop_reasons)
        if recorded.stops_seen and not selection.is_of_goroutines
        else None,
    )


def _range(recording: Recording, recorded: RecordedTarget, selection: Selection, last_ns: int) -> Range | None:
    """None if it has nothing of that time."""
    start_ns, end = recording.header.started_ns, recording.ends.get(recorded.slot)
    since_ns, until_ns = recorded.started_ns, max(end.time_ns if end else last_ns, recorded.started_ns)
    if recording.gaps:
        covered = _covered(recording)
        since_ns, until_ns = max(since_ns, covered.since_ns), min(until_ns, covered.until_ns)
    if selection.since_seconds:
        since_ns = max(start_ns + round(selection.since_seconds * _NS), since_ns)
    if selection.until_seconds != inf:
        until_ns = min(start_ns + round(selection.until_seconds * _NS), until_ns)
    return Range(since_ns, until_ns) if since_ns < until_ns else None


def _selected(recording: Recording, slot: int, selection: Selection) -> Array:
    """Which goroutines are meant, by number, and False at the end. An id can become known after the first events."""
    lives = Lives()
    for events in recording.events():
        lives.follow(events[events["slot"] == slot])
    table = lives.table
    selected = np.ones(len(table) + 1, bool)
    selected[-1] = False
    if selection.goroutine is not None:
        selected[:-1] &= table["goid"] == selection.goroutine
    if selection.function:
        name_of = _namer(recording, slot)
        pcs, of = np.unique(table["start_pc"], return_inverse=True)
        matches = [fnmatchcase(name_of(pc) or join.UNKNOWN_FUNCTION, selection.function) for pc in pcs.tolist()]
        selected[:-1] &= np.array(matches, bool)[of]
    return selected


def _namer(recording: Recording, slot: int) -> Callable[[int], str | None]:
    return lambda start_pc: recording.symbols.get((slot, start_pc))


def _lost_events(recording: Recording, span: Range) -> int:
    """How many events there were of that time that the kernel could not send."""
    return sum(one.count for one in recording.lost if one.until_ns > span.since_ns and one.since_ns < span.until_ns)


def _remarks(recording: Recording, recorded: RecordedTarget, selection: Selection) -> Iterator[str]:
    if recording.cut:
        yield f"the end of the recording: {recording.cut}"
    if recording.gaps:
        seconds = sum(gap.until_ns - gap.since_ns for gap in recording.gaps) / _NS
        count = sum(gap.count for gap in recording.gaps)
        yield f"{count:,} events of {seconds:.3f} s that were not kept: {recording.gaps[0].why}"
    if selection.is_of_goroutines:
        yield "threads, and goroutines that run while these are off the CPU: not told of single goroutines"
    if not selection.is_all or recording.gaps:
        yield "hits, cost, throttling, and intervals lost in full tables: counted for a whole recording only"
    if not recorded.waits_divided:
        yield (
            "what waits to run were for, and goroutines that run while their thread is off the CPU: the "
            f"schedtrace that made the recording ({recording.header.schedtrace}) did not record it"
        )


def _differences(whole: TargetEnd | None, counts: join.Counts) -> Iterator[str]:
    """The kernel has counted as well: is it the same?"""
    if whole is None:
        return
    size = int(GoroutineState.COUNT)
    counted = {
        (STATES.get(i // size, str(i // size)), STATES.get(i % size, str(i % size))): n
        for i, n in whole.kernel.transitions.items()
    }
    missing = sum(n - counts.transitions.get(kind, 0) for kind, n in counted.items())
    if missing or counted != dict(counts.transitions):
        of = sum(counted.values())
        yield f"{missing:,} of {of:,} transitions that the kernel counted: the file does not have them"
