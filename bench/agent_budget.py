"""Does the agent keep within --max-overhead? What a busy target pays in its windows, and what it would without them.

Windows are so short, and machines so noisy, that their cost can't be seen in the whole. So the target's CPU time and
its work are read every few milliseconds, with whether there are breakpoints in its memory, and each window is compared
with the seconds before and after it, when there are none: what its work cost more than it would have cost there is
what the window cost, and the work that was not done meanwhile is what it took of the throughput. That is what the
target paid, however the agent counts it. What sits on the scheduler's tracepoints is there all the time: switches of
threads are counted, and taken to cost what bench.switch_cost measures. Without the governor, the agent itself comes and
goes.
"""

import os
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from dataclasses import astuple, dataclass
from pathlib import Path

from bench import intervals, switch_cost
from bench.agents import MeasuredAgent, agent
from bench.intervals import Average, Cost, Sample
from bench.measurement import BenchError, Spread, print_conditions, print_limit, print_table, process_cpu_ns
from bench.pieces import Pieces
from bench.switch_cost import GOROUTINE, NO_GOROUTINE
from bench.working import WORKS, Working, working
from schedtrace.plan import make_plan
from schedtrace.procfs import open_process
from schedtrace.window import FULL_LEVEL, SAMPLED_LEVEL
from tests.target_text import BREAKPOINTS

MINUTES = 3.0
SWITCH_ROUNDS = 6
SAMPLE_SECONDS = 0.005
SETTLE_SECONDS = 1.0
COLLECTED_SECONDS = 1.5
"""Until a window that has ended is in the agent's figures."""
AROUND_NS = 2_000_000_000
"""So long before and after a window is what it is compared with."""
TURNS, TURN_SECONDS = 12, 3.0
"""Without the governor."""
LIMIT_PERCENT, MISSED_PERCENT = 1.0, 1.5
HONEST = 0.2
"""The agent's own figure may differ by that part from what is measured."""


@dataclass(frozen=True)
class Bill:
    """What the agent says that watching the target has cost: the target itself, and its share of the agent, in ns. And
    how often a thread of the target went off the CPU and came back, and how often it ran a goroutine then."""

    target_ns: float = 0
    agent_ns: float = 0
    switches: float = 0
    of_goroutines: float = 0

    @classmethod
    def of(cls, one: MeasuredAgent) -> "Bill":
        lines = one.get("/metrics").splitlines()

        def total(name: str, label: str = "") -> float:
            return sum(float(line.split()[-1]) for line in lines if line.startswith(f"{name}{{") and label in line)

        overhead = "schedtrace_overhead_seconds_total"
        return cls(
            1e9 * total(overhead, 'whose="target"'),
            1e9 * total(overhead, 'whose="agent"'),
            total("schedtrace_thread_run_queue_seconds_count"),
            total("schedtrace_goroutine_off_cpu_seconds_count"),
        )

    def __sub__(self, other: "Bill") -> "Bill":
        pairs = zip(astuple(self), astuple(other), strict=True)
        return Bill(*(value - before for value, before in pairs))

    def switches_ns(self, more: Mapping[str, Spread]) -> float:
        """CPU time that the switches have cost the target. ``more``: see :func:`switch_cost.more_ns`."""
        of_others = max(self.switches - self.of_goroutines, 0)
        return self.of_goroutines * more[GOROUTINE].median + of_others * more[NO_GOROUTINE].median


class Probes:
    """Whether there are breakpoints in a process, and of which level."""

    def __init__(self, load: Working) -> None:
        plan = make_plan(str(load.program))
        plans = {FULL_LEVEL: plan, **({SAMPLED_LEVEL: plan.at_sampled_level()} if plan.sampled else {})}
        self.levels = tuple(plans)
        """Those that are possible."""
        with open_process(load.pid) as process:
            bias = process.load_bias()
        self._addresses = {level: bias + plan.probes[0].vaddr for level, plan in plans.items()}
        self._memory = Path(f"/proc/{load.pid}/mem").open("rb", buffering=0)  # noqa: SIM115
        self._code = BREAKPOINTS[os.uname().machine]

    def level(self) -> str:
        """ "" without any."""
        return next((level for level, address in self._addresses.items() if self._is_in(address)), "")

    def _is_in(self, address: int) -> bool:
        return os.pread(self._memory.fileno(), len(self._code), address) == self._code

    def close(self) -> None:
        self._memory.close()


@dataclass(frozen=True)
class Target:
    """What is measured, and how the agent is told to watch that alone."""

    load: Working
    probes: Probes
    folder: Path

    @property
    def selected(self) -> list[str | Path]:
        return ["--log-root", self.folder, "--select", f"*/*/*/{self.folder.name}"]


def _target(work: str, stack: ExitStack) -> Target:
    folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="schedtrace-bench-")))
    (folder / "containers").mkdir()
    load = stack.enter_context(working(work, folder))
    probes = Probes(load)
    stack.callback(probes.close)
    time.sleep(SETTLE_SECONDS)
    return Target(load, probes, folder)


def _samples(one: Target, seconds: float) -> Iterator[Sample]:
    """For so long, and until the last window has ended."""
    until, level = time.monotonic() + seconds, ""
    while level or time.monotonic() < until:
        level, now = one.probes.level(), one.load.now()
        yield Sample(time.monotonic_ns(), now.cpu_ns, now.units, level)
        time.sleep(SAMPLE_SECONDS)


def _agents_ns(one: MeasuredAgent) -> int:
    return sum(map(process_cpu_ns, (one.pid, one.keeper())))


