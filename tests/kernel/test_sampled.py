"""The sampled level against the runtime's own histograms, which are fed by the same calls, and against the full level.

The runtime's histograms are read from its memory (passive.py, tested on its own) right before and after the level's
window: they must have grown by exactly what was seen. Its buckets are finer than ours, and their bounds are others; so
of each of our bounds it is known how many times were certainly below, and how many may have been.
"""

import json
import os
import time
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest

from schedtrace import compilation, join, session, target
from schedtrace.abi import StopPlace, WakeCause
from schedtrace.attach import Watch
from schedtrace.bpf_text import source_text
from schedtrace.compilation import Compilation, Sizes
from schedtrace.errors import NotTraceable
from schedtrace.histogram import Histogram
from schedtrace.passive import PassiveReader
from schedtrace.plan import ProbePlan, make_plan
from schedtrace.procfs import Process, open_process
from schedtrace.runtime_histogram import RuntimeHistogram
from schedtrace.runtime_state import RuntimeState
from schedtrace.session import Session
from schedtrace.window import CAUSES, Samples, Window
from tests import servers
from tests.command import one_line_error, run
from tests.runtime_plans import make_runtime_plan
from tests.workload import GOLANG, Workload, binary
from tools import pgo, toolchains

VERSIONS = tuple(version for version in toolchains.RELEASES if toolchains.minor(version) >= 20)
EXTERNAL = ("-linkmode", "external")
FORMS: Mapping[str, Mapping[str, Any]] = {
    "stripped": {"strip": True},
    "pie": {"buildmode": "pie"},
    "stripped pie": {"buildmode": "pie", "strip": True},
    "stripped cgo pie": {"buildmode": "pie", "cgo": True, "ldflags": EXTERNAL, "strip": True},
    "static pie": {"buildmode": "pie", "cgo": True, "ldflags": (*EXTERNAL, "-extldflags", "-static-pie")},
}
ATTEMPTS = 50
SAMPLED = 8  # gTrackingPeriod
SHORTEST_NS = 64  # the runtime's lowest bucket ends there


@contextmanager
def probed(process: Process, plan: ProbePlan) -> Iterator[Session]:
    """A session with the plan's probes in the process's executable."""
    executable_fd = process.open_executable()
    try:
        with Session(Compilation(Sizes(targets=2)), target.programs_of(plan)) as made:
            made.attach(executable_fd, target.sites_of(plan))
            yield made
    finally:
        os.close(executable_fd)


@dataclass(frozen=True)
class Both:
    """What the level saw, and what the runtime counted before and after."""

    samples: Samples
    before: RuntimeState
    after: RuntimeState
    lost: Mapping[str, int]


def at_rest(reader: PassiveReader, action: Any) -> RuntimeState:
    """Do something while the runtime records nothing, else do it again; what it has recorded until then."""
    for _ in range(ATTEMPTS):
        before = reader.read()
        action()
        after = reader.read()
        assert before is not None
        assert after is not None
        if (before.sched_latency, before.stop_the_world) == (after.sched_latency, after.stop_the_world):
            return after
    pytest.fail("it never rests")


def observe(program: Path, *arguments: object) -> Both:
    """The introspect workload's whole work."""
    plan = make_plan(str(program)).at_sampled_level()
    with (
        Workload(program, *arguments) as workload,
        open_process(workload.pid) as process,
        probed(process, plan) as made,
    ):
        bias, pid = process.load_bias(), process.pid
        reader = PassiveReader(process, make_runtime_plan(process.exe_path), bias)

        def begin() -> None:
            if made.counts(pid):
                made.retire([pid])
            made.watch(pid, target.record_of(plan, bias), sampler=target.sampler_of(plan, bias))

        before = at_rest(reader, begin)
        workload.run()
        # From here on it waits for a word; what it counts is read while it is counted on, at one moment.
        snapshots: list[Any] = []
        after = at_rest(reader, lambda: snapshots.append(made.snapshot(pid)))
        counted = snapshots[-1]
        lost = join.counts(counted, (), None).lost
        return Both(join.samples(counted.samples, target.stops_of(plan)), before, after, lost)


def grown(now: RuntimeHistogram, before: RuntimeHistogram) -> list[tuple[int, int, int]]:
    """(lower bound, upper bound, by how much) in ns of each bucket that has."""
    assert (now.underflow, now.overflow) == (before.underflow, before.overflow)
    differences = [a - b for a, b in zip(now.counts, before.counts, strict=True)]
    bounds = now.bounds_ns
    return [(bounds[i], bounds[i + 1], n) for i, n in enumerate(differences) if n]


