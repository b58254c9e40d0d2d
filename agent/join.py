"""From raw counts to a :class:`schedtrace.window.Window`: names are put to numbers, two snapshots subtracted. Pure.

Time in a state is the sum of the intervals that ended there, and of those that are still going on, each cut at the
window's ends.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from schedtrace import abi
from schedtrace.histogram import Histogram
from schedtrace.reasons import reason_name
from schedtrace.window import (
    CAUSES,
    OFF_CPU,
    STATES,
    STOPS,
    FunctionTotals,
    LivingGoroutine,
    OffCpuTotals,
    Samples,
    StateTime,
    WaitParts,
)

UNKNOWN_FUNCTION = "(unknown)"
NO_STOP_REASON = "reason not known"
LOST_NAMES: Mapping[abi.LostReason, str] = {
    abi.LostReason.GOROUTINES_FULL: "goroutine_table_full",
    abi.LostReason.FUNCTIONS_FULL: "function_table_full",
    abi.LostReason.THREADS_FULL: "thread_table_full",
    abi.LostReason.INCONSISTENT: "inconsistent_state",
    abi.LostReason.UNREADABLE: "unreadable_memory",
    abi.LostReason.LIST_TOO_LONG: "ready_list_too_long",
    abi.LostReason.BEGAN_BEFORE: "interval_began_before_window",
    abi.LostReason.SWITCH_UNSEEN: "thread_switch_unseen",
    abi.LostReason.PROBE_UNKNOWN: "unknown_probe",
    abi.LostReason.THREAD_UNKNOWN: "goroutine_of_thread_unknown",
}
_STATE = abi.GoroutineState
_STANDING_OUT = 48


@dataclass(frozen=True)
class Counts:
    """What was counted from the start of a target's window until ``time_ns``; two of them can be subtracted."""

    time_ns: int
    transitions: Mapping[tuple[str, str], int]
    sched_latency: Mapping[str, Histogram]
    wait: Mapping[str, Histogram]
    states: tuple[StateTime, ...]
    functions: tuple[FunctionTotals, ...]
    hits: tuple[int, ...]
    """By site, in the order of the target's record."""
    foreign_hits: int
    lost: Mapping[str, int]
    goroutines: int
    cgroup_id: int
    wait_parts: WaitParts


@dataclass(frozen=True)
class ThreadCounts:
    """What was counted of a process's threads. ``off_cpu`` is as in :class:`schedtrace.window.Window`."""

    run_queue: Histogram
    off_cpu: Mapping[str, Histogram] | None
    functions: tuple[OffCpuTotals, ...]
    lost: Mapping[str, int]


def histogram(record: Any) -> Histogram:
    """A histogram from its BPF record (:class:`abi.Histogram` as numpy)."""
    return Histogram(tuple(record["slots"].tolist()), int(record["sum_ns"]), int(record["max_ns"]))


def _histograms(records: Any) -> Iterator[tuple[int, Histogram]]:
    """Those of an array that hold anything, with their places in it: most don't, and numpy sees that at once."""
    return ((int(i), histogram(records[i])) for i in np.flatnonzero(records["slots"].any(axis=1)))


def stops(records: Any, reasons: Sequence[str]) -> dict[str, Histogram]:
    """Stops of the world by reason in words. ``records``: struct histogram by the reason's number; ``reasons``: their
    names."""
    found: dict[str, Histogram] = {}
    for i, one in _histograms(records):
        name = reasons[i] if 0 < i < len(reasons) else NO_STOP_REASON
        found[name] = found.get(name, Histogram()) + one
    return found


def state_times(stats: Any, goroutines: Any, time_ns: int, reasons: Sequence[str]) -> tuple[StateTime, ...]:
    """Time per state, and for waiting per reason, longest first; how often each was entered."""
    goroutines = goroutines[goroutines["state"] < _STATE.COUNT]  # a recording may not know what one is doing
    place = goroutines["state"].astype(np.intp) * abi.REASON_COUNT + goroutines["reason"]
    shape, most = (_STATE.COUNT, abi.REASON_COUNT), _STATE.COUNT * abi.REASON_COUNT
    open_ns = np.bincount(place, _open_ns(goroutines, time_ns), most).reshape(shape)
    open_state_ns, open_wait_ns = open_ns.sum(axis=1).tolist(), open_ns[_STATE.WAITING].tolist()
    open_waits = np.bincount(place, minlength=most).reshape(shape)[_STATE.WAITING].tolist()
    entered = stats["transitions"].reshape(_STATE.COUNT, _STATE.COUNT).sum(axis=0).tolist()
    partial_ns = stats["partial_ns"].tolist()
    result = []
    for number, name in STATES.items():
        if number in (_STATE.WAITING, _STATE.DEAD, _STATE.IDLE):
            continue
        ns = partial_ns[number] + int(open_state_ns[number])
        if number == _STATE.RUNNABLE:
            ns += int(stats["sched_latency"]["sum_ns"].sum())
        if ns or entered[number]:
            result.append(StateTime(name, "", ns, entered[number]))
    whole, partial_waits, partial_wait_ns = stats["wait"], stats["partial_waits"], stats["partial_wait_ns"]
    ended_ns = (whole["sum_ns"] + partial_wait_ns).tolist()
    ended = (whole["slots"].sum(axis=1) + partial_waits).tolist()
    for number in range(abi.REASON_COUNT):
        ns, n = ended_ns[number] + int(open_wait_ns[number]), ended[number] + open_waits[number]
        if ns or n:
            result.append(StateTime("waiting", reason_name(reasons, number), ns, n))
    return tuple(sorted(result, key=lambda s: -s.time_ns))


