"""Where recordings probe stops of the world, and what they say where they can't."""

from dataclasses import replace
from pathlib import Path

import pytest

from schedtrace import abi
from schedtrace.plan import ProbePlan, make_plan
from schedtrace.stops_plan import StopsPlan
from schedtrace.target import record_of
from tests.unit.forms import MATRIX, VERSIONS, built
from tests.unit.test_plan import altered, calling
from tests.workload import binary
from tools import pgo

STOP, START = "runtime.stopTheWorldWithSema", "runtime.startTheWorldWithSema"


def reason_not_to(plan: ProbePlan) -> str:
    """Why stops can't be seen: what a recording says. Nothing else changes then."""
    assert isinstance(plan.stops, str)
    recorded = plan.with_stops()
    assert recorded == replace(plan, unseen=recorded.unseen)
    assert recorded.unseen[:-1] == plan.unseen
    assert recorded.unseen[-1] == f"stops of the world: {plan.stops}"
    return plan.stops


@pytest.mark.parametrize(("form", "version"), [*MATRIX, *(("arm64", version) for version in VERSIONS)])
def test_every_version_and_form(form: str, version: str) -> None:
    plan, minor = make_plan(str(built(form, version)), stops=True), int(version[2:])
    recorded = plan.with_stops()
    assert recorded.probes[:-2] == plan.probes
    assert recorded.unseen == plan.unseen
    assert [(p.function, p.kind) for p in recorded.probes[-2:]] == [
        (STOP, abi.ProbeKind.STOP_WORLD),
        (START, abi.ProbeKind.START_WORLD),
    ]
    assert isinstance(plan.stops, StopsPlan)
    assert plan.stops.start_told == (minor >= 23)
    assert plan.stops.reasons[1:3] == (() if minor < 21 else ("GC mark termination", "GC sweep termination"))
    target = record_of(recorded, 0x1000)
    count = len(recorded.probes)
    assert (target.sites[count - 1], target.kinds[count - 1]) == (
        0x1000 + recorded.probes[-1].vaddr, abi.ProbeKind.START_WORLD,
    )  # fmt: skip
    assert (target.stop_reasons, target.start_told) == (17 if minor >= 21 else 0, minor >= 23)


@pytest.mark.parametrize("version", ["1.22", "1.27"])
def test_also_where_a_profile_has_code_copied(version: str) -> None:
    plan = make_plan(str(pgo.build_pgo(version, strip=True)), stops=True)
    assert len(plan.with_stops().probes) == len(plan.probes) + 2


@pytest.mark.parametrize("name", [STOP, START, "runtime.procresize"])
def test_a_function_that_is_not_there(tmp_path: Path, name: str) -> None:
    path = altered(tmp_path, built("stripped", "1.27"), (f"{name}\0".encode(), f"{name[:-1]}z\0".encode()))
    assert reason_not_to(make_plan(path, stops=True)) == f"the compiler left no function {name}"


def test_a_copy_elsewhere_is_noticed(tmp_path: Path) -> None:
    path = calling(tmp_path, built("plain", "1.25"), caller="newproc1", old="casgstatus", new="procresize")
    assert reason_not_to(make_plan(str(path), stops=True)) == f"the compiler copied {START} into runtime.newproc1"


def test_a_version_that_is_not_known(tmp_path: Path) -> None:
    path = altered(tmp_path, built("plain", "1.27"), (b"go1.27.3", b"go1.99.3"))
    assert "not known how it stops the world" in reason_not_to(make_plan(path, stops=True))


def test_more_probes_than_there_can_be() -> None:
    plan = make_plan(str(binary("pingpong", "1.25")), stops=True)
    full = replace(plan, probes=plan.probes * abi.SITE_LIMIT).with_stops()
    assert full.probes == plan.probes * abi.SITE_LIMIT
    assert full.unseen[-1].startswith("stops of the world: with those there would be more than 31 probes")
    assert full.stops == ""