def check_same(ours: Histogram, theirs: list[tuple[int, int, int]]) -> None:
    assert ours.count == sum(n for _, _, n in theirs)
    below = 0
    for slot, n in enumerate(ours.slots[:-1]):
        below += n
        bound = 1000 << slot
        certain = sum(n for _, upper, n in theirs if upper - 1 <= bound)
        possible = sum(n for lower, _, n in theirs if lower <= bound)
        assert certain <= below <= possible, bound
    assert sum(n * lower for lower, _, n in theirs) <= ours.sum_ns <= sum(n * (upper - 1) for _, upper, n in theirs)
    if theirs:
        assert theirs[-1][0] <= ours.max_ns < theirs[-1][1]
    else:
        assert ours == Histogram()


def check(both: Both) -> None:
    assert both.lost.keys() <= {"thread_switch_unseen", "interval_began_before_window"}
    samples = both.samples
    latencies = grown(both.after.sched_latency, both.before.sched_latency)
    of_no_length = [(0, 1, samples.no_wait)] if samples.no_wait else []
    # What the runtime has in its lowest bucket are those of no length, and ours that are shorter than its bound.
    lowest = [n for lower, _, n in latencies if lower == 0]
    assert samples.no_wait <= sum(lowest)
    shorter = sum(lowest) - samples.no_wait
    others = [(0, SHORTEST_NS, shorter)] if shorter else []
    check_same(samples.sched_latency_total, [*others, *(bucket for bucket in latencies if bucket[0])])
    assert sum(n for _, _, n in of_no_length) + samples.sched_latency_total.count == sum(n for _, _, n in latencies)
    assert samples.sched_latency_total.count > 100
    assert set(samples.stop_the_world) == set(both.after.stop_the_world)
    for name, histogram in samples.stop_the_world.items():
        check_same(histogram, grown(both.after.stop_the_world[name], both.before.stop_the_world[name]))
        assert histogram.count >= 3


@pytest.mark.parametrize("version", VERSIONS)
def test_every_sample_and_stop_of_every_version(version: str) -> None:
    check(observe(binary("introspect", version)))


@pytest.mark.parametrize("form", FORMS)
def test_every_form(form: str) -> None:
    check(observe(binary("introspect", **FORMS[form])))


def test_compiled_with_a_profile() -> None:
    profile = pgo.scheduler_profile("1.24")
    program = toolchains.build("1.24", GOLANG / "introspect", out_name="introspect-pgo", pgo=profile)
    check(observe(program))


# In a window


def opened(made: Session, process: Process, plan: ProbePlan, seconds: float, hits: int) -> session.Window:
    executable_fd = process.open_executable()
    try:
        window = made.open_window(executable_fd, target.sites_of(plan), int(seconds * 1e9))
    finally:
        os.close(executable_fd)
    bias = process.load_bias()
    record, sampler = target.record_of(plan, bias), target.sampler_of(plan, bias)
    made.watch(process.pid, record, window, hits, sampler=sampler, time_before=False)
    return window


def test_windows() -> None:
    """One probe for a while, as with the full level's; and nothing of one window in the next."""
    plan = make_plan(str(binary("mixed"))).at_sampled_level()
    with (
        Workload(binary("mixed"), "-duration", "60s", "-gc") as workload,
        open_process(workload.pid) as process,
        Session(Compilation(Sizes(targets=2)), target.programs_of(plan)) as made,
    ):
        workload.go()
        counted = []
        for seconds, limit in ((0.3, 10**9), (0.3, 10**9), (30.0, 500)):
            window = opened(made, process, plan, seconds, limit)
            deadline = time.monotonic() + 10
            while window.number in made.probed_windows():
                assert time.monotonic() < deadline
                time.sleep(0.01)
            assert (made.end_of(window) < window.until_ns) == (limit == 500)
            snapshot = made.retire([process.pid])[process.pid]
            made.free_window(window)
            samples = join.samples(snapshot.samples, target.stops_of(plan))
            hits = int(snapshot.stats["hits"].sum())
            stops = sum(histogram.count for histogram in samples.stop_the_world.values())
            # Hits between the window's end and that of the breakpoint are hits and count for nothing.
            assert hits - 2_000 <= samples.sched_latency_total.count + samples.no_wait + stops <= hits
            counted.append(samples.sched_latency_total.count)
    assert min(counted[:2]) > 100
    assert 300 < counted[2] < 500 + 16 * (os.cpu_count() or 1)


# Beside the full level


@dataclass(frozen=True)
class SideBySide:
    """What both levels saw of the same work: the probes of both were in."""

    samples: Samples
    counts: join.Counts
    hits_full: int
    hits_sampled: int
    agreed: Mapping[tuple[str, str], int]
    """(Cause of a sample, cause that the full level has for the same run): how often."""