def function_totals(
    ended: Mapping[int, Any], goroutines: Any, time_ns: int, name_of: Callable[[int], str | None]
) -> tuple[FunctionTotals, ...]:
    """Totals per start function, of goroutines that ended and that live, those with the most waiting first."""
    sums: dict[str, dict[str, int]] = {}

    def add(start_pc: int, totals: Any, alive: int, open_state_ns: Mapping[str, int]) -> None:
        name = (name_of(start_pc) if start_pc else None) or UNKNOWN_FUNCTION
        into = sums.setdefault(name, dict.fromkeys((*abi.TOTALS, "alive"), 0))
        into["alive"] += alive
        for field in abi.TOTALS:
            value = int(totals[field]) + open_state_ns.get(field, 0)
            into[field] = max(into[field], value) if field.startswith("max_") else into[field] + value

    for start_pc, totals in ended.items():
        add(start_pc, totals, 0, {})
    open_ns = _open_ns(goroutines, time_ns)
    open_field = {
        _STATE.RUNNABLE: "runnable_ns",
        _STATE.RUNNING: "running_ns",
        _STATE.WAITING: "waiting_ns",
        _STATE.SYSCALL: "syscall_ns",
    }
    pcs, group = np.unique(goroutines["start_pc"], return_inverse=True)
    for i, start_pc in enumerate(pcs):
        members = group == i
        totals = {
            field: int((np.max if field.startswith("max_") else np.sum)(goroutines["totals"][field][members]))
            for field in abi.TOTALS
        }
        open_state_ns = {
            field: int(open_ns[members & (goroutines["state"] == state)].sum())
            for state, field in open_field.items()
        }
        add(int(start_pc), totals, int(members.sum()), open_state_ns)
    result = (
        FunctionTotals(
            function=name,
            goroutines=t["alive"] + t["exits"],
            created=t["goroutines"],
            **{field: t[field] for field in abi.TOTALS if field != "goroutines"},
        )
        for name, t in sums.items()
    )
    return tuple(sorted(result, key=lambda f: -f.waiting_ns))


def _open_ns(goroutines: Any, time_ns: int) -> Any:
    """For how long each has been in its state."""
    return np.maximum(np.int64(time_ns) - goroutines["since_ns"].astype(np.int64), 0)


def standing_out(goroutines: Any, time_ns: int, most: int = _STANDING_OUT) -> Any:
    """Places of those that :attr:`Window.worst` has: at most ``most`` by each of its orders."""
    open_ns = _open_ns(goroutines, time_ns)
    open_runnable_ns = np.where(goroutines["state"] == _STATE.RUNNABLE, open_ns, 0)
    totals = goroutines["totals"]
    longest = np.maximum(totals["max_runnable_ns"].astype(np.int64), open_runnable_ns)
    orders = (open_ns, longest, totals["runnable_ns"].astype(np.int64) + open_runnable_ns)
    if len(goroutines) <= most:
        return np.arange(len(goroutines))
    return np.unique(np.concatenate([np.argpartition(-order, most)[:most] for order in orders]))


def living_goroutines(
    snapshot: Any, places: Any, again: Sequence[Any], reasons: Sequence[str], name_of: Callable[[int], str | None]
) -> tuple[LivingGoroutine, ...]:
    """The goroutines at these places of a :class:`schedtrace.session.Snapshot`, of which ``again`` has what a second
    look found (None: it has ended). An interval counts as still open if both looks found the same."""
    result = []
    for place, now in zip(places, again, strict=True):
        if now is None or int(now["state"]) not in STATES:
            continue
        before, state, totals = snapshot.goroutines[place], int(now["state"]), now["totals"]
        same = all(before[field] == now[field] for field in ("since_ns", "state", "reason"))
        open_ns = max(snapshot.time_ns - int(now["since_ns"]), 0) if same else None
        open_runnable_ns = (open_ns or 0) if state == _STATE.RUNNABLE else 0
        waits = same and state == _STATE.WAITING
        result.append(
            LivingGoroutine(
                g=int(snapshot.keys[place]["g"]),
                function=name_of(int(now["start_pc"])) or UNKNOWN_FUNCTION if now["start_pc"] else UNKNOWN_FUNCTION,
                state=STATES[state] if same else "",
                reason=reason_name(reasons, int(now["reason"])) if waits else "",
                in_state_ns=open_ns,
                runs=int(totals["runs"]),
                runnable_ns=int(totals["runnable_ns"]) + open_runnable_ns,
                max_runnable_ns=max(int(totals["max_runnable_ns"]), open_runnable_ns),
            )
        )
    return tuple(result)


