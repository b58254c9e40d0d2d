"""Counts from events: against numbers worked out by hand, and against a plain model of what BPF does with each move."""

import random
from typing import Any

import numpy as np
import pytest

from schedtrace import abi
from schedtrace.abi import GoroutineState as State
from schedtrace.abi import LostReason, WakeCause
from schedtrace.events import EVENT, EventType, Flag
from schedtrace.join import histogram
from schedtrace.replay import Range, Replay
from tests.unit.recordings import (
    DEAD,
    OTHER_G,
    RUNNABLE,
    RUNNING,
    START_PC,
    STARTED_NS,
    WAITING,
    G,
    goroutine,
    off_cpu,
    some_events,
    switch,
    transition,
    wait,
)

END_NS = STARTED_NS + 100_000
WHOLE = Range(STARTED_NS, END_NS)
PREEMPTED, SYSCALL, IDLE = 9, 3, 0


def _replayed(*events: Any, span: Range = WHOLE, selected: Any = None) -> Any:
    replay = Replay(1, span, selected)
    for piece in events:
        replay.add(piece)
    return replay.snapshot()


def _replayed_threads(*events: Any, since_ns: int = 0, threads_since_ns: int = 0) -> Any:
    replay = Replay(1, Range(STARTED_NS + since_ns, END_NS), None, threads_since_ns)
    for piece in events:
        replay.add(piece)
    return replay.thread_snapshot(goroutines_known=True)


def _transitions(stats: Any) -> dict[tuple[int, int], int]:
    return {divmod(i, int(State.COUNT)): int(n) for i, n in enumerate(stats["transitions"]) if n}


def _lost(stats: Any) -> dict[LostReason, int]:
    return {LostReason(i): int(n) for i, n in enumerate(stats["lost"]) if n}


def test_every_interval_lands_where_it_belongs() -> None:
    snapshot = _replayed(some_events())
    stats = snapshot.stats
    assert _transitions(stats) == {(6, 1): 1, (1, 2): 1, (2, 4): 1, (4, 1): 1}
    new = histogram(stats["sched_latency"][WakeCause.NEW])
    assert (new.count, new.sum_ns, new.max_ns, new.slots[2]) == (1, 3_000, 3_000, 1)
    assert int(stats["sched_latency"]["slots"].sum()) == 1
    assert int(stats["partial_ns"][State.RUNNING]) == 4_000
    # the wait that began before the start
    assert (int(stats["partial_wait_ns"][2]), int(stats["partial_waits"][2])) == (9_500, 1)
    assert int(stats["wait"]["slots"].sum()) == 0
    run_queue = histogram(_replayed_threads(some_events()).stats["run_queue"])
    assert (run_queue.count, run_queue.sum_ns, run_queue.slots[0]) == (1, 600, 1)
    assert _lost(stats) == {LostReason.BEGAN_BEFORE: 1}


def test_goroutines_that_live_are_told_with_what_they_do() -> None:
    living = _replayed(some_events()).goroutines
    own, other = living[0], living[1]
    assert (int(own["state"]), int(own["since_ns"]) - STARTED_NS, int(own["reason"])) == (WAITING, 9_000, 1)
    assert (int(other["state"]), int(other["since_ns"]) - STARTED_NS, int(other["cause"])) == (RUNNABLE, 9_500, 7)
    assert living["start_pc"].tolist() == [START_PC, START_PC]
    totals = own["totals"]
    assert {name: int(totals[name]) for name in abi.TOTALS if totals[name]} == {
        "goroutines": 1, "runs": 1, "parks": 1, "runnable_ns": 3_000, "running_ns": 4_000, "max_runnable_ns": 3_000
    }  # fmt: skip
    assert {name: int(other["totals"][name]) for name in abi.TOTALS if other["totals"][name]} == {
        "readies": 1, "waiting_ns": 9_500
    }  # fmt: skip


def test_one_that_has_ended_counts_for_its_function() -> None:
    snapshot = _replayed(np.concatenate([some_events()[:5], transition(9_000, RUNNING, DEAD, since_ns=5_000)]))
    assert len(snapshot.goroutines) == 0
    assert list(snapshot.functions) == [START_PC]
    assert (int(snapshot.functions[START_PC]["exits"]), int(snapshot.functions[START_PC]["runs"])) == (1, 1)


