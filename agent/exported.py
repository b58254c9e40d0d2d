"""What all exported formats share: names of goroutines and states, and remarks on what is missing. Pure."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import numpy as np

from schedtrace.abi import REASON_COUNT, WakeCause
from schedtrace.abi import GoroutineState as State
from schedtrace.events import Array
from schedtrace.formatting import printable, short_function
from schedtrace.join import NO_STOP_REASON, UNKNOWN_FUNCTION
from schedtrace.recording import Recording
from schedtrace.timeline import STATE_COUNT, STATE_NAMES, Timeline
from schedtrace.window import CAUSES

LONGEST_NAME = 200
STOP_TRACK, LIMIT_TRACK = "stop the world", "CPU limit"
THROTTLED_NAME, SOME_TIME_NAME = "throttled", "throttled, some time before"
"""Of spans on that track, and of marks on it where it is not known when that was."""
Write = Callable[[bytes], object]
"""Takes the next piece of what is exported."""
_MANY = 1000
_NS = 1e9


def shown(name: str) -> str:
    """A name from a stranger's binary, printable and not too long."""
    name = printable(name)
    return name if len(name) <= LONGEST_NAME else name[: LONGEST_NAME - 1] + "…"


class Names:
    """Names of the goroutines of a recording and of what they do."""

    def __init__(self, recording: Recording, timeline: Timeline) -> None:
        self._recording, self._lives = recording, timeline.lives
        self._symbols = {key: shown(name) for key, name in recording.symbols.items()}

    def functions(self, numbers: Sequence[int]) -> list[str]:
        """The start functions of these goroutines."""
        lives = self._lives[list(numbers)]
        keys = zip(lives["slot"].tolist(), lives["start_pc"].tolist(), strict=True)
        return [self._symbols.get(key, UNKNOWN_FUNCTION) for key in keys]

    def goroutines(self, numbers: Sequence[int]) -> list[str]:
        """These goroutines: "G18 worker.(*Pool).run", without the path of the package; "G? main.main" where the id is
        not known."""
        ids = self._lives["goid"][list(numbers)].tolist()
        functions = map(short_function, self.functions(numbers))
        return [f"G{goid or '?'} {name}" for goid, name in zip(ids, functions, strict=True)]

    def process(self, slot: int) -> str:
        """The target's name: "server"."""
        return shown(self._recording.targets[slot].target.name)

    def state(self, slot: int, state: int, cause: int, reason: int) -> str:
        """ "running", "runnable (network)", "waiting (chan receive)"."""
        name = STATE_NAMES.get(state, f"state {state}")
        if state == State.RUNNABLE:
            why = CAUSES[cause]
        elif state == State.WAITING:
            why = self.reason(slot, reason)
        else:
            why = ""
        return f"{name} ({why})" if why else name

    def reason(self, slot: int, reason: int) -> str:
        """A wait reason in the runtime's words; nothing where it is not known."""
        reasons = self._recording.targets[slot].reasons
        return shown(reasons[reason]) if reason < len(reasons) else ""


class StateNames:
    """What goroutines do, each in words once: ``names``."""

    def __init__(self, recording: Recording, names: Names) -> None:
        found: dict[str, int] = {}
        self._row = np.zeros(1 << 16, np.int64)  # by slot
        rows: list[list[int]] = []
        for slot in recording.targets:
            states = [(state, 0, 0) for state in range(STATE_COUNT)]
            causes = [(int(State.RUNNABLE), cause, 0) for cause in range(WakeCause.COUNT)]
            reasons = [(int(State.WAITING), 0, reason) for reason in range(REASON_COUNT)]
            texts = [names.state(slot, *code) for code in states + causes + reasons]
            self._row[slot & 0xFFFF] = len(rows)
            rows.append([found.setdefault(text, len(found)) for text in texts])
        self._table = np.array(rows or [[0]], np.int64)
        self.names = list(found)

    def of(self, spans: Array) -> Array:
        """Place in ``names`` for each of an array of :data:`schedtrace.timeline.SPAN`."""
        code = spans["state"].astype(np.int64)
        runnable, waiting = code == State.RUNNABLE, code == State.WAITING
        code[runnable] = STATE_COUNT + spans["cause"][runnable]
        code[waiting] = STATE_COUNT + int(WakeCause.COUNT) + spans["reason"][waiting]
        places: Array = self._table[self._row[spans["slot"]], code]
        return places


