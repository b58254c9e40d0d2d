"""The governor, with a made-up clock: what it lets windows cost, when, and for whom."""

import random
from collections import Counter
from collections.abc import Callable, Collection, Hashable, Mapping
from dataclasses import dataclass, field
from itertools import pairwise

import pytest

from schedtrace.governor import MS, SECOND, End, Governor, Level, Opening, Policy

OPENING_NS = 5 * MS
HIT_NS = 1_000
SAMPLED = 1 / 18
"""So many of the hits of the full level."""
FULL: tuple[Level, ...] = ("full",)
BOTH: tuple[Level, ...] = ("sampled", "full")
POLICY = Policy(0.01)


@dataclass
class _Process:
    """Uses ``cores`` and hits probes ``hits`` times a second."""

    cores: float
    hits: float
    cpu_ns: float = 0.0
    cost_ns: float = 0.0
    seen: Counter[str] = field(default_factory=Counter)
    costs: Counter[str] = field(default_factory=Counter)
    """Of hits; both by level."""

    @property
    def seen_ns(self) -> int:
        return self.seen.total()

    def hits_at(self, level: str) -> float:
        return self.hits * (SAMPLED if level == "sampled" else 1)


@dataclass
class _Node:
    """A node whose groups are considered once a second; hits end a window that has a limit, late by ``late_hits``."""

    groups: dict[str, dict[str, _Process]]
    levels: tuple[Level, ...] = FULL
    governor: Governor = field(default_factory=lambda: Governor(POLICY))
    now_ns: int = 0
    late_hits: int = 0
    open: dict[str, tuple[Opening, int]] = field(default_factory=dict)
    openings: list[tuple[int, Opening]] = field(default_factory=list)
    most_open: int = 0

    def start(self) -> None:
        for processes in self.groups.values():
            for name, process in processes.items():
                self.governor.add(name, self.now_ns, int(process.cpu_ns))

    def run(self, seconds: int, each_second: Callable[[int], None] = lambda _second: None) -> None:
        for second in range(seconds):
            each_second(second)
            self.now_ns += SECOND
            for group, processes in self.groups.items():
                for name, process in processes.items():
                    process.cpu_ns += process.cores * SECOND
                    self.governor.earn(name, self.now_ns, int(process.cpu_ns))
                if group in self.open and self.now_ns >= self.open[group][1]:
                    self._end(group)
            waiting = {group: list(processes) for group, processes in self.groups.items() if group not in self.open}
            for opening in choose(self.governor, waiting, self.now_ns, len(self.open), len(self.groups), self.levels):
                self._begin(opening)
            self.most_open = max(self.most_open, len(self.open))

    def _begin(self, opening: Opening) -> None:
        """What will happen in a window is known at once: rates don't change in it."""
        group = str(opening.group)
        seconds = opening.duration_ns / SECOND
        for name, process in self.groups[group].items():
            if hits := process.hits_at(opening.level):
                seconds = min(seconds, (opening.limits_ns[name] / HIT_NS + self.late_hits) / hits)
        self.open[group] = opening, self.now_ns + int(seconds * SECOND)
        self.openings.append((self.now_ns, opening))

    def _end(self, group: str) -> None:
        opening, end_ns = self.open.pop(group)
        seen_ns = end_ns - max(at for at, each in self.openings if each is opening)
        for name, process in self.groups[group].items():
            hits_ns = process.hits_at(opening.level) * seen_ns / SECOND * HIT_NS
            self.governor.charge(name, opening.level, seen_ns, hits_ns)
            process.cost_ns += hits_ns
            process.seen[opening.level] += seen_ns
            process.costs[opening.level] += int(hits_ns)
        complete = seen_ns >= opening.duration_ns
        names = list(self.groups[group])
        held = {name: self.governor.tokens_ns(name) for name in names}
        end: End = "complete" if complete else "budget"
        shares = self.governor.ended(group, opening.level, end, self.now_ns, OPENING_NS, names)
        assert sum(shares.values()) == pytest.approx(OPENING_NS)
        for name, process in self.groups[group].items():
            process.cost_ns += held[name] - self.governor.tokens_ns(name)


