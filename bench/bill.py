"""Is the bill honest? What hits take of a busy target's CPU time, beside what they are charged with.

Probes are put in for half a second, taken out, and put in again, and what the target's work costs it with them is
compared with the half seconds before and after. Nothing else comes and goes with them: switches are not counted, no
agent runs. Others who use the machine make some of these turns worthless, so that medians are taken. Where there are
few hits, what is measured is a small part of what the work costs, which is never twice the same: turns are added.
"""

import math
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path

from bench.agent_budget import HONEST
from bench.counted import Reading
from bench.measurement import BenchError, Spread, print_conditions, print_limit, print_table
from bench.working import CHANNELS, WORKS, Working, working
from schedtrace import target
from schedtrace.compilation import Compilation, Sizes
from schedtrace.image import Image, open_image
from schedtrace.procfs import open_process
from schedtrace.session import Session
from schedtrace.target import Bill
from schedtrace.window import FULL_LEVEL, SAMPLED_LEVEL

TURNS, MOST_TURNS = 60, 480
TURN_SECONDS, SETTLE_SECONDS = 0.5, 1.0
CERTAIN = HONEST / 2
"""Turns are added until the median is known up to that part of it."""
_DEVIATIONS = 1.96  # 95 %


@dataclass(frozen=True)
class Measured:
    """Of one level: how many turns, hits a second, and of a hit what it took (the median's 95 % interval reaches as far
    as ``margin_ns`` either way) and what was charged, in ns."""

    turns: int
    hits_rate: float
    took_ns: float
    margin_ns: float
    charged_ns: Spread

    @property
    def differs(self) -> float:
        """By what part of it the charge does from what was taken."""
        return abs(self.charged_ns.median / self.took_ns - 1)


def _margin(values: Sequence[float]) -> float:
    """Half of the 95 % interval of their median, from their order alone."""
    ordered, away = sorted(values), _DEVIATIONS * math.sqrt(len(values)) / 2
    low, high = math.floor(len(values) / 2 - away), math.ceil(len(values) / 2 + away)
    return (ordered[min(high, len(values) - 1)] - ordered[max(low, 0)]) / 2


def _piece(load: Working) -> Reading:
    """What it did for a while."""
    before = load.now()
    time.sleep(TURN_SECONDS)
    after = load.now()
    return Reading(after.cpu_ns - before.cpu_ns, after.units - before.units)


def measure(load: Working, image: Image) -> Measured:
    """Put the probes of the image's plan in and take them out again, many times. Raises BenchError."""
    plan = image.plan
    record, sampler = target.record_of(plan, image.load_bias), target.sampler_of(plan, image.load_bias)
    took: list[float] = []
    charged, hits, before = [], [], _piece(load)
    with ExitStack() as stack:
        compilation = stack.enter_context(Compilation(Sizes(targets=2), target.programs_of(plan)))
        session = stack.enter_context(Session(compilation, target.programs_of(plan)))
        calibration = target.calibration(session, [plan.mode], {probe.emulated for probe in plan.probes})
        if calibration is None:
            raise BenchError("what a hit costs can't be calibrated")
        bill = Bill()
        while len(took) < TURNS or (len(took) < MOST_TURNS and _margin(took) > CERTAIN * statistics.median(took)):
            attachment = session.attach(image.descriptor, target.sites_of(plan))
            session.watch(load.pid, record, sampler=sampler, time_before=False)
            probed = _piece(load)
            snapshot = session.retire([load.pid])[load.pid]
            session.detach([attachment])
            calibration.measure()
            bill = Bill(cold_ns=bill.cold_ns)
            bill.add(plan, snapshot.hits, snapshot.timed, target.costs_of(calibration, plan))
            if not any(snapshot.hits):
                raise BenchError(f"the target (PID {load.pid}) has ended, or does not hit any probe")
            hits.append(sum(snapshot.hits))
            charged.append(bill.ns / hits[-1])
            after = _piece(load)
            unit_ns = (before.cpu_ns + after.cpu_ns) / (before.units + after.units)
            took.append((probed.cpu_ns - probed.units * unit_ns) / hits[-1])
            before = after
    rate = statistics.median(hits) / TURN_SECONDS
    return Measured(len(took), rate, statistics.median(took), _margin(took), Spread.of(charged))


def _levels(load: Working) -> dict[str, Measured]:
    """What was measured at each level that is possible."""
    with open_process(load.pid) as process:
        image = open_image(process)
        plans = {SAMPLED_LEVEL: image.plan.at_sampled_level()} if image.plan.sampled else {}
        plans[FULL_LEVEL] = image.plan
        try:
            return {level: measure(load, replace(image, plan=plan)) for level, plan in plans.items()}
        finally:
            os.close(image.descriptor)


COLUMNS = ("hits/s", "took, ns", "charged, ns")


def columns(one: Measured) -> list[str]:
    """As :data:`COLUMNS`."""
    return [f"{one.hits_rate:,.0f}", f"{one.took_ns:.0f} ± {one.margin_ns:.0f}", one.charged_ns.text(0)]


def main() -> None:
    print("CPU time of a hit: what it took of a busy target, and what it was charged with")
    print("(medians; what it took with the 95 % interval, what was charged with the middle half of the turns)")
    print_conditions()
    print()
    rows, found = [], {}
    for work in sys.argv[1:] or WORKS:
        with tempfile.TemporaryDirectory(prefix="schedtrace-bench-") as folder, working(work, Path(folder)) as load:
            time.sleep(SETTLE_SECONDS)
            for level, one in _levels(load).items():
                found[work, level] = one
                rows.append([f"{work}: {level}", f"{one.turns}", *columns(one)])
    print_table(["", "turns", *COLUMNS], rows)
    for (work, level), one in found.items():
        if work != CHANNELS:  # there the target's own work gets cheaper
            print_limit(f"{work}, {level}: charged, differs by", 100 * one.differs, 100 * HONEST, unit=" %")


if __name__ == "__main__":
    main()
