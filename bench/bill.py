"""Is the bill honest? What hits take of a busy target's CPU time, beside what they are charged with.

Probes are put in for half a second, taken out, and put in again, and what the target's work costs it with them is
compared with the half seconds before and after. Nothing else comes and goes with them: switches are not counted, no
agent runs. Others who use the machine make some of these turns worthless, so that medians are taken.
"""

import os
import statistics
import sys
import tempfile
import time
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

TURNS, TURN_SECONDS, SETTLE_SECONDS = 60, 0.5, 1.0


@dataclass(frozen=True)
class Measured:
    """Of one level: hits a second, and of a hit what it took and what was charged, in ns, turn by turn."""

    hits_rate: float
    took_ns: Spread
    charged_ns: Spread

    @property
    def differs(self) -> float:
        """By what part of it the charge does from what was taken."""
        return abs(self.charged_ns.median / self.took_ns.median - 1)


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
    bare, probed, charged, hits = [_piece(load)], [], [], []
    with ExitStack() as stack:
        compilation = stack.enter_context(Compilation(Sizes(targets=2), target.programs_of(plan)))
        session = stack.enter_context(Session(compilation, target.programs_of(plan)))
        calibration = target.calibration(session, [plan.mode], {probe.emulated for probe in plan.probes})
        if calibration is None:
            raise BenchError("what a hit costs can't be calibrated")
        bill = Bill()
        for _ in range(TURNS):
            attachment = session.attach(image.descriptor, target.sites_of(plan))
            session.watch(load.pid, record, sampler=sampler, time_before=False)
            probed.append(_piece(load))
            snapshot = session.retire([load.pid])[load.pid]
            session.detach([attachment])
            calibration.measure()
            bill = Bill(cold_ns=bill.cold_ns)
            bill.add(plan, snapshot.hits, snapshot.timed, target.costs_of(calibration, plan))
            if not any(snapshot.hits):
                raise BenchError(f"the target (PID {load.pid}) has ended, or does not hit any probe")
            hits.append(sum(snapshot.hits))
            charged.append(bill.ns / hits[-1])
            bare.append(_piece(load))
    took = []
    for i, (one, n) in enumerate(zip(probed, hits, strict=True)):
        around = [bare[i], bare[i + 1]]
        unit_ns = sum(piece.cpu_ns for piece in around) / sum(piece.units for piece in around)
        took.append((one.cpu_ns - one.units * unit_ns) / n)
    return Measured(statistics.median(hits) / TURN_SECONDS, Spread.of(took), Spread.of(charged))


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


def main() -> None:
    print("CPU time of a hit: what it took of a busy target, and what it was charged with")
    print("(medians, in brackets the middle half of the turns)")
    print_conditions()
    print()
    rows, found = [], {}
    for work in sys.argv[1:] or WORKS:
        with tempfile.TemporaryDirectory(prefix="schedtrace-bench-") as folder, working(work, Path(folder)) as load:
            time.sleep(SETTLE_SECONDS)
            for level, one in _levels(load).items():
                found[work, level] = one
                rows.append(
                    [f"{work}: {level}", f"{one.hits_rate:,.0f}", one.took_ns.text(0), one.charged_ns.text(0)]
                )
    print_table(["", "hits/s", "took, ns", "charged, ns"], rows)
    for (work, level), one in found.items():
        if work != CHANNELS:  # there the target's own work gets cheaper
            print_limit(f"{work}, {level}: charged, differs by", 100 * one.differs, 100 * HONEST, unit=" %")


if __name__ == "__main__":
    main()