def test_a_transition_taken_back_was_none() -> None:
    events = [
        transition(10, RUNNABLE, RUNNING, since_ns=0),
        transition(20, RUNNING, WAITING, since_ns=10, reason=1),
        transition(30, WAITING, WAITING, since_ns=20, reason=1, old=RUNNING, flags=Flag.TAKEN_BACK),
    ]
    snapshot = _replayed(np.concatenate(events))
    assert _transitions(snapshot.stats) == {(1, 2): 1}
    (goroutine_,) = snapshot.goroutines
    assert (int(goroutine_["state"]), int(goroutine_["since_ns"]) - STARTED_NS) == (RUNNING, 20)
    assert int(goroutine_["totals"]["parks"]) == 0


def test_what_changes_nothing_is_counted_only() -> None:
    snapshot = _replayed(transition(10, IDLE, DEAD, flags=Flag.NO_INTERVAL))
    assert _transitions(snapshot.stats) == {(0, 6): 1}
    assert len(snapshot.goroutines) == 0


def test_threads_whose_waits_are_not_known() -> None:
    events = [
        switch(10, EventType.THREAD_ON, None, flags=Flag.BEGAN_BEFORE),
        switch(20, EventType.THREAD_OFF, flags=Flag.UNSEEN),
        switch(30, EventType.THREAD_ON, None, flags=Flag.UNSEEN, tid=102),
    ]
    stats = _replayed_threads(np.concatenate(events)).stats
    assert int(stats["run_queue"]["slots"].sum()) == 0
    assert _lost(stats) == {LostReason.BEGAN_BEFORE: 1, LostReason.SWITCH_UNSEEN: 2}


def test_threads_are_watched_from_before_the_first_transition_counts() -> None:
    events = switch(10, EventType.THREAD_ON, 4)
    for threads_since_ns, count in ((0, 0), (STARTED_NS, 1)):
        stats = _replayed_threads(events, since_ns=20, threads_since_ns=threads_since_ns).stats
        assert int(stats["run_queue"]["slots"].sum()) == count


def test_goroutines_off_the_cpu() -> None:
    events = [
        off_cpu(10_000, 4_000, 4_000),
        off_cpu(20_000, 12_000, 17_000, flags=Flag.BLOCKED),
        off_cpu(90_000, 30_000, 30_000, start_pc=0, tid=102),
        off_cpu(90_000, 30_000, 30_000, slot=2),
    ]
    seen = _replayed_threads(np.concatenate(events))
    preempted, blocked, woken = (histogram(record) for record in seen.stats["off_cpu"])
    assert (preempted.count, preempted.sum_ns, preempted.max_ns) == (2, 66_000, 60_000)
    assert (blocked.count, blocked.sum_ns) == (1, 5_000)
    assert (woken.count, woken.sum_ns) == (1, 3_000)
    assert {pc: totals.tolist() for pc, totals in seen.functions.items()} == {
        START_PC: (2, 6_000 + 3_000, 5_000, 8_000),
        0: (1, 60_000, 0, 60_000),
    }
    later = _replayed_threads(*events, since_ns=15_000)
    assert {pc: int(totals["times"]) for pc, totals in later.functions.items()} == {START_PC: 1, 0: 1}


def _parts(*events: Any, span: Range = WHOLE, selected: Any = None) -> tuple[int, int]:
    stats = _replayed(*events, span=span, selected=selected).stats
    return int(stats["kernel_ns"]), int(stats["undivided_ns"])


def test_what_waits_to_run_were_for() -> None:
    first = transition(5_000, RUNNABLE, RUNNING, since_ns=2_000, flags=Flag.DIVIDED)
    second = transition(9_000, RUNNABLE, RUNNING, since_ns=8_000, g=OTHER_G, flags=Flag.DIVIDED)
    names = np.concatenate([goroutine(1_000), goroutine(1_000, g=OTHER_G)])
    one, other = wait(5_000, 700, 40), wait(9_000, 300, g=OTHER_G)
    assert _parts(np.concatenate([names, one, first, other, second])) == (1_000, 40)
    # in the order of the buffer, in pieces
    assert _parts(names, one, other, first, second) == (1_000, 40)
    assert _parts(names, one, first, other, second, span=Range(STARTED_NS + 6_000, END_NS)) == (300, 0)
    assert _parts(names, one, first, other, second, selected=np.array([True, False, False])) == (700, 40)
    # of one whose event is missing nothing is known, and one whose transition is missing is no part of anything
    assert _parts(names, first, other, second) == (300, 3_000)
    assert _parts(names, one, other, second) == (300, 0)
    assert _parts(names, transition(5_000, RUNNABLE, RUNNING, since_ns=2_000)) == (0, 0)


