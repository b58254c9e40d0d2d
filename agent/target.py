"""A plan made fit for one process: the record that the BPF programs keep of it, and what its hits cost."""

from __future__ import annotations

import os
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass

from schedtrace import abi, calibrate
from schedtrace.bpf_text import program_of
from schedtrace.calibrate import FEWEST_TIMED, Calibration, Costs
from schedtrace.errors import AttachFailed
from schedtrace.plan import ProbePlan
from schedtrace.procfs import Process
from schedtrace.reasons import running_reasons, target_record
from schedtrace.runtime_plan import GOROUTINE_OF_THREAD
from schedtrace.session import ANCHOR, ProbeSite, Session

_STALE_REASONS_UNTIL = 19  # Go 1.19
_CALIBRATED = {
    "casgstatus": calibrate.CASGSTATUS,
    "functions": calibrate.FUNCTIONS,
    "record": calibrate.RECORDS,
}
"""Mode of a plan -> what is measured for the cost of its hits."""
_ANY_REASON = (1 << 64) - 1


def programs_of(plan: ProbePlan) -> set[str]:
    """What a session needs to attach the plan's probes and measure what a hit costs."""
    return {program_of(kind) for kind in (*(probe.kind for probe in plan.probes), *_CALIBRATED[plan.mode])}


def sites_of(plan: ProbePlan) -> list[ProbeSite]:
    """Where the plan's probes go in the file. Raises AttachFailed if they are more than one target can have."""
    if len(plan.probes) >= abi.SITE_LIMIT:
        raise AttachFailed(
            f"{len(plan.probes)} probes are more than the {abi.SITE_LIMIT - 1} that one target can have"
        )
    sites = [ProbeSite(program_of(probe.kind), probe.file_offset) for probe in plan.probes]
    return [ProbeSite(ANCHOR, plan.anchor), *sites]


def record_of(plan: ProbePlan, load_bias: int) -> abi.Target:
    """The BPF side's record of a process that runs the plan's binary at ``load_bias``, but for its slot and start."""
    layout = plan.layout
    record = target_record(
        layout.offsets if layout else {},
        reasons_of(plan),
        stale_reasons=bool(layout and layout.minor <= _STALE_REASONS_UNTIL),
    )
    if not isinstance(plan.stops, str):
        record.stop_reasons, record.start_told = len(plan.stops.reasons), plan.stops.start_told
    for i, probe in enumerate(plan.probes):
        record.sites[i] = load_bias + probe.vaddr
        record.kinds[i] = probe.kind
    return record


def sampler_of(plan: ProbePlan, load_bias: int) -> abi.Sampler | None:
    """What the BPF side must know for the sampled level, if the plan has its probe."""
    sampled, layout = plan.sampled, plan.layout
    if sampled is None or layout is None or all(probe.kind is not abi.ProbeKind.RECORD for probe in plan.probes):
        return None
    sampler = abi.Sampler(
        g_m=layout.offsets["g.m"],
        m_curg=layout.offsets["m.curg"],
        g_status=layout.offsets["g.atomicstatus"],
        g_pc=layout.offsets["g.sched.pc"],
        mcall=load_bias + sampled.mcall_vaddr,
        other_place=sampled.other_place,
    )
    for duration, vaddr in sampled.histograms.items():
        sampler.histograms[duration] = load_bias + vaddr
    for i, (vaddr, place) in enumerate(sampled.stops):
        sampler.stops[i], sampler.places[i] = load_bias + vaddr, place
    return sampler


def stops_of(plan: ProbePlan) -> set[abi.Duration]:
    """Which stops of the world the sampled level sees."""
    return set(plan.sampled.histograms) - {abi.Duration.RUN} if plan.sampled else set()


