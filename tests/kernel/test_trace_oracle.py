"""Transitions seen from outside against Go's own execution trace of the same work.

All of the workload's goroutines (their start functions are main's) begin and end while both the trace and the
window are open, so for each of those functions every count can be compared, and has to be the same. What the
trace tells otherwise:

* goyield (a mutex handed over) is "preempted" in the trace; here it is a yield.
* A goroutine stopped for the scan of its stack (preemptPark) is a park for reason "preempted" in the trace; here
  it is a preemption.
* A Gosched while the runtime asks for a preemption grants it and counts as one here; to the trace it is a Gosched.
* A preemption asked of a goroutine that has just left its P stops the P's next one (p.preempt is set, g.preempt is
  not): preempted in the trace, a yield here.
* A thread that comes back from a system call, has lost its P and finds another one at once goes from syscall to
  runnable to running in the trace. The runtime goes from syscall to running.
* A coroutine switch is one move here: waiting -> running. The trace writes waiting -> runnable -> running.

Goroutines of the runtime, of the trace itself and runtime.main live before or after the trace: they are not
compared, and sums over all goroutines may differ by what they did.
"""

from collections.abc import Mapping
from pathlib import Path

import pytest

from schedtrace.attach import Watch
from schedtrace.window import FunctionTotals, Window
from tests import gotrace
from tests.gotrace import Trace
from tests.workload import Workload, binary
from tools import toolchains

VERSIONS = tuple(version for version in toolchains.RELEASES if toolchains.minor(version) >= 22)
DURATION = "500ms"
# The trace's words for what goroutines wait for -> the runtime's, as far as they may be the workload's.
REASONS: Mapping[str, tuple[str, ...]] = {
    "chan receive": ("chan receive",),
    "chan send": ("chan send",),
    "select": ("select",),
    "sleep": ("sleep",),
    "network": ("IO wait",),
    "sync": ("semacquire", "sync.Mutex.Lock", "sync.WaitGroup.Wait"),
    "GC mark assist wait for work": ("GC assist wait",),
    "GC weak to strong wait": ("GC weak to strong wait",),
}
OF_THE_RUNTIME = {"system goroutine wait", "GC background sweeper wait"}
CAUSES: Mapping[str, tuple[str, ...]] = {
    "channel": ("chan receive", "chan send"),
    "select": ("select",),
    "timer/sleep": ("sleep",),
    "network": ("network",),
    "mutex/semaphore": ("sync",),
    "gc": ("GC mark assist wait for work", "GC weak to strong wait"),
}
SHARE = 0.001  # what may differ at most


def _observe(program: Path, file: Path, *arguments: object, syscalls: bool = False) -> tuple[Window, Trace]:
    """The same work as seen from outside and as its trace tells it."""
    with (
        Workload(program, *arguments, "-trace", file) as target,
        Watch(target.pid, syscalls=syscalls) as watch,
    ):
        target.run()
        watch.stop()
        window = watch.window()
    return window, gotrace.read(file)


def _returns_without_p(totals: FunctionTotals) -> int:
    """Moves to runnable at the end of a system call: what no other way of becoming runnable accounts for."""
    return totals.runs - totals.readies - totals.created - totals.preempted - totals.yielded


def _assert_same_moves(totals: FunctionTotals, trace: Trace, *, syscalls: bool) -> None:
    name = totals.function

    def traced(before: str, after: str) -> int:
        return trace.count(before, after, name)

    stopped = trace.parks[name, "preempted"]
    assert totals.created == traced("NotExist", "Runnable"), name
    assert totals.exits == traced("Running", "NotExist") == totals.created, name
    assert totals.parks == traced("Running", "Waiting") - stopped, name
    assert totals.readies == traced("Waiting", "Runnable") - stopped, name
    assert totals.preempted + totals.yielded == traced("Running", "Runnable") + stopped, name
    assert totals.runs == traced("Runnable", "Running") - trace.other_p[name], name
    assert _returns_without_p(totals) == traced("Syscall", "Runnable") - trace.other_p[name], name
    calls = traced("Running", "Syscall")
    assert totals.syscalls == calls if syscalls else totals.syscalls == 0, name
    assert calls == traced("Syscall", "Running") + traced("Syscall", "Runnable"), name


def _assert_sums_agree(window: Window, syscalls: bool) -> None:
    """Transitions by state are those of the goroutines, by start function."""

    def total(field: str) -> int:
        return sum(getattr(f, field) for f in window.functions)

    def moves(before: str, after: str) -> int:
        return window.transitions.get((before, after), 0)

    returned = sum(_returns_without_p(f) for f in window.functions if f.function.startswith("main."))
    assert moves("dead", "runnable") == total("created")
    assert moves("running", "dead") == total("exits")
    assert moves("running", "waiting") == total("parks")
    assert moves("waiting", "runnable") == total("readies")
    assert moves("runnable", "running") == total("runs")
    left_running = moves("running", "runnable") + moves("preempted", "runnable")
    gave_up = total("preempted") + total("yielded")
    without_p = left_running - gave_up + moves("syscall", "runnable")
    assert without_p == window.sched_latency["syscall"].count if returned else without_p >= 0
    assert moves("running", "preempted") == moves("preempted", "runnable")
    assert moves("running", "syscall") == (total("syscalls") if syscalls else 0)


