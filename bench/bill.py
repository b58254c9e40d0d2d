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

from bench import intervals
from bench.measurement import BenchError, Spread, print_conditions, print_limit, print_table
from bench.pieces import Pieces
from bench.working import CHANNELS, WORKS, Working, working
from schedtrace import target
from schedtrace.compilation import Compilation, Sizes
from schedtrace.image import Image, open_image
from schedtrace.procfs import open_process
from schedtrace.session import Session
from schedtrace.target import Bill
from schedtrace.window import FULL_LEVEL, SAMPLED_LEVEL

TURNS, TURN_SECONDS, SETTLE_SECONDS = 80, 0.5, 1.0
HONEST = 0.2
"""The bill may differ by that part from what is measured."""


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


def measure(load: Working, image: Image, level: str) -> Measured:
    """Put the probes of the image's plan in and take them out again, many times. Raises BenchError."""
    plan = image.plan
    record, sampler = target.record_of(plan, image.load_bias), target.sampler_of(plan, image.load_bias)
    pieces, charged, hits = Pieces(load.now), [], []
    with ExitStack() as stack:
        compilation = stack.enter_context(Compilation(Sizes(targets=2), target.programs_of(plan)))
        session = stack.enter_context(Session(compilation, target.programs_of(plan)))
        calibration = target.calibration(session, [plan.mode], {probe.emulated for probe in plan.probes})
        if calibration is None:
            raise BenchError("what a hit costs can't be calibrated")
        bill = Bill()
        pieces.take("", TURN_SECONDS)
        for _ in range(TURNS):
            attachment = session.attach(image.descriptor, target.sites_of(plan))
            session.watch(load.pid, record, sampler=sampler, time_before=False)
            pieces.take(level, TURN_SECONDS)
            snapshot = session.retire([load.pid])[load.pid]
            session.detach([attachment])
            calibration.measure()
            bill = Bill(cold_ns=bill.cold_ns)
            bill.add(plan, snapshot.hits, snapshot.timed, target.costs_of(calibration, plan))
            hits.append(sum(snapshot.hits))
            charged.append(bill.ns / hits[-1])
            pieces.take("", TURN_SECONDS)
    costs = intervals.costs(pieces.samples, round(1e9 * TURN_SECONDS))
    took = [cost.extra_ns / n for cost, n in zip(costs, hits, strict=True)]
    return Measured(statistics.median(hits) / TURN_SECONDS, Spread.of(took), Spread.of(charged))


def _levels(load: Working) -> dict[str, Measured]:
    """What was measured at each level that is possible."""
    with open_process(load.pid) as process:
        image = open_image(process)
        plans = {SAMPLED_LEVEL: image.plan.at_sampled_level()} if image.plan.sampled else {}
        plans[FULL_LEVEL] = image.plan
        try:
            return {level: measure(load, replace(image, plan=plan), level) for level, plan in plans.items()}
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