def with_governor(work: str, target: Target, seconds: float, more: Mapping[str, Spread]) -> None:
    """Measure and print. ``more``: see :func:`switch_cost.more_ns`. Raises BenchError."""
    with agent(target.folder, target.selected, max_overhead=str(LIMIT_PERCENT)) as one:
        before, bill = _agents_ns(one), Bill.of(one)
        samples = list(_samples(target, seconds))
        agent_ns = _agents_ns(one) - before
        time.sleep(COLLECTED_SECONDS)
        bill = Bill.of(one) - bill
    costs = intervals.costs(samples, AROUND_NS)
    whole_ns = samples[-1].cpu_ns - samples[0].cpu_ns
    whole_units = samples[-1].units - samples[0].units
    whole_time_ns = samples[-1].time_ns - samples[0].time_ns
    windows = intervals.added_percent(costs, whole_ns)
    missed = intervals.missed_percent(costs, whole_units)
    share = 100 * bill.agent_ns / whole_ns
    exported = 100 * bill.target_ns / whole_ns
    switching = 100 * bill.switches_ns(more) / whole_ns
    targets = windows.value + switching
    rows = [
        ["CPU time of the target, cores", f"{whole_ns / whole_time_ns:.2f}"],
        *_levels_rows(costs, whole_time_ns),
        ["added by windows, % (95 % interval)", windows.text()],
        ["added to switches of threads, %", f"{switching:.2f}"],
        ["the agent's CPU time for it, as it exports that, %", f"{share:.2f}"],
        ["all of that, %", Average(targets + share, windows.half).text()],
        ["the target's part of it as the agent exports it, %", f"{exported:.2f}"],
        ["CPU time of the agent in all, % of the target's", f"{100 * agent_ns / whole_ns:.2f}"],
        ["work not done, %", missed.text()],
    ]
    print_table([f"{work}, {whole_time_ns / 1e9:.0f} s", ""], rows)
    print_limit(f"{work}: in all", targets + share, LIMIT_PERCENT, unit=" %")
    print_limit(f"{work}: the 95 % interval, either way", windows.half, 0.5, unit=" %")
    print_limit(f"{work}: work not done", missed.value, MISSED_PERCENT, unit=" %")
    print_limit(f"{work}: exported, differs by", 100 * abs(exported / targets - 1), 100 * HONEST, unit=" %")


def _levels_rows(costs: list[Cost], whole_time_ns: float) -> Iterator[list[str]]:
    for level in (SAMPLED_LEVEL, FULL_LEVEL):
        some = [cost for cost in costs if cost.level == level]
        share = 100 * sum(cost.time_ns for cost in some) / whole_time_ns
        yield [f"{level} windows (share of the time, %)", f"{len(some)} ({share:.2f})"]
        if some:
            slower = statistics.median(100 * cost.extra_ns / (cost.cpu_ns - cost.extra_ns) for cost in some)
            yield [f"added in a {level} window, %", f"{slower:.1f}"]


def without_governor(work: str, target: Target) -> None:
    """Measure and print what it costs to be watched all the time, at each level. Raises BenchError."""
    rows = []
    for level in (SAMPLED_LEVEL, FULL_LEVEL):
        if level not in target.probes.levels:
            rows.append([level, *["not possible"] * 2, *["-"] * 2])
            continue
        pieces, exported_ns, agent_ns = Pieces(target.load.now), 0.0, 0
        pieces.take("", TURN_SECONDS)
        for _ in range(TURNS):
            with agent(target.folder, [*target.selected, "--level", level]) as one:
                _await_probes(target.probes, level)
                before_ns, before = _agents_ns(one), Bill.of(one)
                pieces.take(level, TURN_SECONDS)
                exported_ns += (Bill.of(one) - before).target_ns
                agent_ns += _agents_ns(one) - before_ns
                one.stop()
            pieces.take("", TURN_SECONDS)
        costs = intervals.costs(pieces.samples, round(2e9 * TURN_SECONDS))
        bare_ns = intervals.bare_ns(costs)
        added = intervals.added_percent(costs, bare_ns)
        exported = 100 * exported_ns / bare_ns
        missed = intervals.missed_percent(costs, intervals.possible_units(costs))
        agents = 100 * agent_ns / bare_ns
        rows.append([level, added.text(), f"{exported:.2f}", f"{agents:.2f}", missed.text()])
    header = [f"{work}, always", "% added", "exported", "the agent, %", "work not done, %"]
    print_table(header, rows)


def _await_probes(probes: Probes, level: str) -> None:
    deadline = time.monotonic() + 30
    while probes.level() != level:
        if time.monotonic() > deadline:
            raise BenchError(f"the agent puts no probes in at level {level}")
        time.sleep(0.05)


def main() -> None:
    seconds = 60 * float(sys.argv[1] if len(sys.argv) > 1 else MINUTES)
    print(f"What a busy target pays for the agent: with --max-overhead {LIMIT_PERCENT:g}, and always watched")
    print_conditions()
    more = switch_cost.more_ns(SWITCH_ROUNDS)
    print("a switch of a watched thread costs more than without the agent, ns: of one that runs a goroutine")
    print(f"{more[GOROUTINE].text(0)}, of another {more[NO_GOROUTINE].text(0)}")
    for work in sys.argv[2:] or WORKS:
        print()
        with ExitStack() as stack:
            target = _target(work, stack)
            with_governor(work, target, seconds, more)
            print()
            without_governor(work, target)


if __name__ == "__main__":
    main()
