"""Counts are exact: a ping-pong whose parks, readies and runs are known by construction, seen from outside."""

from pathlib import Path

import pytest

from schedtrace.attach import Watch
from schedtrace.plan import make_plan
from schedtrace.window import FunctionTotals, Window
from tests.workload import Workload, binary
from tools import pgo, toolchains

ROUND_TRIPS = 100_003
VERSIONS = tuple(toolchains.RELEASES)
PGO_VERSIONS = ("1.22", "1.24", "1.27")
# The workload's own; all others (main.main, the runtime's) are told apart by their start function.
WORKLOAD = ("main.ping", "main.pong")


def _watch_pingpong(program: Path, *, syscalls: bool = False) -> Window:
    with Workload(program, "-n", ROUND_TRIPS) as target, Watch(target.pid, syscalls=syscalls) as watch:
        target.go()
        facts = target.done()
        assert facts["n"] == ROUND_TRIPS
        watch.stop()
        return watch.window()


def _only(window: Window) -> list[FunctionTotals]:
    return [f for f in window.functions if f.function in WORKLOAD]


def _assert_exact(window: Window) -> None:
    functions = _only(window)
    assert sorted(f.function for f in functions) == sorted(WORKLOAD)
    assert [f.created for f in functions] == [1, 1]
    assert [f.exits for f in functions] == [1, 1]
    assert sum(f.parks for f in functions) == 2 * ROUND_TRIPS
    assert sum(f.readies for f in functions) == 2 * ROUND_TRIPS
    # a run follows every way of becoming runnable: being readied, being new, preemption and yielding
    for f in functions:
        assert f.runs == f.readies + f.created + f.preempted + f.yielded, f
    assert window.lost.get("inconsistent_state", 0) == 0
    # thread_switch_unseen is about threads, and depends on the kernel and on who else traces it
    assert set(window.lost) <= {"interval_began_before_window", "thread_switch_unseen"}
    # every other goroutine is named
    assert all(
        f.function.startswith(("main.", "runtime.", "os/signal.", "runtime/")) for f in window.functions
    ), [f.function for f in window.functions]


@pytest.mark.parametrize("strip", [False, True], ids=["plain", "stripped"])
@pytest.mark.parametrize("version", VERSIONS)
def test_pingpong(version: str, strip: bool) -> None:
    window = _watch_pingpong(binary("pingpong", version, strip=strip))
    assert window.target.symbols == ("pclntab" if strip else "symtab")
    _assert_exact(window)


@pytest.mark.parametrize("version", VERSIONS)
def test_pingpong_with_system_calls(version: str) -> None:
    _assert_exact(_watch_pingpong(binary("pingpong", version), syscalls=True))


@pytest.mark.parametrize("strip", [False, True], ids=["plain", "stripped"])
@pytest.mark.parametrize("version", PGO_VERSIONS)
def test_pingpong_built_with_a_profile_that_inlines_casgstatus(version: str, strip: bool) -> None:
    program = pgo.build_pgo(version, strip=strip)
    window = _watch_pingpong(program)
    assert window.target.mode == "functions"
    assert "copied casgstatus" in make_plan(str(program)).mode_reason
    _assert_exact(window)
