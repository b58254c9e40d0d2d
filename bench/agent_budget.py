"""Does the agent keep within --max-overhead? The CPU time of a unit of work in its windows and between them.

Windows are so short, and machines so noisy, that their cost can't be seen in the whole. So the target's CPU time and
its work are read every few milliseconds, with whether there are breakpoints in its memory, and each window is compared
with the seconds before and after it, when there are none: what its work cost more than it would have cost there is what
the window cost. That is what the target paid, however the agent counts it. Intervals are those of the sum over windows.
"""

import math
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

from bench.agents import MeasuredAgent, agent
from bench.counted import Counted, counted
from bench.measurement import BenchError, print_conditions, print_limit, print_table, process_cpu_ns
from schedtrace.plan import make_plan
from schedtrace.procfs import open_process
from tests.target_text import BREAKPOINTS

WORKS = {"net/http, two bytes": "http", "channels on all CPUs": "pingpong"}
MINUTES = 3.0
CONNECTIONS = 32
SAMPLE_SECONDS = 0.005
AROUND_NS = 2_000_000_000
"""So long before and after a window is what it is compared with."""
LIMIT_PERCENT = 1.0
HONEST = 0.2
"""The agent's own figure may differ by that part from what is measured."""


@dataclass(frozen=True)
class Sample:
    """The target at one moment. ``probed``: is there a breakpoint?"""

    time_ns: int
    cpu_ns: int
    units: int
    probed: bool


@dataclass(frozen=True)
class Cost:
    """Of one window: CPU time in it, and what of it is more than the same work cost around it, in ns."""

    cpu_ns: float
    extra_ns: float


@dataclass(frozen=True)
class Measured:
    samples: list[Sample]
    costs: list[Cost]
    exported_ns: float
    """Of the same time, what the agent says."""
    agent_ns: int
    """CPU time of the agent and its child."""


@contextmanager
def _requests(address: str) -> Iterator[None]:
    if shutil.which("wrk") is None:
        raise BenchError("wrk is not installed (Debian: apt-get install wrk)")
    command = ["wrk", "--threads=1", f"--connections={CONNECTIONS}", "--duration=1h", f"http://{address}/"]
    load = subprocess.Popen(command, stdout=subprocess.DEVNULL)
    try:
        yield
    finally:
        load.kill()
        load.wait()


def _samples(load: Counted, address: int, seconds: float) -> Iterator[Sample]:
    breakpoint_code = BREAKPOINTS[os.uname().machine]
    with Path(f"/proc/{load.pid}/mem").open("rb", buffering=0) as memory:
        until = time.monotonic() + seconds
        while time.monotonic() < until:
            probed = os.pread(memory.fileno(), len(breakpoint_code), address) == breakpoint_code
            now = load.now()
            yield Sample(time.monotonic_ns(), now.cpu_ns, now.units, probed)
            time.sleep(SAMPLE_SECONDS)


def window_costs(samples: list[Sample]) -> list[Cost]:
    """Of each window that has enough on both sides of it."""
    probed = [i for i, sample in enumerate(samples) if sample.probed]
    starts = [i for i in probed if not samples[i - 1].probed] if probed else []
    costs = []
    for start in starts:
        end = next((i for i in range(start, len(samples)) if not samples[i].probed), None)
        if start < 1 or end is None:
            continue
        before, after = samples[start - 1], samples[end]
        around = [
            (_unit_ns(first, last), last.units - first.units)
            for first, last in (
                (_at(samples, before.time_ns - AROUND_NS), before),
                (after, _at(samples, after.time_ns + AROUND_NS)),
            )
            if last.units > first.units
        ]
        if not around:
            continue
        unit_ns = sum(ns * units for ns, units in around) / sum(units for _, units in around)
        cpu_ns = after.cpu_ns - before.cpu_ns
        costs.append(Cost(cpu_ns, cpu_ns - unit_ns * (after.units - before.units)))
    return costs


def _at(samples: list[Sample], time_ns: int) -> Sample:
    return min(samples, key=lambda sample: abs(sample.time_ns - time_ns))


def _unit_ns(first: Sample, last: Sample) -> float:
    return (last.cpu_ns - first.cpu_ns) / (last.units - first.units)


def measure(work: str, seconds: float) -> Measured:
    """Raises BenchError."""
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="schedtrace-bench-")))
        (folder / "containers").mkdir()
        program = Counted.program(folder)
        load = stack.enter_context(counted(program, folder / "count", work))
        if work == "http":
            stack.enter_context(_requests(load.address))
        probe = make_plan(str(program)).probes[0]
        with open_process(load.pid) as process:
            address = process.load_bias() + probe.vaddr
        selected: list[str | Path] = ["--log-root", folder, "--select", f"*/*/*/{folder.name}"]
        one = stack.enter_context(agent(folder, selected, max_overhead=str(LIMIT_PERCENT)))
        family = [one.pid, one.keeper()]
        before_ns, exported_ns = sum(map(process_cpu_ns, family)), _exported_ns(one)
        samples = list(_samples(load, address, seconds))
        agent_ns = sum(map(process_cpu_ns, family)) - before_ns
        time.sleep(2)  # a window that has just ended is read within a second
        exported_ns = _exported_ns(one) - exported_ns
    return Measured(samples, window_costs(samples), exported_ns, agent_ns)


def _exported_ns(one: MeasuredAgent) -> float:
    lines = one.get("/metrics").splitlines()
    return 1e9 * sum(float(line.split()[-1]) for line in lines if line.startswith("schedtrace_overhead_seconds_total{"))


def report(name: str, measured: Measured) -> None:
    """Print the table and the limits."""
    costs, samples = measured.costs, measured.samples
    if len(costs) < 3:
        raise BenchError(f"{name}: {len(costs)} windows are too few to measure")
    whole_ns = samples[-1].cpu_ns - samples[0].cpu_ns
    extra_ns = [cost.extra_ns for cost in costs]
    percent = 100 * sum(extra_ns) / whole_ns
    interval = 100 * 1.96 * statistics.stdev(extra_ns) * math.sqrt(len(costs)) / whole_ns
    exported = 100 * measured.exported_ns / whole_ns
    agents = 100 * measured.agent_ns / whole_ns
    slower = [100 * cost.extra_ns / (cost.cpu_ns - cost.extra_ns) for cost in costs]
    seconds = (samples[-1].time_ns - samples[0].time_ns) / 1e9
    rows = [
        ["CPU time of the target, cores", f"{whole_ns / 1e9 / seconds:.2f}"],
        ["windows", str(len(costs))],
        ["added to the target's CPU time in a window, %", f"{statistics.median(slower):.0f}"],
        ["added in all, measured, % (95 % interval)", f"{percent:.2f} ± {interval:.2f}"],
        ["the same as the agent exports it", f"{exported:.2f}"],
        ["CPU time of the agent, % of the target's", f"{agents:.2f}"],
    ]
    print_table([name, f"{seconds:.0f} s"], rows)
    print_limit(f"{name}: added", percent, LIMIT_PERCENT, unit=" %")
    print_limit(f"{name}: the 95 % interval, either way", interval, 0.5, unit=" %")
    print_limit(f"{name}: exported, differs by", 100 * abs(exported / percent - 1), 100 * HONEST, unit=" %")


def main() -> None:
    print(f"The agent with --max-overhead {LIMIT_PERCENT:g}: what its windows cost a busy target\n")
    print_conditions()
    for name, work in WORKS.items():
        report(name, measure(work, 60 * float(sys.argv[1] if len(sys.argv) > 1 else MINUTES)))
        print()


if __name__ == "__main__":
    main()
