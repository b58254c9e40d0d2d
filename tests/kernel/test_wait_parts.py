"""What goroutines wait for that wait to run, against an account made of single events (tests/sched_events.py).

The account has all waits of each thread for a CPU, the programs the last four: what they can't know they must say.
"""

from contextlib import ExitStack
from dataclasses import replace

import pytest

from schedtrace import abi, join, target
from schedtrace.attach import Watch
from schedtrace.compilation import Compilation, Sizes
from schedtrace.plan import make_plan
from schedtrace.procfs import open_process
from schedtrace.session import Session
from schedtrace.window import WaitParts
from tests.sched_events import WaitsToRun, sched_events
from tests.workload import Workload, binary

TOLERANCE = 0.05
ATTEMPTS = 3
SECONDS = 1.0


def watched(version: str, neighbours: int) -> tuple[WaitParts, WaitsToRun]:
    """The same work, as the full level divides its waits and as single events tell them."""
    program = binary("mixed", version)
    with ExitStack() as stack:
        beside(stack, neighbours)
        events = stack.enter_context(sched_events(program, version))
        workload = stack.enter_context(Workload(program, "-duration", f"{SECONDS}s"))
        watch = stack.enter_context(Watch(workload.pid))
        workload.run()
        watch.stop()
        events.stop()
        parts = watch.window().wait_parts
        assert parts is not None
        return parts, events.waits_to_run()


def beside(stack: ExitStack, neighbours: int) -> None:
    """Keep the CPUs busy with so many threads."""
    if neighbours:
        workload = Workload(binary("spinners"), "-threads", neighbours, "-duration", "60s")
        stack.enter_context(workload).go()


@pytest.mark.parametrize("version", ["1.24", "1.27"])
@pytest.mark.parametrize("neighbours", [0, 4])
def test_the_kernels_share(version: str, neighbours: int) -> None:
    found = []
    for _ in range(ATTEMPTS):  # the kernel may have kept events from one of the two
        parts, truth = watched(version, neighbours)
        found.append((parts, truth))
        few_ns = TOLERANCE * truth.total_ns
        # What isn't known is a part of either.
        agrees = truth.kernel_ns - few_ns - parts.undivided_ns <= parts.kernel_ns <= truth.kernel_ns + few_ns
        if agrees and parts.total_ns == pytest.approx(truth.total_ns, rel=TOLERANCE):
            break
    else:
        pytest.fail(f"counted and expected: {found}")
    assert truth.times > 5_000
    assert parts.undivided_ns < 0.3 * parts.total_ns
    if neighbours:
        assert parts.kernel_ns > 0.1 * parts.total_ns
    assert parts.stopped_ns is None


@pytest.mark.parametrize("neighbours", [0, 4])
def test_a_sample_is_divided_as_the_whole(neighbours: int) -> None:
    """Both levels' probes in one process: the same waits, of which one sees a part, and the other no stops."""
    plan = make_plan(str(binary("mixed")))
    plan = replace(plan, probes=(*plan.probes, *plan.at_sampled_level().probes))
    with ExitStack() as stack:
        beside(stack, neighbours)
        workload = stack.enter_context(Workload(binary("mixed"), "-duration", "2s", "-gc"))
        process = stack.enter_context(open_process(workload.pid))
        session = stack.enter_context(Session(Compilation(Sizes(targets=2)), target.programs_of(plan)))
        with open(process.exe_path, "rb") as executable:  # noqa: PTH123 (opened as the session wants it)
            session.attach(executable.fileno(), target.sites_of(plan))
        bias = process.load_bias()
        session.threads.watch(process.pid, abi.Process())
        session.watch(process.pid, target.record_of(plan, bias), sampler=target.sampler_of(plan, bias))
        workload.run()
        session.unwatch(process.pid)
        snapshot = session.snapshot(process.pid)
    whole = join.counts(snapshot, target.reasons_of(plan), None).wait_parts
    samples = join.samples(snapshot.samples, target.stops_of(plan))
    sample = samples.parts
    assert sample.total_ns == samples.sched_latency_total.sum_ns > 0
    assert sample.stopped_ns is not None
    assert 0 < sample.stopped_ns < sum(h.sum_ns for h in samples.stop_the_world.values()) * 100
    for part in ("kernel_ns", "undivided_ns"):
        shares = [getattr(parts, part) / parts.total_ns for parts in (sample, whole)]
        assert shares[0] == pytest.approx(shares[1], abs=0.12), part


def test_threads_that_are_not_watched() -> None:
    """Then nothing is known of any wait, and that is what is said."""
    plan = make_plan(str(binary("mixed"))).at_sampled_level()
    with ExitStack() as stack:
        workload = stack.enter_context(Workload(binary("mixed"), "-duration", "500ms"))
        process = stack.enter_context(open_process(workload.pid))
        session = stack.enter_context(Session(Compilation(Sizes(targets=2)), target.programs_of(plan)))
        with open(process.exe_path, "rb") as executable:  # noqa: PTH123 (opened as the session wants it)
            session.attach(executable.fileno(), target.sites_of(plan))
        bias = process.load_bias()
        session.watch(process.pid, target.record_of(plan, bias), sampler=target.sampler_of(plan, bias))
        workload.run()
        parts = join.samples(session.snapshot(process.pid).samples, target.stops_of(plan)).parts
    assert parts.undivided_ns == parts.total_ns > 0
    assert (parts.kernel_ns, parts.stopped_ns, parts.queue_ns) == (0, 0, 0)
