"""``inspect``, ``list`` and ``check`` for people and for programs: a :class:`Listing` has the text and the
JSON. Pure."""

from collections.abc import Mapping
from dataclasses import dataclass

from rich.text import Text

from schedtrace.agent_client import AgentView
from schedtrace.check import NodeReport, Status
from schedtrace.discovery import GoProcess, Scan
from schedtrace.errors import PermissionDenied
from schedtrace.formatting import (
    WIDTH,
    amount,
    columns,
    count,
    duration,
    heading,
    keep_end,
    lines,
    paragraph,
    plural,
    printable,
)
from schedtrace.plan import ProbePlan
from schedtrace.report_json import Json, node_json, plan_json, scan_json
from schedtrace.window import FULL_LEVEL, SAMPLED_LEVEL

_STYLES: dict[Status, str] = {"ok": "green", "warning": "yellow", "missing": "bold red"}


@dataclass(frozen=True)
class Listing:
    """What a command prints: ``text``, or ``json`` when asked for it."""

    text: Text
    json: Json


def inspect_listing(plan: ProbePlan) -> Listing:
    """The decision of plan.py about one binary."""
    rows = [
        (p.function, p.site, f"{p.vaddr:#x}", "" if p.emulated else "dear", p.kind.name.lower()) for p in plan.probes
    ]
    dear = "" if all(p.emulated for p in plan.probes) else "dear: the kernel single-steps this instruction"
    parts = [
        Text.assemble((keep_end(printable(plan.path), WIDTH), "bold")),
        paragraph(f"{plan.go_version}, {plan.arch}, names from {plan.symbols}"),
        paragraph(f"Build id: {plan.build_id or 'none'}"),
        paragraph(f"Mode: {plan.mode} ({plan.mode_reason})"),
        paragraph(f"Struct layout: {_layout(plan)}"),
        Text(),
        heading(plural(len(plan.probes), "probe"), dear),
        columns(("function", "instruction", "address", "", "kind"), rows, "<<<<<"),
    ]
    if plan.unseen:
        parts += [Text(), heading("Can't be seen"), *(paragraph(text, bullet="- ") for text in plan.unseen)]
    parts += _sampled(plan)
    if plan.notes:
        parts += [Text(), heading("Notes"), *(paragraph(text, bullet="- ") for text in plan.notes)]
    return Listing(lines(parts), plan_json(plan))


def list_listing(scan: Scan, watched: Mapping[int, AgentView] | None = None) -> Listing:
    """The Go processes of a node. ``watched``: what an agent says of them, if one was asked."""
    titles = ("PID", "name", "Go", "threads", "GOMAXPROCS", "limit", "throttled", "pod or container")
    rows = [_process_row(process) for process in scan.processes]
    parts = [columns(titles, rows, "><<>>>><", flexible=1)] if rows else [Text("no Go process found")]
    if rows:
        watchable = sum(process.level == FULL_LEVEL for process in scan.processes)
        sampled = sum(SAMPLED_LEVEL in process.levels for process in scan.processes)
        able = f"{count(watchable)} of {count(len(rows))} can be watched at full level"
        parts += [Text(), Text(f"{able}, {count(sampled)} at sampled level.")]
    if watched is not None:
        parts += _by_the_agent(scan, watched)
    parts += [
        paragraph(f"{process.pid} ({process.name}): {process.obstacle}", bullet="- ")
        for process in scan.processes
        if process.obstacle
    ]
    without_samples: dict[str, list[str]] = {}
    for process in scan.processes:
        if process.sampled_obstacle:
            without_samples.setdefault(process.sampled_obstacle, []).append(f"{process.pid} ({process.name})")
    parts += [
        paragraph(f"no sampled level, since {why}: {', '.join(who)}", bullet="- ")
        for why, who in without_samples.items()
    ]
    if scan.unreadable:
        noun = "process" if scan.unreadable == 1 else "processes"
        why = "" if scan.may_ptrace else " without CAP_SYS_PTRACE: run as root"
        parts.append(Text(f"{count(scan.unreadable)} {noun} can't be looked into{why}."))
    return Listing(lines(parts), scan_json(scan, watched))


