"""Many processes read at once: counts that stay what they are when one is watched anew, and those that are given up."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

import pytest

from schedtrace.histogram import Histogram
from schedtrace.passive_level import PassiveLevel
from schedtrace.procfs import Process, open_process
from schedtrace.runtime_plan import RuntimePlan
from tests.runtime_plans import make_runtime_plan
from tests.workload import Workload, binary

PLAN = make_runtime_plan(str(binary("introspect")))


class Told(list[tuple[int, str]]):
    """Who was given up, and why."""

    def __call__(self, pid: int, reason: str) -> None:
        self.append((pid, reason))


@contextmanager
def watched(level: PassiveLevel, target: Workload, plan: RuntimePlan = PLAN) -> Iterator[Process]:
    with open_process(target.pid) as process:
        level.watch(process, plan, process.load_bias())
        yield process
        level.drop(target.pid)


def latencies(level: PassiveLevel, target: Workload) -> Histogram:
    found = level.totals(target.pid)
    assert found is not None
    return found.sched_latency


def test_watched_again() -> None:
    told = Told()
    level = PassiveLevel(told)
    with Workload(binary("introspect")) as target:
        with watched(level, target):
            assert (level.state(target.pid), level.totals(target.pid)) == (None, None)
            target.run()
            level.read()
            state = level.state(target.pid)
            assert state is not None
            assert latencies(level, target) == state.sched_latency.histogram
            assert latencies(level, target).count > 500
        assert (level.state(target.pid), level.totals(target.pid)) == (None, None)
        with watched(level, target):  # as when it has been moved to another cgroup
            level.read()
            assert latencies(level, target).count < 50
        level.read()
        with watched(level, target):
            level.read()
            assert latencies(level, target).count < 50
    assert told == []


def test_given_up_and_gone() -> None:
    told = Told()
    level = PassiveLevel(told)
    wrong = replace(PLAN, gomaxprocs_vaddr=PLAN.gomaxprocs_vaddr + 8)
    with (
        Workload(binary("introspect")) as right_one,
        Workload(binary("introspect")) as wrong_one,
        Workload(binary("introspect")) as short_one,
        watched(level, right_one),
        watched(level, wrong_one, wrong),
        watched(level, short_one),
    ):
        level.read()
        assert level.state(short_one.pid)
        last = latencies(level, short_one)
        short_one.kill()
        short_one.wait()
        for _ in range(3):
            level.read()
            assert level.state(right_one.pid)
            assert level.state(wrong_one.pid) is None
            assert level.totals(wrong_one.pid) is None
            assert level.state(short_one.pid) is None
            assert latencies(level, short_one) == last  # until it is dropped
    ((pid, reason),) = told
    assert pid == wrong_one.pid
    assert "not that of a go1.27.3 runtime: GOMAXPROCS is" in reason
    level.close()


@pytest.mark.parametrize("closes_first", [False, True])
def test_process_that_its_finder_lets_go_of(closes_first: bool) -> None:
    level = PassiveLevel(Told())
    with Workload(binary("introspect")) as target:
        process = open_process(target.pid)
        level.watch(process, PLAN, process.load_bias())
        if closes_first:
            process.close()
        level.read()
        assert level.state(target.pid)
        process.close()
        level.close()
        level.read()
        assert level.state(target.pid) is None
