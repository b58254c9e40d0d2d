"""Names and arithmetic on what the maps hold; the maps are made up here, field by field."""

from typing import Any

import numpy as np

from schedtrace import abi, join
from schedtrace.abi import GoroutineState as State
from schedtrace.abi import LostReason, WakeCause
from schedtrace.histogram import Histogram
from schedtrace.session import Snapshot
from schedtrace.thread_watch import ThreadSnapshot
from schedtrace.window import LivingGoroutine, OffCpuTotals

REASONS = ("", "", "IO wait", "sleep")
IO_WAIT, SLEEP = 2, 3
MS = 1_000_000
NAMES = {0x1000: "main.worker", 0x2000: "net/http.(*conn).serve"}


def _stats() -> Any:
    return np.zeros(1, np.dtype(abi.TargetStats))[0]


def _goroutine(state: int, since_ns: int, start_pc: int, reason: int = 0, **totals: int) -> abi.Goroutine:
    return abi.Goroutine(
        since_ns=since_ns, start_pc=start_pc, state=state, reason=reason, totals=abi.Totals(**totals)
    )


def _array(*goroutines: abi.Goroutine) -> Any:
    array = np.zeros(len(goroutines), np.dtype(abi.Goroutine))
    for i, goroutine in enumerate(goroutines):
        array[i] = np.frombuffer(bytes(goroutine), array.dtype)[0]
    return array


def _totals(**fields: int) -> Any:
    return np.frombuffer(bytes(abi.Totals(**fields)), np.dtype(abi.Totals))[0]


def test_every_count_gets_its_name() -> None:
    stats = _stats()
    stats["transitions"][State.RUNNABLE * State.COUNT + State.RUNNING] = 7
    stats["transitions"][State.PREEMPTED * State.COUNT + State.RUNNABLE] = 1
    stats["sched_latency"][WakeCause.TIMER]["slots"][3] = 2
    stats["sched_latency"][WakeCause.TIMER]["sum_ns"] = 13_000
    stats["sched_latency"][WakeCause.TIMER]["max_ns"] = 7_500
    stats["wait"][SLEEP]["slots"][10] = 1
    stats["wait"][abi.REASON_UNKNOWN]["slots"][0] = 1
    stats["hits"][2] = 21
    stats["lost"][LostReason.INCONSISTENT] = 3
    stats["cgroup_id"] = 82
    counts = join.counts(Snapshot(5 * MS, stats, {}, _array(), 4), REASONS, NAMES.get)
    assert counts.transitions == {("runnable", "running"): 7, ("preempted", "runnable"): 1}
    assert counts.sched_latency == {
        "timer/sleep": Histogram((0, 0, 0, 2) + (0,) * 21, sum_ns=13_000, max_ns=7_500)
    }
    assert set(counts.wait) == {"sleep", "unknown"}
    assert counts.hits[:4] == (0, 0, 21, 0)
    assert (counts.lost, counts.foreign_hits, counts.cgroup_id) == ({"inconsistent_state": 3}, 4, 82)


def test_time_in_a_state_is_what_ended_and_what_goes_on() -> None:
    stats = _stats()
    stats["sched_latency"][WakeCause.NEW]["sum_ns"] = 1 * MS
    stats["partial_ns"][State.RUNNABLE] = 2 * MS
    stats["partial_ns"][State.RUNNING] = 5 * MS
    stats["wait"][SLEEP]["sum_ns"] = 3 * MS
    stats["wait"][SLEEP]["slots"][9] = 2
    stats["partial_wait_ns"][SLEEP] = 1 * MS
    stats["partial_waits"][SLEEP] = 1
    stats["transitions"][State.RUNNABLE * State.COUNT + State.RUNNING] = 4
    living = _array(
        _goroutine(State.RUNNABLE, 90 * MS, 0x1000),
        _goroutine(State.RUNNING, 96 * MS, 0x1000),
        _goroutine(State.WAITING, 50 * MS, 0x1000, SLEEP),
        _goroutine(State.WAITING, 0, 0x1000, IO_WAIT),
        _goroutine(255, 10 * MS, 0x1000),  # a recording with gaps doesn't know what that one is doing
    )
    times = {
        (s.state, s.reason): (s.time_ns, s.count) for s in join.state_times(stats, living, 100 * MS, REASONS)
    }
    assert times == {
        ("waiting", "IO wait"): (100 * MS, 1),
        ("waiting", "sleep"): (54 * MS, 4),
        ("runnable", ""): (13 * MS, 0),
        ("running", ""): (9 * MS, 4),
    }


def test_functions_add_up_the_dead_and_the_living() -> None:
    ended = {0x1000: _totals(goroutines=3, exits=3, parks=10, waiting_ns=8 * MS, max_waiting_ns=4 * MS)}
    living = _array(
        _goroutine(State.WAITING, 90 * MS, 0x1000, SLEEP, goroutines=1, parks=2, max_waiting_ns=1 * MS),
        _goroutine(State.RUNNABLE, 99 * MS, 0x1000, runnable_ns=2 * MS),
        _goroutine(State.SYSCALL, 70 * MS, 0x2000),
        _goroutine(State.WAITING, 0, 0x3000),
    )
    functions = {f.function: f for f in join.function_totals(ended, living, 100 * MS, NAMES.get)}
    worker = functions["main.worker"]
    assert (worker.goroutines, worker.created, worker.exits, worker.parks) == (5, 4, 3, 12)
    assert (worker.waiting_ns, worker.runnable_ns) == (18 * MS, 3 * MS)
    assert worker.max_waiting_ns == 4 * MS
    assert functions["net/http.(*conn).serve"].syscall_ns == 30 * MS
    assert functions["(unknown)"].waiting_ns == 100 * MS
    assert next(iter(functions)) == "(unknown)"  # the most waiting comes first