def _by_the_agent(scan: Scan, watched: Mapping[int, AgentView]) -> list[Text]:
    rows = []
    for process in scan.processes:
        if view := watched.get(process.pid):
            budget = view.budget_seconds
            rows.append(
                (
                    str(process.pid),
                    process.name,
                    view.level,
                    *(_seconds(view.seen_seconds.get(level, 0)) for level in (SAMPLED_LEVEL, FULL_LEVEL)),
                    count(sum(view.hits.values())),
                    _seconds(sum(view.overhead_seconds.values())),
                    "no limit" if budget is None else _seconds(budget),
                )
            )
    title = heading("What the agent does with them", "cost: CPU time so far; left: what it may cost now")
    if not rows:
        return [Text(), title, paragraph("it watches none of them")]
    titles = ("PID", "name", "level now", "seen sampled", "seen full", "hits", "cost", "left")
    return [Text(), title, columns(titles, rows, "><<>>>>>", flexible=1)]


def _seconds(seconds: float) -> str:
    return f"-{duration(round(-seconds * 1e9))}" if seconds < 0 else duration(round(seconds * 1e9))


def check_listing(report: NodeReport) -> Listing:
    """What a node has and lacks."""
    longest = max(len(finding.name) for finding in report.findings)
    parts = []
    for finding in report.findings:
        label = f"{finding.status:<8} {finding.name:<{longest}}  "
        text = paragraph(finding.detail, bullet=label)
        text.stylize(_STYLES[finding.status], 2, 2 + len(finding.status))
        parts.append(text)
        if finding.fix:
            parts.append(paragraph(f"-> {finding.fix}", bullet=" " * len(label)))
    parts += [Text(), Text(_verdict(report.exit_code), "bold")]
    return Listing(lines(parts), node_json(report))


def _verdict(exit_code: int) -> str:
    if exit_code == 0:
        return "This node can run schedtrace."
    if exit_code == PermissionDenied.exit_code:
        return "schedtrace lacks rights here: see above."
    return "This node can't run schedtrace: see above."


def _sampled(plan: ProbePlan) -> list[Text]:
    """The other level: whether it is possible, and how."""
    title = heading("Sampled level", "attach --level sampled")
    sampled = plan.sampled
    if sampled is None:
        return [Text(), title, paragraph(f"not possible: {plan.sampled_obstacle}")]
    dear = "" if sampled.site.emulated else ", dear: the kernel single-steps this instruction"
    return [
        Text(),
        title,
        paragraph(f"one probe: {sampled.function}, {sampled.site}, at {sampled.site.vaddr:#x}{dear}"),
        *(paragraph(f"can't be seen: {text}", bullet="- ") for text in sampled.unseen),
    ]


def _layout(plan: ProbePlan) -> str:
    if plan.layout is None:
        return "unknown"
    return f"from {plan.layout.source}, wait reasons from {plan.layout.wait_reasons_source}"


def _gomaxprocs(process: GoProcess) -> str:
    """What it is; with a question mark, what it was set to at the start, since it may have been changed."""
    if process.runtime:
        return str(process.runtime.gomaxprocs)
    return "" if process.gomaxprocs_environment is None else f"{process.gomaxprocs_environment}?"


def _process_row(process: GoProcess) -> tuple[str, ...]:
    stat, owner = process.throttling, process.owner
    return (
        str(process.pid),
        process.name,
        process.go_version.removeprefix("go"),
        count(process.threads),
        _gomaxprocs(process),
        "none" if process.quota_cores is None else amount(process.quota_cores),
        duration(stat.throttled_ns) if stat and stat.throttled_periods else "",
        f"{owner.namespace}/{owner.pod}" if owner.pod else owner.container,
    )