def test_other_targets_are_none_of_its_business() -> None:
    assert _transitions(_replayed(transition(10, RUNNABLE, RUNNING, slot=2)).stats) == {}


def test_a_range_has_what_ends_in_it_and_time_cut_at_its_ends() -> None:
    events = np.concatenate(
        [
            transition(1_000, RUNNING, RUNNABLE, since_ns=0, cause=WakeCause.PREEMPTED),
            transition(5_000, RUNNABLE, RUNNING, since_ns=1_000, cause=WakeCause.PREEMPTED),
            transition(8_000, RUNNING, WAITING, since_ns=5_000),
            transition(20_000, WAITING, RUNNABLE, since_ns=8_000, g=OTHER_G),
        ]
    )
    replay = Replay(1, Range(STARTED_NS + 4_000, STARTED_NS + 10_000))
    replay.add(events)
    snapshot, cut = replay.snapshot(), replay.cut_stats()
    assert _transitions(snapshot.stats) == {(1, 2): 1, (2, 4): 1}
    assert int(snapshot.stats["sched_latency"]["sum_ns"].sum()) == 4_000  # as long as it was
    assert int(cut["sched_latency"]["sum_ns"].sum()) == 1_000  # in the range
    assert int(cut["partial_ns"][State.RUNNING]) == 3_000
    (one,) = snapshot.goroutines
    assert (int(one["state"]), int(one["since_ns"]) - STARTED_NS) == (WAITING, 8_000)
    assert int(one["totals"]["runnable_ns"]) == 1_000
    assert int(one["totals"]["max_runnable_ns"]) == 4_000
    assert snapshot.time_ns == STARTED_NS + 10_000


def test_one_that_makes_no_move_in_the_range_still_does_something() -> None:
    events = np.concatenate([transition(1_000, RUNNING, WAITING, since_ns=0), transition(9_000, WAITING, RUNNABLE)])
    (one,) = _replayed(events, span=Range(STARTED_NS + 4_000, STARTED_NS + 8_000)).goroutines
    assert (int(one["state"]), int(one["since_ns"]) - STARTED_NS) == (WAITING, 4_000)


def test_only_some_goroutines() -> None:
    selected = np.array([False, True, False])  # the second one, and nobody
    snapshot = _replayed(some_events(), selected=selected)
    assert _transitions(snapshot.stats) == {(4, 1): 1}
    assert len(snapshot.goroutines) == 1


def test_nothing() -> None:
    snapshot = _replayed(np.zeros(0, EVENT))
    assert (_transitions(snapshot.stats), len(snapshot.goroutines), snapshot.functions) == ({}, 0, {})


def test_sums_are_exact_where_a_float_is_not() -> None:
    """53 bits of a float hold no more than 104 days in nanoseconds."""
    long_ns = (1 << 55) + 1
    events = [transition(0, RUNNING, WAITING, since_ns=0), transition(long_ns, WAITING, RUNNABLE, since_ns=0, reason=5)]
    stats = _replayed(np.concatenate(events), span=Range(STARTED_NS, STARTED_NS + long_ns + 1)).stats
    assert int(stats["wait"][5]["sum_ns"]) == int(stats["wait"][5]["max_ns"]) == long_ns


