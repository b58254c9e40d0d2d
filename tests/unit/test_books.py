"""What watching costs that goes on between windows, and when it is too dear. Processes and maps are made up."""

from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any, cast

import pytest

from schedtrace.books import Books, Watched
from schedtrace.calibrate import Costs
from schedtrace.governor import Governor, Policy
from schedtrace.histogram import Histogram
from schedtrace.join import ThreadCounts
from schedtrace.target import SWITCH_PARTS

HIT_NS = 1_000
PID = 7
FRACTION = 0.01
SECOND = 1_000_000_000


@dataclass
class _Threads:
    """Of a session."""

    switches: int = 0
    looked: list[bool] = field(default_factory=list)

    def snapshots(self) -> dict[int, Any]:
        return {PID: SimpleNamespace(switches=self.switches)}

    def look_for_goroutines(self, pid: int, *, wanted: bool) -> None:
        assert pid == PID
        self.looked.append(wanted)


@dataclass
class _Process:
    pid: int = PID
    name: str = "app"
    used_ns: int = 0

    def cpu_ns(self) -> int:
        return self.used_ns


class _Node:
    """One process, whose threads switch so often for so much CPU time."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        counts = ThreadCounts(run_queue=Histogram(), off_cpu=None, functions=(), lost={})
        monkeypatch.setattr("schedtrace.totals.join.thread_counts", lambda *_: counts)
        self.threads, self.process = _Threads(), _Process()
        self.governor = Governor(Policy(FRACTION))
        self.governor.add(PID, 0, 0)
        session = cast(Any, SimpleNamespace(threads=self.threads, snapshots=lambda _pids: {}))
        calibration = cast(Any, SimpleNamespace(costs=lambda _kinds: Costs({True: HIT_NS, False: 12 * HIT_NS})))
        none = cast(Any, None)
        self.books = Books(session, none, none, calibration, self.governor)
        probed = cast(Any, SimpleNamespace(plan=SimpleNamespace(mode="casgstatus"), level="full"))
        self.watched = Watched(cast(Any, self.process), probed, b"", none, None)
        self.books.charge_switches([self.watched])

    def go_on(self, switches: int, cpu_ns: int) -> None:
        self.threads.switches += switches
        self.process.used_ns += cpu_ns
        self.books.charge_switches([self.watched])

    def lost(self) -> int:
        (process,) = self.books.processes([self.watched])
        return process.totals.lost.get("goroutine_of_thread_too_dear", 0)


def test_what_is_too_dear_is_left_out_and_said(monkeypatch: pytest.MonkeyPatch) -> None:
    node = _Node(monkeypatch)
    most = int(0.4 * FRACTION * SECOND / (SWITCH_PARTS[True] * HIT_NS))
    node.go_on(most, SECOND)
    assert (node.threads.looked, node.lost()) == ([], 0)
    node.go_on(most + 1, SECOND)
    assert (node.threads.looked, node.lost()) == ([False], 0)
    spent_ns = (2 * most + 1) * SWITCH_PARTS[True] * HIT_NS
    assert node.watched.switches_ns == pytest.approx(spent_ns)
    node.go_on(1_000, SECOND // 10)  # it would still be too dear
    assert (node.threads.looked, node.lost()) == ([False], 1_000)
    spent_ns += 1_000 * SWITCH_PARTS[False] * HIT_NS
    node.go_on(10, SECOND)
    assert (node.threads.looked, node.lost()) == ([False, True], 1_010)
    spent_ns += 10 * SWITCH_PARTS[False] * HIT_NS
    node.go_on(100, SECOND)
    assert (node.threads.looked, node.lost()) == ([False, True], 1_010)
    spent_ns += 100 * SWITCH_PARTS[True] * HIT_NS
    assert node.watched.switches_ns == pytest.approx(spent_ns)
    assert node.governor.tokens_ns(PID) == pytest.approx(-spent_ns)


def test_a_process_that_uses_nothing_decides_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    node = _Node(monkeypatch)
    node.go_on(10**6, 0)
    assert node.threads.looked == []