def choose(
    governor: Governor,
    waiting: Mapping[str, Collection[Hashable]],
    now_ns: int,
    open_windows: int = 0,
    groups: int = 1,
    levels: tuple[Level, ...] = FULL,
) -> list[Opening]:
    return governor.choose(waiting, lambda _group: levels, now_ns, open_windows, groups)


def _alone(process: _Process, levels: tuple[Level, ...] = FULL) -> _Node:
    node = _Node({"group": {"process": process}}, levels)
    node.start()
    return node


@pytest.mark.parametrize("cores", [0.1, 1, 2, 64])
@pytest.mark.parametrize("hits", [1_000, 100_000, 1_000_000])
@pytest.mark.parametrize("levels", [FULL, BOTH, ("sampled",)])
def test_the_budget_holds(cores: float, hits: float, levels: tuple[Level, ...]) -> None:
    process = _Process(cores, hits * cores)
    _alone(process, levels).run(600)
    floor_ns = POLICY.floor_ns_per_second * 600
    assert process.cost_ns <= POLICY.fraction * process.cpu_ns + floor_ns
    assert process.seen_ns > 0


def test_the_budget_is_used() -> None:
    process = _Process(1, 400_000)
    _alone(process).run(600)
    assert process.cost_ns > 0.6 * POLICY.fraction * process.cpu_ns
    assert process.seen_ns > 0.01 * 600 * SECOND


def test_levels_share_the_budget() -> None:
    """Of a busy process both see: full more, sampled for longer."""
    process = _Process(1, 400_000)
    _alone(process, BOTH).run(1200)
    assert process.cost_ns > 0.6 * POLICY.fraction * process.cpu_ns
    assert process.seen["sampled"] > 5 * process.seen["full"] > 0
    assert min(process.costs.values()) > 0.2 * process.costs.total()


def test_where_sampling_is_cheap_full_has_what_it_leaves() -> None:
    process = _Process(1, 20_000)
    _alone(process, BOTH).run(1200)
    assert process.seen["sampled"] > 0.5 * 1200 * SECOND
    assert process.costs["full"] > process.costs["sampled"]
    assert process.cost_ns > 0.6 * POLICY.fraction * process.cpu_ns


def test_where_full_is_cheap_nothing_is_sampled() -> None:
    process = _Process(0.5, 100)
    _alone(process, BOTH).run(1200)
    assert process.seen["full"] > 0.8 * 1200 * SECOND
    assert process.seen["sampled"] < 0.1 * 1200 * SECOND


def test_what_full_can_never_pay_sampled_can() -> None:
    process = _Process(0.002, 60_000)
    _alone(process, BOTH).run(3600)
    assert process.seen["sampled"] > process.seen["full"]
    assert process.cost_ns <= POLICY.fraction * process.cpu_ns + POLICY.floor_ns_per_second * 3600


def test_who_hits_probes_seldom_is_watched_nearly_always() -> None:
    process = _Process(0.5, 100)
    _alone(process).run(1200)
    assert process.seen_ns > 0.9 * 1200 * SECOND


def test_idle_processes_are_seen_for_next_to_nothing() -> None:
    process = _Process(0, 5)
    _alone(process).run(3600)
    assert process.seen_ns > 0.1 * 3600 * SECOND
    assert process.cost_ns <= POLICY.floor_ns_per_second * 3600 + OPENING_NS


def test_the_first_window_of_a_process_is_short() -> None:
    node = _alone(_Process(1, 500_000, cpu_ns=1000 * SECOND))
    node.run(1)
    ((_, opening),) = node.openings
    assert opening.duration_ns == POLICY.first_ns
    # what it has used before it was found pays for it at once, but doesn't make it dear
    assert opening.limits_ns["process"] == POLICY.storm_ns


def test_a_storm_is_bounded_and_its_debt_is_paid() -> None:
    process = _Process(0.001, 1)
    node = _alone(process)
    node.late_hits = 30_000
    node.run(1800)
    while node.open:
        node.run(1)
    before = process.cost_ns
    process.cores, process.hits = 0.05, 1_000_000
    while not node.open:  # as if it had been idle until then
        node.run(1)
    limits = [opening.limits_ns["process"] for _, opening in node.openings]
    assert max(limits) <= POLICY.storm_ns * 1.5
    node.run(3600)
    assert node.governor.ends["full", "budget"] >= 1
    floor_ns = POLICY.floor_ns_per_second * 3600
    allowed = POLICY.fraction * process.cpu_ns + floor_ns + 30_000 * HIT_NS + max(limits)
    assert process.cost_ns - before <= allowed


