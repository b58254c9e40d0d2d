"""The JSON objects that ``--json`` prints; docs/json.md describes them. Pure.

Times are seconds, numbers are exact where they can be, and what is not known is null. A bound of infinity
is the string "+Inf", since JSON has no such number.
"""

import math
from collections.abc import Mapping, Sequence
from typing import Any

from schedtrace.agent_client import SCHEMA, AgentView
from schedtrace.check import NodeReport
from schedtrace.discovery import GoProcess, Scan
from schedtrace.histogram import Histogram
from schedtrace.plan import ProbePlan
from schedtrace.sampled_plan import SampledPlan
from schedtrace.series import WatchedProcess
from schedtrace.window import FunctionTotals, Samples, Target, WaitParts, Window

Json = dict[str, Any]

_NS = 1e9


def window_json(window: Window) -> Json:
    """The object of ``schedtrace attach --json``."""
    return {
        "schema": "schedtrace.attach/1",
        "target": _target(window.target),
        "window_seconds": window.duration_ns / _NS,
        "ended": window.ended,
        **(_followed(window) if window.samples is None else _NOT_FOLLOWED),
        "samples": None if window.samples is None else _samples(window.samples),
        "threads": {"count": window.threads, "run_queue": window.run_queue and _histogram(window.run_queue)},
        "off_cpu": None
        if window.off_cpu is None
        else {reason: _histogram(h) for reason, h in window.off_cpu.items()},
        "off_cpu_top": [
            {
                "function": f.function,
                "times": f.times,
                "run_queue_seconds": f.run_queue_ns / _NS,
                "blocked_seconds": f.blocked_ns / _NS,
                "max_seconds": f.max_ns / _NS,
            }
            for f in window.off_cpu_functions
        ],
        **(
            {}
            if window.stops is None
            else {"stop_the_world": {reason: _histogram(h) for reason, h in sorted(window.stops.items())}}
        ),
        "throttling": None
        if window.throttling is None
        else {
            "periods": window.throttling.periods,
            "throttled_periods": window.throttling.throttled_periods,
            "throttled_seconds": window.throttling.throttled_ns / _NS,
        },
        "probes": [
            {"function": p.function, "site": p.site, "emulated": p.emulated, "hits": p.hits}
            for p in window.probes
        ],
        "foreign_hits": window.foreign_hits,
        "unseen": list(window.unseen),
        "lost": dict(window.lost),
        "overhead_seconds": None if window.overhead_ns is None else window.overhead_ns / _NS,
    }


_NOT_FOLLOWED: Json = dict.fromkeys(
    ("transitions", "sched_latency", "sched_delay_seconds", "wait", "states", "top", "goroutines")
)


def _followed(window: Window) -> Json:
    """What is known where every goroutine is followed."""
    return {
        "transitions": [
            {"from": old, "to": new, "count": n} for (old, new), n in sorted(window.transitions.items())
        ],
        "sched_latency": _latency(window.sched_latency_total, window.sched_latency),
        "sched_delay_seconds": None if window.wait_parts is None else _parts(window.wait_parts),
        "wait": {reason: _histogram(h) for reason, h in sorted(window.wait.items())},
        "states": [
            {"state": s.state, "reason": s.reason, "seconds": s.time_ns / _NS, "count": s.count}
            for s in window.states
        ],
        "top": [_function(f) for f in sorted(window.functions, key=lambda f: -f.waiting_ns)],
        "goroutines": window.goroutines,
    }


def _samples(samples: Samples) -> Json:
    return {
        "sched_latency": _latency(samples.sched_latency_total, samples.sched_latency),
        "no_wait": samples.no_wait,
        "sched_delay_seconds": _parts(samples.parts),
        "stop_the_world": {name: _histogram(h) for name, h in samples.stop_the_world.items()},
    }


def _parts(parts: WaitParts) -> Json:
    return {
        "go_queue": parts.queue_ns / _NS,
        "kernel_run_queue": parts.kernel_ns / _NS,
        "stop_the_world": None if parts.stopped_ns is None else parts.stopped_ns / _NS,
        "unknown": parts.undivided_ns / _NS,
    }


def _latency(whole: Histogram, by_cause: Mapping[str, Histogram]) -> Json:
    return {**_histogram(whole), "by_cause": {cause: _histogram(h) for cause, h in sorted(by_cause.items())}}


def plan_json(plan: ProbePlan) -> Json:
    """The object of ``schedtrace inspect --json``."""
    layout = plan.layout
    return {
        "schema": "schedtrace.inspect/1",
        "path": plan.path,
        "arch": plan.arch,
        "build_id": plan.build_id,
        "go_version": plan.go_version,
        "settings": dict(plan.settings),
        "symbols": plan.symbols,
        "mode": plan.mode,
        "mode_reason": plan.mode_reason,
        "layout": None
        if layout is None
        else {
            "source": layout.source,
            "offsets": dict(layout.offsets),
            "wait_reasons": list(layout.wait_reasons),
            "wait_reasons_source": layout.wait_reasons_source,
        },
        "probes": [
            {
                "function": p.function,
                "kind": p.kind.name.lower(),
                "vaddr": p.vaddr,
                "file_offset": p.file_offset,
                "site": p.site,
                "emulated": p.emulated,
            }
            for p in plan.probes
        ],
        "anchor": plan.anchor,
        "unseen": list(plan.unseen),
        "notes": list(plan.notes),
        "levels": list(plan.levels),
        "sampled": None if plan.sampled is None else _sampled_plan(plan.sampled),
        "sampled_obstacle": plan.sampled_obstacle,
    }