COMPARED = """
BPF_HASH(agreed, __u32, __u64, 1024);
"""
SAMPLE = "static __always_inline void sample("
COMPARE = """
	{
		struct goroutine_key key = { .g = about_to_run(hit, sampler, GO_CURRENT_G(ctx)), .tgid = hit->tgid };
		struct goroutine *known = goroutines.lookup(&key);
		__u32 pair = cause * 16 + (known && known->state == STATE_RUNNING ? known->cause : 15);
		__u64 none = 0, *times = agreed.lookup_or_try_init(&pair, &none);

		if (times)
			add(times, 1);
	}
	record(latency, ns);
"""


def comparing_text() -> str:
    """The programs, with the sampled level's looking up what the full level's state machine knows of the same run."""
    text, place = source_text(), "\trecord(latency, ns);\n"
    assert text.count(place) == 1
    return text.replace(place, COMPARE).replace(SAMPLE, COMPARED + SAMPLE)


def without_yields(plan: ProbePlan) -> ProbePlan:
    """As in a program with more of them than the list has room for."""
    sampled = plan.sampled
    assert sampled is not None
    stops = tuple(stop for stop in sampled.stops if stop[1] is not StopPlace.YIELD)
    assert 0 < len(stops) < len(sampled.stops)
    return replace(plan, sampled=replace(sampled, stops=stops, other_place=StopPlace.YIELD))