def samples(record: Any, stops: Collection[abi.Duration]) -> Samples:
    """Put names to a record of :class:`abi.SampleStats`; ``stops``: which stops of the world the runtime records."""
    return Samples(
        sched_latency={CAUSES[i]: h for i, h in _histograms(record["sched_latency"])},
        no_wait=int(record["no_wait"]),
        stop_the_world={
            name: histogram(record["stop_the_world"][duration])
            for duration, name in enumerate(STOPS, start=abi.Duration.RUN + 1)
            if duration in stops
        },
        parts=WaitParts(
            total_ns=int(record["sched_latency"]["sum_ns"].sum()),
            kernel_ns=int(record["kernel_ns"]),
            stopped_ns=int(record["stopped_ns"]) if abi.Duration.STOPPED_OTHER in stops else None,
            undivided_ns=int(record["undivided_ns"]),
        ),
    )


def counts(snapshot: Any, reasons: Sequence[str], name_of: Callable[[int], str | None] | None) -> Counts:
    """Put names to a :class:`schedtrace.session.Snapshot`.

    ``name_of`` gives the function that starts at a run-time address; without it there are no functions.
    """
    stats = snapshot.stats
    size = int(_STATE.COUNT)
    return Counts(
        time_ns=snapshot.time_ns,
        transitions={
            (STATES.get(i // size, str(i // size)), STATES.get(i % size, str(i % size))): int(stats["transitions"][i])
            for i in np.flatnonzero(stats["transitions"]).tolist()
        },
        sched_latency={CAUSES[i]: h for i, h in _histograms(stats["sched_latency"])},
        wait={reason_name(reasons, i): h for i, h in _histograms(stats["wait"])},
        states=state_times(stats, snapshot.goroutines, snapshot.time_ns, reasons),
        functions=function_totals(snapshot.functions, snapshot.goroutines, snapshot.time_ns, name_of)
        if name_of
        else (),
        hits=tuple(stats["hits"].tolist()),
        foreign_hits=snapshot.foreign_hits,
        lost=_lost(stats),
        goroutines=len(snapshot.goroutines),
        cgroup_id=int(stats["cgroup_id"]),
        wait_parts=WaitParts(
            total_ns=int(stats["sched_latency"]["sum_ns"].sum()),
            kernel_ns=int(stats["kernel_ns"]),
            stopped_ns=None,
            undivided_ns=int(stats["undivided_ns"]),
        ),
    )


def thread_counts(snapshot: Any, name_of: Callable[[int], str | None] | None) -> ThreadCounts:
    """Put names to a :class:`schedtrace.thread_watch.ThreadSnapshot`; ``name_of`` as for :func:`counts`."""
    stats = snapshot.stats
    lost = _lost(stats)
    if snapshot.unlisted:
        name = LOST_NAMES[abi.LostReason.THREADS_FULL]
        lost[name] = lost.get(name, 0) + snapshot.unlisted
    off_cpu = {OFF_CPU[i]: histogram(record) for i, record in enumerate(stats["off_cpu"])}
    return ThreadCounts(
        run_queue=histogram(stats["run_queue"]),
        off_cpu=off_cpu if snapshot.goroutines_known else None,
        functions=_off_cpu_functions(snapshot.functions, name_of) if name_of else (),
        lost=lost,
    )


def _off_cpu_functions(
    totals: Mapping[int, Any], name_of: Callable[[int], str | None]
) -> tuple[OffCpuTotals, ...]:
    """By name, since several start functions may have one; those that were off the CPU longest first."""
    sums: dict[str, OffCpuTotals] = {}
    for start_pc, record in totals.items():
        times, run_queue_ns, blocked_ns, max_ns = (int(record[field]) for field, _ in abi.OffCpuTotals._fields_)
        name = (name_of(start_pc) if start_pc else None) or UNKNOWN_FUNCTION
        sums[name] = sums.get(name, OffCpuTotals(name)) + OffCpuTotals(name, times, run_queue_ns, blocked_ns, max_ns)
    return tuple(sorted(sums.values(), key=lambda each: -(each.run_queue_ns + each.blocked_ns)))


def _lost(stats: Any) -> dict[str, int]:
    return {name: int(stats["lost"][reason]) for reason, name in LOST_NAMES.items() if stats["lost"][reason]}


def lost_in_all(*parts: Mapping[str, int]) -> dict[str, int]:
    """Losses by reason, added up."""
    sums: dict[str, int] = {}
    for part in parts:
        for reason, n in part.items():
            sums[reason] = sums.get(reason, 0) + n
    return sums