def _sampled_plan(sampled: SampledPlan) -> Json:
    return {
        "function": sampled.function,
        "vaddr": sampled.site.vaddr,
        "file_offset": sampled.site.file_offset,
        "site": str(sampled.site),
        "emulated": sampled.site.emulated,
        "histograms": {duration.name.lower(): vaddr for duration, vaddr in sampled.histograms.items()},
        "stops": [{"vaddr": vaddr, "place": place.name.lower()} for vaddr, place in sampled.stops],
        "unseen": list(sampled.unseen),
    }


def scan_json(scan: Scan, watched: Mapping[int, AgentView] | None) -> Json:
    """The object of ``schedtrace list --json``. ``watched``: what an agent says, if one was asked."""
    views = {pid: vars(view) for pid, view in (watched or {}).items()}
    return {
        "schema": "schedtrace.list/1",
        "processes": [{**_process(process), "agent": views.get(process.pid)} for process in scan.processes],
        "unreadable": scan.unreadable,
    }


def processes_json(processes: Sequence[WatchedProcess]) -> Json:
    """The object that an agent serves at /processes."""
    return {"schema": SCHEMA, "processes": [_watched(process) for process in processes]}


def _watched(process: WatchedProcess) -> Json:
    totals = process.totals
    return {
        "pid": process.pid,
        "name": process.name,
        "level": process.level,
        "seen_seconds": {level: ns / _NS for level, ns in totals.seen_ns.items()},
        "hits": dict(totals.hits),
        "overhead_seconds": {whose: ns / _NS for whose, ns in totals.overhead_ns.items()},
        "budget_seconds": None if process.budget_ns is None else process.budget_ns / _NS,
    }


def node_json(report: NodeReport) -> Json:
    """The object of ``schedtrace check --json``."""
    return {
        "schema": "schedtrace.check/1",
        "exit_code": report.exit_code,
        "findings": [
            {"name": f.name, "status": f.status, "detail": f.detail, "fix": f.fix} for f in report.findings
        ],
    }


def _target(target: Target) -> Json:
    return {
        "pid": target.pid,
        "exe": target.exe,
        "name": target.name,
        "go_version": target.go_version,
        "level": target.level,
        "mode": target.mode,
        "symbols": target.symbols,
        "cgroup": {
            "path": target.cgroup_path,
            "hierarchy": target.cgroup_hierarchy,
            "id": target.cgroup_id,
            "cpu_quota_cores": target.quota_cores,
        },
    }


def _histogram(histogram: Histogram) -> Json:
    return {
        "count": histogram.count,
        "sum_seconds": histogram.sum_ns / _NS,
        "p50_seconds": histogram.quantile_seconds(0.5),
        "p90_seconds": histogram.quantile_seconds(0.9),
        "p99_seconds": histogram.quantile_seconds(0.99),
        "max_seconds": histogram.max_ns / _NS if histogram.count else None,
        "buckets": [
            {"le": "+Inf" if math.isinf(bound) else bound, "count": n} for bound, n in histogram.buckets()
        ],
    }


def _function(totals: FunctionTotals) -> Json:
    return {
        "function": totals.function,
        "goroutines": totals.goroutines,
        "created": totals.created,
        "exits": totals.exits,
        "parks": totals.parks,
        "readies": totals.readies,
        "runs": totals.runs,
        "preempted": totals.preempted,
        "yielded": totals.yielded,
        "switches": totals.switches,
        "syscalls": totals.syscalls,
        "runnable_seconds": totals.runnable_ns / _NS,
        "running_seconds": totals.running_ns / _NS,
        "waiting_seconds": totals.waiting_ns / _NS,
        "syscall_seconds": totals.syscall_ns / _NS,
        "max_runnable_seconds": totals.max_runnable_ns / _NS,
        "max_waiting_seconds": totals.max_waiting_ns / _NS,
    }


def _process(process: GoProcess) -> Json:
    stat = process.throttling
    return {
        "pid": process.pid,
        "name": process.name,
        "exe": process.exe,
        "go_version": process.go_version,
        "gomaxprocs": process.runtime.gomaxprocs if process.runtime else None,
        "gomaxprocs_environment": process.gomaxprocs_environment,
        "goroutines": process.runtime.goroutines if process.runtime else None,
        "threads": process.threads,
        "cgroup": process.cgroup_path,
        "namespace": process.owner.namespace,
        "pod": process.owner.pod,
        "container": process.owner.container,
        "pod_uid": process.owner.pod_uid,
        "container_id": process.owner.container_id,
        "cpu_quota_cores": process.quota_cores,
        "cpus": None if process.cpus is None else list(process.cpus),
        "memory_limit_bytes": process.memory_limit_bytes,
        "throttled_periods": None if stat is None else stat.throttled_periods,
        "throttled_seconds": None if stat is None else stat.throttled_ns / _NS,
        "level": process.level,
        "levels": list(process.levels),
        "obstacle": process.obstacle,
        "sampled_obstacle": process.sampled_obstacle,
    }
