"""What a storm costs the target before its window is closed: idle at first, then a million transitions a second.

The window is one that the governor could have opened for an idle target. From the moment the target begins until the
last breakpoint is out of its memory, its CPU time is taken, less what the same work costs it without probes.
"""

import os
import statistics
import tempfile
import time
from pathlib import Path

from bench.counted import Counted, counted
from bench.measurement import BenchError, print_conditions, print_limit, print_table
from schedtrace import target
from schedtrace.compilation import Compilation, Sizes
from schedtrace.governor import Policy
from schedtrace.plan import ProbePlan, make_plan
from schedtrace.procfs import open_process
from schedtrace.session import Session
from tests.target_text import TargetText

ROUNDS = 12
TRANSITIONS_PER_ROUND_TRIP = 6
RATES = {"1 M transitions/s": 1_000_000 // TRANSITIONS_PER_ROUND_TRIP, "as many as there can be, on all CPUs": 0}
CLOSED_SECONDS = 10.0
BARE_SECONDS = 0.5
WINDOW_NS = 20_000_000_000
LIMIT_MS = 50.0


def storm_ms(
    session: Session, plan: ProbePlan, hits: int, program: Path, count: Path, rate: int
) -> tuple[float, float]:
    """CPU time of the target that one storm costs, and how long it goes on being probed, in ms. ``hits``: that many end
    the window. Raises BenchError."""
    with counted(program, count, "-wait", "-rate", str(rate)) as load:
        with open_process(load.pid) as process:
            executable_fd = process.open_executable()
            record = target.record_of(plan, process.load_bias())
        text = TargetText.of(load.pid, program)
        window = session.open_window(executable_fd, target.sites_of(plan), WINDOW_NS)
        os.close(executable_fd)
        session.watch(load.pid, record, window, hits)
        time.sleep(0.2)
        began_ns, began = time.monotonic_ns(), load.now()
        load.go()
        while window.number in session.probed_windows():
            if time.monotonic_ns() - began_ns > CLOSED_SECONDS * 1e9:
                raise BenchError("the window of a storm stays open")
            time.sleep(0.001)
        closed_ns, closed = time.monotonic_ns(), load.now()
        if text.differences():
            raise BenchError("a window is said to be closed, and there are breakpoints")
        session.retire([load.pid])
        session.free_window(window)
        time.sleep(BARE_SECONDS)
        after = load.now()
    unit_ns = (after.cpu_ns - closed.cpu_ns) / (after.units - closed.units)
    extra_ns = closed.cpu_ns - began.cpu_ns - unit_ns * (closed.units - began.units)
    return extra_ns / 1e6, (closed_ns - began_ns) / 1e6


def most_hits(session: Session, plan: ProbePlan) -> int:
    """What the governor would let an idle target have."""
    calibration = target.calibration(session, [plan.mode], {probe.emulated for probe in plan.probes})
    if calibration is None:
        raise BenchError("what a hit costs can't be measured")
    return int(Policy(0.01).storm_ns / max(target.costs_of(calibration, plan).hit_ns.values()))


def main() -> None:
    print("A storm in a window of an idle target: CPU time it costs the target until the window is closed\n")
    print_conditions()
    with tempfile.TemporaryDirectory(prefix="schedtrace-bench-") as name:
        folder = Path(name)
        program = Counted.program(folder)
        plan = make_plan(str(program))
        rows, most = [], {}
        with Session(Compilation(Sizes(targets=3)), target.programs_of(plan)) as session:
            hits = most_hits(session, plan)
            for what, rate in RATES.items():
                storms = [storm_ms(session, plan, hits, program, folder / "count", rate) for _ in range(ROUNDS)]
                costs, times = zip(*storms, strict=True)
                most[what] = max(costs)
                rows.append([what, *(f"{value:.0f}" for value in (statistics.median(costs), max(costs)))])
                rows[-1] += [f"{statistics.median(times):.0f}", f"{max(times):.0f}"]
        print_table(["ms", "CPU, median", "CPU, most", "time, median", "time, most"], rows)
        for what, cost in most.items():
            print_limit(f"{what}: the dearest of {ROUNDS} storms costs the target", cost, LIMIT_MS, unit=" ms")


if __name__ == "__main__":
    main()