def test_nothing_at_all() -> None:
    counts = join.counts(Snapshot(0, _stats(), {}, _array(), 0), (), NAMES.get)
    assert (counts.transitions, counts.states, counts.functions, counts.goroutines) == ({}, (), (), 0)


def _keys(*addresses: int) -> Any:
    keys = np.zeros(len(addresses), np.dtype(abi.GoroutineKey))
    keys["g"] = addresses
    return keys


def test_those_stand_out_that_come_first_by_any_order() -> None:
    idle = [_goroutine(State.WAITING, 99 * MS, 0x1000, SLEEP) for _ in range(50)]
    long_wait = _goroutine(State.RUNNING, 99 * MS, 0x1000, max_runnable_ns=40 * MS)
    many_waits = _goroutine(State.RUNNING, 99 * MS, 0x1000, runnable_ns=70 * MS)
    waits_now = _goroutine(State.RUNNABLE, 10 * MS, 0x1000)
    stuck = _goroutine(State.WAITING, 1 * MS, 0x1000, IO_WAIT)
    living = _array(*idle[:20], long_wait, *idle[20:30], many_waits, stuck, *idle[30:], waits_now)
    assert join.standing_out(living, 100 * MS, 1).tolist() == [32, 53]
    assert {20, 31, 32, 53} <= set(join.standing_out(living, 100 * MS, 2).tolist())
    assert join.standing_out(_array(), 100 * MS).tolist() == []
    assert join.standing_out(_array(stuck, *idle[:2]), 100 * MS, 3).tolist() == [0, 1, 2]


def test_what_goes_on_is_told_only_if_both_looks_found_the_same() -> None:
    before = _array(
        _goroutine(State.RUNNABLE, 40 * MS, 0x1000, runs=3, runnable_ns=5 * MS, max_runnable_ns=4 * MS),
        _goroutine(State.WAITING, 90 * MS, 0x2000, IO_WAIT, runnable_ns=5 * MS, max_runnable_ns=4 * MS),
        _goroutine(State.RUNNABLE, 1 * MS, 0x1000),  # half of a move: since when is that of the state before
        _goroutine(State.RUNNING, 80 * MS, 0),
        _goroutine(State.RUNNING, 80 * MS, 0x1000),
        _goroutine(0xFF, 0, 0x1000),
    )
    again = [
        *before[:2],
        _array(_goroutine(State.RUNNABLE, 99 * MS, 0x1000, runs=1, runnable_ns=2 * MS, max_runnable_ns=2 * MS))[0],
        before[3],
        None,
        before[5],
    ]
    snapshot = Snapshot(100 * MS, _stats(), {}, before, 0, _keys(16, 32, 48, 64, 80, 96))
    told = join.living_goroutines(snapshot, range(6), again, REASONS, NAMES.get)
    assert told == (
        LivingGoroutine(16, "main.worker", "runnable", "", 60 * MS, 3, 65 * MS, 60 * MS),
        LivingGoroutine(32, "net/http.(*conn).serve", "waiting", "IO wait", 10 * MS, 0, 5 * MS, 4 * MS),
        LivingGoroutine(48, "main.worker", "", "", None, 1, 2 * MS, 2 * MS),
        LivingGoroutine(64, "(unknown)", "running", "", 20 * MS, 0, 0, 0),
    )


def _off_cpu(times: int, run_queue_ns: int, blocked_ns: int, max_ns: int) -> Any:
    return np.frombuffer(
        bytes(abi.OffCpuTotals(times, run_queue_ns, blocked_ns, max_ns)), np.dtype(abi.OffCpuTotals)
    )[0]


def test_what_threads_did() -> None:
    stats = np.zeros(1, np.dtype(abi.ThreadStats))[0]
    stats["run_queue"]["slots"][2] = 5
    stats["off_cpu"][abi.OffCpu.WOKEN]["slots"][1] = 3
    stats["off_cpu"][abi.OffCpu.WOKEN]["sum_ns"] = 4_500
    stats["lost"][LostReason.THREAD_UNKNOWN] = 2
    stats["lost"][LostReason.THREADS_FULL] = 1
    functions = {
        0x1000: _off_cpu(3, 400, 50, 300),
        0x1008: _off_cpu(1, 1, 2, 3),
        0x2000: _off_cpu(9, 10_000, 0, 9_000),
        0: _off_cpu(1, 7, 0, 7),
    }
    names = {**NAMES, 0x1008: "main.worker"}
    counts = join.thread_counts(ThreadSnapshot(stats, functions, goroutines_known=True, unlisted=4), names.get)
    assert counts.run_queue.count == 5
    assert counts.off_cpu is not None
    assert {reason: (h.count, h.sum_ns) for reason, h in counts.off_cpu.items()} == {
        "preempted": (0, 0),
        "blocked": (0, 0),
        "woken": (3, 4_500),
    }
    assert counts.functions == (
        OffCpuTotals("net/http.(*conn).serve", 9, 10_000, 0, 9_000),
        OffCpuTotals("main.worker", 4, 401, 52, 300),
        OffCpuTotals(join.UNKNOWN_FUNCTION, 1, 7, 0, 7),
    )
    assert counts.lost == {"goroutine_of_thread_unknown": 2, "thread_table_full": 5}
    unknown = join.thread_counts(ThreadSnapshot(stats, {}, goroutines_known=False, unlisted=0), None)
    assert (unknown.off_cpu, unknown.functions, unknown.run_queue.count) == (None, (), 5)


def test_losses_add_up() -> None:
    assert join.lost_in_all({"a": 1, "b": 2}, {"b": 3, "c": 4}) == {"a": 1, "b": 5, "c": 4}