def test_windows_are_spread() -> None:
    node = _Node({f"group {i}": {f"process {i}": _Process(0.2, 50, cpu_ns=100 * SECOND)} for i in range(40)})
    node.start()
    begun: list[int] = []
    node.run(120, lambda _second: begun.append(len(node.openings)))
    assert max(b - a for a, b in pairwise(begun)) <= POLICY.open_at_once
    assert node.most_open <= 10
    assert {str(opening.group) for _, opening in node.openings} == set(node.groups)


def test_a_group_is_only_watched_if_all_can_pay() -> None:
    poor, rich = _Process(0.01, 100_000), _Process(1, 1_000)
    node = _Node({"group": {"poor": poor, "rich": rich}})
    node.start()
    node.run(1800)
    for process in (poor, rich):
        assert 0 < process.cost_ns <= POLICY.fraction * process.cpu_ns + POLICY.floor_ns_per_second * 1800
    assert poor.seen_ns == rich.seen_ns


def test_an_idle_process_keeps_nobody_from_being_watched() -> None:
    """Who has more pays more of what it takes to open a window."""
    idle, busy = _Process(0, 5), _Process(1, 400_000)
    node = _Node({"group": {"idle": idle, "busy": busy}})
    node.start()
    node.run(600)
    assert idle.cost_ns <= POLICY.floor_ns_per_second * 600
    assert busy.cost_ns > 0.5 * POLICY.fraction * busy.cpu_ns


def test_a_process_that_joins_may_cost_no_more_than_a_storm() -> None:
    governor = Governor(POLICY)
    governor.add("young", 0, 0)
    assert governor.limit_ns("young") == POLICY.storm_ns


def test_a_target_that_costs_too_much_is_said_to_starve_once() -> None:
    process = _Process(0.0001, 1_000_000, cpu_ns=10 * SECOND)
    node = _alone(process)
    node.run(3 * 600)
    assert node.governor.ends["full", "no_budget"] == 1


def test_what_is_no_window_s_is_paid_from_the_same_account() -> None:
    """Half of the budget goes to what is counted all the time."""
    process = _Process(1, 400_000)
    node = _alone(process)
    half_ns = POLICY.fraction * POLICY.margin * SECOND / 2
    node.run(1200, lambda _second: node.governor.spend("process", half_ns))
    assert process.cost_ns <= POLICY.fraction * POLICY.margin * process.cpu_ns / 2 + 1200 * POLICY.floor_ns_per_second
    assert process.seen_ns > 0
    node.governor.spend("gone", SECOND)


def test_a_window_that_could_not_be_opened_is_tried_again_later() -> None:
    governor = Governor(POLICY)
    governor.add("process", 0, 100 * SECOND)
    assert len(choose(governor, {"group": ["process"]}, 0)) == 1
    governor.postpone("group", 0)
    assert not choose(governor, {"group": ["process"]}, POLICY.postponed_ns - 1)
    assert len(choose(governor, {"group": ["process"]}, POLICY.postponed_ns)) == 1


def test_what_is_gone_is_forgotten() -> None:
    governor = Governor(POLICY)
    governor.add("process", 0, 100 * SECOND)
    choose(governor, {"group": ["process"]}, 0)
    governor.remove("process")
    governor.keep_groups([])
    assert not governor._accounts
    assert not governor._turns
    governor.charge("process", "full", SECOND, 1.0)  # its last window was still to be charged
    assert not choose(governor, {"group": ["process"]}, 0)


def test_random_loads_keep_within_the_budget() -> None:
    generator = random.Random(4)
    process = _Process(1, 1000)
    node = _alone(process)

    def change(_second: int) -> None:
        if node.open:
            return
        process.cores = generator.choice([0, 0.01, 0.5, 2])
        process.hits = process.cores * generator.choice([100, 10_000, 500_000])

    node.run(3600, change)
    allowed = POLICY.fraction * process.cpu_ns + POLICY.floor_ns_per_second * 3600
    assert 0 < process.cost_ns <= allowed