def beside_full(
    version: str, monkeypatch: pytest.MonkeyPatch, *arguments: object, few_listed: bool = False
) -> SideBySide:
    monkeypatch.setattr(compilation, "source_text", comparing_text)
    program = binary("mixed", version)
    full = make_plan(str(program))
    plan = replace(full, probes=(*full.probes, *full.at_sampled_level().probes))
    plan = without_yields(plan) if few_listed else plan
    with (
        Workload(program, "-duration", "2s", *arguments) as workload,
        open_process(workload.pid) as process,
        probed(process, plan) as made,
    ):
        bias = process.load_bias()
        made.watch(process.pid, target.record_of(plan, bias), sampler=target.sampler_of(plan, bias))
        workload.run()
        made.unwatch(process.pid)
        snapshot = made.snapshot(process.pid)
        pairs = {int(key.value): int(times.value) for key, times in made._table("agreed").items()}
    counts = join.counts(snapshot, target.reasons_of(plan), None)
    names = {**dict(enumerate(CAUSES)), 15: "not followed"}
    agreed = {(names[pair // 16], names[pair % 16]): n for pair, n in pairs.items()}
    hits = counts.hits[: len(plan.probes)]
    return SideBySide(
        join.samples(snapshot.samples, target.stops_of(plan)), counts, sum(hits[:-1]), hits[-1], agreed
    )


@pytest.mark.parametrize("few_listed", [False, True], ids=["listed", "unlisted"])
@pytest.mark.parametrize("version", VERSIONS)
def test_each_sample_has_the_cause_that_the_full_level_finds(
    version: str, few_listed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen = beside_full(version, monkeypatch, "-gc", "-syscalls", few_listed=few_listed)
    assert sum(seen.agreed.values()) == seen.samples.sched_latency_total.count > 1_000
    differing = {pair: n for pair, n in seen.agreed.items() if pair[0] != pair[1]}
    # A request to stop that was meant for the goroutine before: stopped all the same, and a yield to the full level.
    # And one that comes, or is taken back, between the two looks at the flag, at a goroutine that yields.
    allowed = {("preempted", "yielded"), ("yielded", "preempted")}
    assert set(differing) <= allowed, differing
    assert sum(differing.values()) <= 0.01 * seen.samples.sched_latency_total.count
    causes = Counter({cause: h.count for cause, h in seen.samples.sched_latency.items()})
    wanted = {"new", "yielded", "channel", "select", "mutex/semaphore", "network", "timer/sleep"}
    assert wanted <= set(causes)
    assert "unknown" not in causes


@pytest.mark.parametrize("version", VERSIONS)
def test_the_sample_is_like_the_whole(version: str, monkeypatch: pytest.MonkeyPatch) -> None:
    seen = beside_full(version, monkeypatch, "-gc")
    whole, sample = _total(seen.counts.sched_latency), seen.samples.sched_latency_total
    for q in (0.5, 0.9, 0.99):
        assert abs(_slot(whole, q) - _slot(sample, q)) <= 1, q
    for cause in ("yielded", "channel", "mutex/semaphore", "network", "timer/sleep"):
        ours, all_ = seen.samples.sched_latency[cause], seen.counts.sched_latency[cause]
        for q in (0.5, 0.9):
            assert abs(_slot(all_, q) - _slot(ours, q)) <= 1, (cause, q)
        # One in eight of each goroutine's runs: of long-lived ones, who make all of these. Up to Go 1.25 system calls
        # take part: a goroutine that makes one or two for each wait for the network is always caught at the same step.
        if cause != "network" or toolchains.minor(version) >= 26:
            assert ours.count * SAMPLED == pytest.approx(all_.count, rel=0.1), cause
    # A g that has ended a life while tracked begins the next one so: 1/8 + 7/8 * 1/8 of those.
    new, created = seen.samples.sched_latency["new"].count, seen.counts.sched_latency["new"].count
    assert 1 / SAMPLED < new / created < 0.25
    assert seen.hits_sampled * 12 <= seen.hits_full


def _total(histograms: Mapping[str, Histogram]) -> Histogram:
    whole = Histogram()
    for histogram in histograms.values():
        whole += histogram
    return whole


def _slot(histogram: Histogram, q: float) -> int:
    """The power-of-two bucket that holds the quantile."""
    rank, below = q * histogram.count, 0
    for slot, n in enumerate(histogram.slots):
        below += n
        if below >= rank:
            return slot
    raise ValueError("a quantile of nothing")


def test_hits_of_a_web_server(tmp_path: Path) -> None:
    hits, answered = {}, {}
    with servers.started("net/http", tmp_path) as server:
        for level in ("sampled", "full"):
            with Watch(server.pid, level=level) as watch:
                answered[level] = server.load(2.0)
                watch.stop()
                window = watch.window()
            hits[level] = sum(probe.hits for probe in window.probes)
            assert window.lost.keys() <= {"thread_switch_unseen", "interval_began_before_window"}
    assert min(answered.values()) > 100
    assert 0 < hits["sampled"] / answered["sampled"] <= hits["full"] / answered["full"] / 12


# The command


def watched(level: str, version: str = "1.27") -> Window:
    with Workload(binary("mixed", version), "-duration", "700ms", "-gc") as workload, Watch(
        workload.pid, level=level
    ) as watch:
        workload.run()
        watch.stop()
        return watch.window()


def test_watch_at_the_sampled_level() -> None:
    window = watched("sampled")
    assert (window.target.level, window.target.mode) == ("sampled", "record")
    assert window.samples is not None
    assert window.sched_latency_total == window.samples.sched_latency_total
    assert window.sched_latency_total.count > 100
    assert not any((window.transitions, window.states, window.functions, window.wait, window.goroutines))
    (probe,) = window.probes
    stops = sum(histogram.count for histogram in window.samples.stop_the_world.values())
    assert probe.hits == window.sched_latency_total.count + window.samples.no_wait + stops
    assert window.overhead_ns is not None
    assert 200 < window.overhead_ns / probe.hits < 50_000
    assert watched("full").samples is None


def test_command() -> None:
    with Workload(binary("mixed"), "-duration", "300s", "-gc") as workload:
        workload.go()
        shown = run("attach", workload.pid, "--level", "sampled", "--duration", 1)
        done = run("attach", workload.pid, "--level", "sampled", "--duration", 1, "--json")
        listed = json.loads(run("list", "--json").stdout)
    assert shown.returncode == done.returncode == 0, (shown, done)
    assert "Goroutines waiting to run, a sample" in shown.stdout
    result = json.loads(done.stdout)
    assert result["target"]["level"] == "sampled"
    assert result["samples"]["sched_latency"]["count"] > 100
    assert result["transitions"] is None
    (process,) = [one for one in listed["processes"] if one["pid"] == workload.pid]
    assert (process["level"], process["levels"]) == ("full", ["sampled", "full"])


def test_refusals() -> None:
    with Workload(binary("hello", "1.19")) as old:
        said = one_line_error(run("attach", old.pid, "--level", "sampled"), NotTraceable.exit_code)
        assert "the sampled level is not possible: up to Go 1.19" in said
        assert said.endswith("use --level full")
        listed = json.loads(run("list", "--json").stdout)
    (process,) = [one for one in listed["processes"] if one["pid"] == old.pid]
    assert (process["levels"], process["sampled_obstacle"][:11]) == (["full"], "up to Go 1.")
    with Workload(pgo.build_pgo("1.27"), "-n", 10) as guided:
        said = one_line_error(run("attach", guided.pid, "--level", "sampled"), NotTraceable.exit_code)
        assert "the compiler copied runtime.(*timeHistogram).record into runtime.casgstatus" in said
    said = one_line_error(run("attach", 1, "--level", "sampled", "--syscalls"), 2)
    assert "--syscalls needs --level full" in said


def test_causes_are_named() -> None:
    assert len(CAUSES) == WakeCause.COUNT