class StopNames:
    """Why the world was stopped, each in words once: ``names``."""

    def __init__(self, recording: Recording) -> None:
        found = {NO_STOP_REASON: 0}
        self._table = np.zeros((1 << 8, 1 << 8), np.int64)  # by place of the target and reason
        self._slots = np.array(sorted(recording.targets), np.int64)
        for place, slot in enumerate(self._slots.tolist()):
            reasons = recording.targets[slot].stop_reasons[1 : 1 << 8]  # the first says that it is not known
            self._table[place, 1 : len(reasons) + 1] = [found.setdefault(shown(r), len(found)) for r in reasons]
        self.names = list(found)

    def name(self, slot: int, reason: int) -> str:
        """One of them."""
        return self.names[int(self._table[np.searchsorted(self._slots, slot), reason])]

    def of(self, stops: Array) -> Array:
        """Place in ``names`` for each of an array of :data:`schedtrace.events.STOP`."""
        places: Array = self._table[np.searchsorted(self._slots, stops["slot"].astype(np.int64)), stops["reason"]]
        return places


def stopping_ns(stops: Array) -> Array:
    """Of an array of :data:`schedtrace.events.STOP`: how long it took until all had stopped, 0 if it isn't known."""
    since, stopped = stops["since_ns"].astype(np.int64), stops["stopped_ns"].astype(np.int64)
    lengths_ns: Array = np.maximum(stopped - since, 0)
    return lengths_ns


def batches(count: int) -> Iterator[range]:
    """The numbers below ``count``, some at a time."""
    return (range(start, min(start + _MANY, count)) for start in range(0, count, _MANY))


def remarks(recording: Recording, timeline: Timeline) -> list[str]:
    """What is missing, or not in any recording, in words."""
    return [shown(remark) for remark in _remarks(recording, timeline)]


def losses(recording: Recording, timeline: Timeline) -> Iterator[str]:
    """What this recording should hold and doesn't."""
    if recording.cut:
        yield f"the end of the recording: {recording.cut}"
    if lost := max(sum(one.count for one in recording.lost), recording.footer.lost if recording.footer else 0):
        yield f"{lost:,} events lost, since they were not read fast enough"
    if recording.gaps:
        seconds = sum(gap.until_ns - gap.since_ns for gap in recording.gaps) / _NS
        count = sum(gap.count for gap in recording.gaps)
        yield f"{count:,} events of {seconds:.3f} s were not kept: {recording.gaps[0].why}"
    if timeline.clipped:
        yield f"{timeline.clipped:,} spans overlapped others and were cut"


def _remarks(recording: Recording, timeline: Timeline) -> Iterator[str]:
    yield from losses(recording, timeline)
    for slot, recorded in recording.targets.items():
        who = f"{recorded.target.name} {recorded.target.pid}"
        for unseen in recorded.unseen:
            yield f"{who}: can't be seen: {unseen}"
        end = recording.ends.get(slot)
        for reason, count in end.lost.items() if end else ():
            yield f"{who}: lost, {count:,} times: {reason.replace('_', ' ')}"
        if end and end.throttling and end.throttling.throttled_periods:
            throttled = end.throttling
            yield (
                f"{who}: the CPU limit held it back for {throttled.throttled_ns / _NS:.3f} s (summed over CPUs) in "
                f"{throttled.throttled_periods:,} of {throttled.periods:,} periods"
            )
        if not recorded.limit_watched:
            yield (
                f"{who}: when the world was stopped, and when a CPU limit held threads back: the schedtrace that made "
                f"the recording ({recording.header.schedtrace}) did not record it"
            )
    yield "not in a recording: which P a thread had"
