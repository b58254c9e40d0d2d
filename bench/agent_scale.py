"""The agent with many processes: time to ready, CPU when all is idle, memory, scrapes, time to stop.

Each pod has one container with one or two Go processes. All of them are copies of one program, each an executable of
its own (the dearest case: each is read and probed on its own), up to :data:`DISTINCT`, and idle but for what the
runtime itself does. `--select` names them, so that the agent sees them alone; each gets probes of its own then, which
is the dearest case, too. The agent runs with real-time priority, as if the machine had nothing else to do.
"""

import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

from bench.agents import SETTLE_SECONDS, agent, anonymous_mb
from bench.measurement import BenchError, print_conditions, print_limit, print_table, process_cpu_ns
from bench.pods import pods
from schedtrace.window import FULL_LEVEL
from tests.workload import Workload, binary
from tools.cgroup import entering

FIRST = ("chrt", "--fifo", "1")
PODS = (10, 50, 200)
PER_POD = 2
DISTINCT = 100
LIMITED = 50
"""Pods at which the limits hold: 100 processes."""
SCRAPES = 31
SCRAPE_SECONDS, IDLE_SCRAPES = 15.0, 3
"""So often Prometheus asks; for longer than the time between two looks at all processes."""
READY, READY_CPU, IDLE, MEMORY = "ready, s", "CPU until then, s", "a scrape each 15 s, % CPU", "MB"
CHILDREN, SCRAPE, SCRAPE_CPU, STOP = "children, MB", "scrape, ms", "CPU, ms", "stop, s"
_LIMITS = ((READY, 5.0), (IDLE, 0.5), (MEMORY, 60.0), (SCRAPE, 50.0), (STOP, 2.0))
LINEAR = 1.5
"""A scrape may cost a pod of many so many times what it costs one of few."""


@dataclass(frozen=True)
class Measured:
    """What was measured with one number of pods; ``values`` by title."""

    pods: int
    processes: int
    series: int
    values: dict[str, float]


def measure(count: int, per_pod: int = PER_POD, level: str = FULL_LEVEL) -> Measured:
    """With so many pods, watched all the time at that level. Raises BenchError if the agent doesn't watch all of their
    processes."""
    program = binary("pingpong")
    processes = count * per_pod
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="schedtrace-bench-")))
        made = stack.enter_context(pods(count))
        copies = [Path(shutil.copy(program, folder / f"{folder.name}-{i}")) for i in range(min(processes, DISTINCT))]
        for i in range(processes):
            shell, *arguments = entering(made.cgroups[i // per_pod], [copies[i % len(copies)], "-n", "1"])
            stack.enter_context(Workload(Path(shell), *arguments))
        selected: list[str | Path] = [
            "--log-root",
            made.log_root,
            "--select",
            f"bench/*/*/{folder.name}-*",
            "--level",
            level,
        ]
        one = stack.enter_context(agent(folder, selected, first=FIRST))
        ready_cpu_ns = _cpu_ns([one.pid, *one.children()])
        text = one.get("/metrics")
        watched = sum(line.startswith("schedtrace_threads{") for line in text.splitlines())
        if watched != processes:
            raise BenchError(f"{watched} of {processes} processes are watched: {one.log.read_text()[-500:]}")
        time.sleep(SETTLE_SECONDS)
        family = [one.pid, one.keeper()]
        before, began = _cpu_ns(family), time.monotonic_ns()
        for _ in range(IDLE_SCRAPES):
            time.sleep(SCRAPE_SECONDS)
            one.get("/metrics")
        idle = (_cpu_ns(family) - before) / (time.monotonic_ns() - began)
        scrapes, before = [], _cpu_ns([one.pid])
        for _ in range(SCRAPES):
            began = time.monotonic_ns()
            one.get("/metrics")
            scrapes.append((time.monotonic_ns() - began) / 1e6)
        scrape_cpu_ms = (_cpu_ns([one.pid]) - before) / 1e6 / SCRAPES
        values = {
            READY: one.ready_seconds,
            READY_CPU: ready_cpu_ns / 1e9,
            IDLE: idle * 100,
            MEMORY: anonymous_mb(one.pid),
            CHILDREN: sum(map(anonymous_mb, one.children())),
            SCRAPE: statistics.median(scrapes),
            SCRAPE_CPU: scrape_cpu_ms,
            STOP: one.stop(),
        }
    return Measured(count, processes, sum(not line.startswith("#") for line in text.splitlines()), values)


def _cpu_ns(pids: list[int]) -> int:
    return sum(map(process_cpu_ns, pids))


def print_measured(all_measured: Sequence[Measured]) -> None:
    """As a table."""
    titles = list(all_measured[0].values)
    rows = [
        [str(one.pods), str(one.processes), str(one.series), *(f"{one.values[title]:.2f}" for title in titles)]
        for one in all_measured
    ]
    print_table(["pods", "processes", "series", *titles], rows)


def main() -> None:
    print("The agent with idle Go processes, two a pod (CPU: of a core, with the child that holds the probes;")
    print("memory: what no file holds)\n")
    print_conditions()
    all_measured = [measure(int(count)) for count in sys.argv[1:] or PODS]
    print_measured(all_measured)
    limited = next(one for one in all_measured if one.pods == LIMITED)
    for title, limit in _LIMITS:
        print_limit(f"{LIMITED} pods: {title}", limited.values[title], limit)
    each = all_measured[-1].values[SCRAPE] / all_measured[-1].pods
    print_limit("scrape: a pod among the most, times one of 50", each * LIMITED / limited.values[SCRAPE], LINEAR)


if __name__ == "__main__":
    main()