def process_of(process: Process, plan: ProbePlan, load_bias: int, *, by_function: bool) -> abi.Process:
    """The BPF side's record of a process whose threads are watched: which goroutine one runs can be told if the plan
    says where the list of threads is. ``by_function``: whether also to count by start function."""
    runtime = plan.runtime
    if isinstance(runtime, str) or runtime.allm_vaddr is None:
        return abi.Process()
    device = os.stat("/proc/self/ns/pid").st_dev  # noqa: PTH116 (of all namespaces)
    record = abi.Process(
        allm=load_bias + runtime.allm_vaddr,
        running_reasons=_ANY_REASON if runtime.minor <= _STALE_REASONS_UNTIL else running_reasons(reasons_of(plan)),
        pid_namespace=process.namespaces.pid,
        pid_namespace_device=os.major(device) << 20 | os.minor(device),
        by_function=by_function,
    )
    for field in GOROUTINE_OF_THREAD:
        setattr(record, field.replace(".", "_"), runtime.offsets[field])
    return record


def reasons_of(plan: ProbePlan) -> tuple[str, ...]:
    """Names of wait reasons by number; empty if not known."""
    return plan.layout.wait_reasons if plan.layout else ()


def calibration(session: Session, modes: Sequence[str], emulated: Collection[bool]) -> Calibration | None:
    """Measures what a hit costs, with the kinds of probes that plans of these ``modes`` have ("record" only as the
    last); None if that can't be done. The session needs room for one more target."""
    with suppress(AttachFailed, OSError):
        return Calibration(session, [_CALIBRATED[mode] for mode in modes], emulated)
    return None


SWITCH_PARTS: Mapping[bool, float] = {True: 0.55, False: 0.25}
"""What the programs on the scheduler's tracepoints add to a switch of a watched thread, as a part of a hit's cost, by
whether it is looked which goroutine the thread runs: estimates, see bench/switch_cost.py."""
_UNKNOWN = Costs({True: 2_000.0, False: 15_000.0})
"""Taken for the cost of a hit where it can't be measured: more than on any machine tried."""

COLD_TRAP = 4.0
"""Where caches are cold a hit takes so many times as much longer as the program alone, whichever program it is: an
estimate, see bench/hit_cost.py."""
_LEAST_COLD, _MOST_COLD = -0.25, 2.0
"""Of a hit's cost; less and more than on any target tried: then the programs had other things to do, and it isn't the
caches. Less: where a hit's cost is measured something else may be running on the same core."""


def costs_of(calibration: Calibration | None, plan: ProbePlan) -> Costs:
    """What a hit of the plan's probes costs now; more than it does, if it can't be measured."""
    return calibration.costs(_CALIBRATED[plan.mode]) if calibration else _UNKNOWN


@dataclass
class Bill:
    """What its hits have cost a target, ``ns`` of CPU time: each what one cost when it was counted. An estimate.
    ``agent_ns``: its share of what this process spent on putting its probes in and taking them out. ``cold_ns``: one
    costs so much more than where that is measured, or less; to begin with what is to be expected."""

    ns: float = 0.0
    agent_ns: float = 0.0
    cold_ns: float = 0.0
    _hits: Sequence[int] = ()

    def add(self, plan: ProbePlan, hits: Sequence[int], timed: tuple[int, int], costs: Costs) -> None:
        """``hits``: all so far, by site; ``timed``: how long the programs took, in ns, at some of them, and at how
        many."""
        timed_ns, count = timed
        if costs.program_ns and count >= FEWEST_TIMED:
            cold_ns = COLD_TRAP * (timed_ns / count - costs.program_ns)
            hit_ns = min(costs.hit_ns.values())
            self.cold_ns = min(max(cold_ns, _LEAST_COLD * hit_ns), _MOST_COLD * hit_ns)
        before = self._hits or [0] * len(hits)
        for probe, now, then in zip(plan.probes, hits, before, strict=False):
            self.ns += (now - then) * (costs.hit_ns[probe.emulated] + self.cold_ns)
        self._hits = hits