def _assert_reasons_and_causes(window: Window, trace: Trace, own: set[str], others: int) -> None:
    """Waits by reason and latencies by cause: the workload's exactly, and at most ``others`` of other goroutines."""
    traced = {reason: sum(trace.parks[f, reason] for f in own) for reason in {r for _, r in trace.parks}}
    assert set(traced) - {"preempted"} <= {*REASONS, *OF_THE_RUNTIME}
    for reason, ours in REASONS.items():
        waits = sum(window.wait[r].count for r in ours if r in window.wait)
        assert 0 <= waits - traced.get(reason, 0) <= others, reason
    for cause, reasons in CAUSES.items():
        wakes = window.sched_latency[cause].count if cause in window.sched_latency else 0
        assert 0 <= wakes - sum(traced.get(reason, 0) for reason in reasons) <= others, cause
    new = trace.count("NotExist", "Runnable", *own)
    assert 0 <= window.sched_latency["new"].count - new <= others


def _assert_preemptions(window: Window, trace: Trace, own: list[FunctionTotals]) -> None:
    """Preempted, not yielded: the same but for what the module's docstring says of both."""
    moves = sum(f.preempted + f.yielded for f in window.functions)
    for totals in own:
        more = totals.preempted - trace.preemptions[totals.function] - trace.parks[totals.function, "preempted"]
        assert abs(more) <= 2 + SHARE * moves, totals.function
    assert sum(f.yielded for f in own) > 100


def _assert_times(trace: Trace, own: list[FunctionTotals]) -> None:
    """The time the workload's goroutines were runnable and waiting. Trace and probe look at the clock one after the
    other, and a thread may be off the CPU in between."""
    for field, state in (("runnable_ns", "Runnable"), ("waiting_ns", "Waiting")):
        seen = sum(getattr(f, field) for f in own)
        traced = sum(trace.time_ns[f.function, state] for f in own)
        assert seen == pytest.approx(traced, rel=0.05), state


@pytest.mark.parametrize("syscalls", [False, True], ids=["default", "syscalls"])
@pytest.mark.parametrize("version", VERSIONS)
def test_mixed_work(version: str, syscalls: bool, tmp_path: Path) -> None:
    arguments = ("-duration", DURATION, "-gc", *(("-syscalls",) if syscalls else ()))
    window, trace = _observe(binary("mixed", version), tmp_path / "trace", *arguments, syscalls=syscalls)
    assert window.target.mode == ("casgstatus" if syscalls or toolchains.minor(version) >= 26 else "functions")
    assert set(window.lost) <= {"interval_began_before_window", "thread_switch_unseen"}

    own = [f for f in window.functions if f.function.startswith("main.")]
    names = {f.function for f in own}
    assert names == {name for name in trace.goroutines.values() if name.startswith("main.")}
    assert {"main.sleeper", "main.child", "main.channels.func1", "main.(*echo).accept.func1"} < names
    for totals in own:
        _assert_same_moves(totals, trace, syscalls=syscalls)
    _assert_sums_agree(window, syscalls)
    others = sum(f.runs + f.created for f in window.functions if f.function not in names)
    _assert_reasons_and_causes(window, trace, names, others)
    _assert_preemptions(window, trace, own)
    _assert_times(trace, own)


@pytest.mark.parametrize("version", [v for v in VERSIONS if toolchains.minor(v) >= 23])
def test_coroutines(version: str, tmp_path: Path) -> None:
    window, trace = _observe(binary("coroutines", version), tmp_path / "trace", "-n", 10_007)
    assert set(window.lost) <= {"interval_began_before_window", "thread_switch_unseen"}
    functions = {f.function: f for f in window.functions}
    puller, coroutine = functions["main.puller"], functions["runtime.corostart"]
    assert puller.parks == trace.count("Running", "Waiting", "main.puller") == 10_008
    assert puller.switches == trace.count("Waiting", "Runnable", "main.puller") == 10_008
    assert coroutine.parks == trace.count("Running", "Waiting", "runtime.corostart") == 10_007
    assert coroutine.switches == trace.count("Waiting", "Runnable", "runtime.corostart") == 10_008
    assert coroutine.exits == trace.count("Running", "NotExist", "runtime.corostart") == 1
    for totals in (puller, coroutine):
        switches = totals.switches
        assert totals.runs == trace.count("Runnable", "Running", totals.function) - switches
        assert totals.preempted + totals.yielded == trace.count("Running", "Runnable", totals.function)
