"""What hits are said to have cost."""

from types import SimpleNamespace
from typing import Any, cast

import pytest

from schedtrace.calibrate import Costs
from schedtrace.target import Bill

COSTS = Costs({True: 1_000.0, False: 15_000.0}, program_ns=200.0)
PLAN: Any = cast(Any, SimpleNamespace(probes=[SimpleNamespace(emulated=True), SimpleNamespace(emulated=False)]))


@pytest.mark.parametrize(
    ("timed", "cold_ns"),
    [
        ((300 * 50, 50), 400),
        ((180 * 50, 50), -80),
        ((100 * 50, 50), -250),  # the trap is not without cost however short the program
        ((2_000 * 50, 50), 2_000),
        ((300 * 29, 29), 0),  # too few to tell
    ],
)
def test_a_hit_takes_four_times_as_much_longer_as_the_programs(timed: tuple[int, int], cold_ns: float) -> None:
    bill = Bill()
    bill.add(PLAN, [10, 2], timed, COSTS)
    assert bill.ns == pytest.approx(10 * (1_000 + cold_ns) + 2 * (15_000 + cold_ns))
    assert bill.cold_ns == cold_ns


def test_hits_are_charged_once_each_as_it_was_when_they_were_counted() -> None:
    bill = Bill(cold_ns=500)
    bill.add(PLAN, [10, 0], (0, 0), COSTS)
    assert bill.ns == pytest.approx(15_000)
    bill.add(PLAN, [20, 0], (40 * 400, 40), COSTS)
    assert bill.ns == pytest.approx(15_000 + 18_000)
    bill.add(PLAN, [20, 0], (40 * 400, 40), COSTS)
    assert bill.ns == pytest.approx(15_000 + 18_000)


def test_where_it_is_not_known_how_long_programs_take_a_hit_costs_what_it_costs_anywhere() -> None:
    bill = Bill()
    bill.add(PLAN, [3, 1], (300 * 50, 50), Costs({True: 2_000.0, False: 15_000.0}))
    assert bill.ns == pytest.approx(3 * 2_000 + 15_000)