class Model:
    """What bpf/goroutine.h does with one move after the other: the same counters, in plain Python."""

    def __init__(self) -> None:
        self.stats = np.zeros(1, np.dtype(abi.TargetStats))[0]
        self.functions: dict[int, dict[str, int]] = {}
        self.goroutines: dict[int, dict[str, Any]] = {}
        self.events: list[Any] = []

    def move(self, now: int, g: int, new: int, cause: int, reason: int) -> None:
        one = self.goroutines.get(g)
        if one is None:
            one = self.goroutines[g] = {
                "state": DEAD, "since": now, "cause": 0, "reason": 0, "pc": 0x1000 * (1 + now % 3),
                "totals": dict.fromkeys(abi.TOTALS, 0),
            }  # fmt: skip
            self.events.append(goroutine(now, start_pc=one["pc"], g=g))
        old, since, totals = one["state"], one["since"], one["totals"]
        ns = now - since
        self.stats["transitions"][old * int(State.COUNT) + new] += 1
        if old == DEAD:
            totals["goroutines"] += new != SYSCALL
        elif old == RUNNABLE:
            totals["runnable_ns"] += ns
            if new == RUNNING:
                self._record(self.stats["sched_latency"][one["cause"]], ns)
                totals["max_runnable_ns"] = max(ns, totals["max_runnable_ns"])
            else:
                self.stats["partial_ns"][RUNNABLE] += ns
        elif old == WAITING:
            totals["waiting_ns"] += ns
            self._record(self.stats["wait"][one["reason"]], ns)
            totals["max_waiting_ns"] = max(ns, totals["max_waiting_ns"])
        else:
            self.stats["partial_ns"][old] += ns
            if old in (RUNNING, SYSCALL):
                totals["running_ns" if old == RUNNING else "syscall_ns"] += ns
        self._total(totals, old, new, cause)
        event_cause = cause if new == RUNNABLE else one["cause"]
        event_reason = reason if new == WAITING else one["reason"]
        self.events.append(transition(now, old, new, g=g, since_ns=since, cause=event_cause, reason=event_reason))
        one |= {"state": new, "since": now, "cause": event_cause, "reason": event_reason}
        if new == DEAD:
            totals["exits"] += 1
            into = self.functions.setdefault(one["pc"], dict.fromkeys(abi.TOTALS, 0))
            for name, value in totals.items():
                into[name] = max(into[name], value) if name.startswith("max_") else into[name] + value
            del self.goroutines[g]

    def _total(self, totals: dict[str, int], old: int, new: int, cause: int) -> None:
        if new == RUNNING:
            name = {RUNNABLE: "runs", WAITING: "switches", SYSCALL: "syscalls"}.get(old)
        elif new == WAITING:
            name = "parks" if old == RUNNING else None
        elif new != RUNNABLE:
            name = None
        elif old == WAITING:
            name = "readies"
        elif cause in (WakeCause.PREEMPTED, WakeCause.YIELDED):
            name = "preempted" if cause == WakeCause.PREEMPTED else "yielded"
        else:
            name = "syscalls" if old == SYSCALL else None
        if name:
            totals[name] += 1

    def _record(self, into: Any, ns: int) -> None:
        slot = next(k for k in range(abi.HISTOGRAM_SLOTS) if k == abi.HISTOGRAM_SLOTS - 1 or ns <= 1000 << k)
        into["slots"][slot] += 1
        into["sum_ns"] += ns
        into["max_ns"] = max(int(into["max_ns"]), ns)


MOVES = {
    DEAD: (RUNNABLE, WAITING, SYSCALL),
    RUNNABLE: (RUNNING, RUNNING, RUNNING, DEAD),
    RUNNING: (WAITING, WAITING, RUNNABLE, SYSCALL, PREEMPTED, DEAD),
    WAITING: (RUNNABLE, RUNNABLE, RUNNING),
    SYSCALL: (RUNNING, RUNNABLE),
    PREEMPTED: (RUNNABLE,),
}


@pytest.mark.parametrize("seed", range(30))
def test_many_events_at_once_are_what_one_after_the_other_is(seed: int) -> None:
    rng = random.Random(seed)
    model, now = Model(), 0
    addresses = [G + 448 * i for i in range(rng.choice([1, 5, 40]))]
    for _ in range(600):
        now += rng.choice([0, 1, 900, 1_000, 1_001, 65_000, 2_000_000, 9_000_000_000])
        g = rng.choice(addresses)
        state = model.goroutines[g]["state"] if g in model.goroutines else DEAD
        model.move(now, g, rng.choice(MOVES[state]), rng.randrange(11), rng.randrange(abi.REASON_COUNT))
    events = np.concatenate(model.events)
    cuts = sorted(rng.sample(range(len(events)), 5))
    snapshot = _replayed(*np.split(events, cuts), span=Range(STARTED_NS, STARTED_NS + now + 1))
    for field in snapshot.stats.dtype.names:
        assert (snapshot.stats[field] == model.stats[field]).all(), field
    ended = {pc: {name: int(totals[name]) for name in abi.TOTALS} for pc, totals in snapshot.functions.items()}
    assert ended == model.functions
    living = sorted(
        (int(one["start_pc"]), int(one["state"]), int(one["since_ns"]) - STARTED_NS, *one["totals"].tolist())
        for one in snapshot.goroutines
    )
    assert living == sorted(
        (one["pc"], one["state"], one["since"], *one["totals"].values()) for one in model.goroutines.values()
    )
