"""inspect, list and check as people and programs get them."""

import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from schedtrace.abi import Duration, ProbeKind, StopPlace
from schedtrace.agent_client import AgentView
from schedtrace.cgroups import CpuStat
from schedtrace.check import Finding, NodeReport
from schedtrace.discovery import GoProcess, Scan
from schedtrace.listings import Listing, check_listing, inspect_listing, list_listing
from schedtrace.plan import Probe, ProbePlan
from schedtrace.pods import Owner
from schedtrace.runtime_histogram import RuntimeHistogram
from schedtrace.runtime_state import RuntimeState
from schedtrace.sampled_plan import SampledPlan
from schedtrace.symbols.code import Site
from schedtrace.symbols.layout import Layout

ROOT = Path(__file__).parents[2]
SETTINGS: Mapping[str, str] = {"-trimpath": "true"}


SAMPLED = SampledPlan(
    "runtime.(*timeHistogram).record",
    Site(3, 0x416A23, 0x16A23, "jl 0x416a4a", emulated=True),
    {Duration.RUN: 0x544E28, Duration.STOPPED_GC: 0x545D68},
    ((0x47751D, StopPlace.PARK), (0x44E2BB, StopPlace.YIELD)),
    0x47AD20,
    StopPlace.UNKNOWN,
    ("some stops of the world",),
)


def plan(layout: Layout | None, *probes: Probe, notes: tuple[str, ...] = ()) -> ProbePlan:
    return ProbePlan(
        path="/opt/app",
        arch="amd64",
        build_id=None,
        go_version="go1.27.3",
        settings=SETTINGS,
        symbols="pclntab",
        mode="casgstatus",
        mode_reason="complete, and system calls do not pass through it",
        anchor=0x7A4C0,
        layout=layout,
        probes=probes,
        unseen=("system calls: a goroutine in one counts as running",),
        notes=notes,
        sampled_obstacle="the compiler copied it",
    )


RUNTIME = RuntimeState(
    sched_latency=RuntimeHistogram((), 0, 0),
    stop_the_world={},
    gomaxprocs=4,
    goroutines=1_200,
    threads=9,
    idle_threads=4,
    processors=(),
    idle_processors=1,
    run_queue=11,
    gc_cycles=None,
    heap_goal_bytes=None,
)


def process(pid: int, name: str, container: str = "", obstacle: str = "") -> GoProcess:
    return GoProcess(
        pid=pid,
        name=name,
        exe=f"/bin/{name}",
        go_version="go1.27.3",
        runtime=RUNTIME if pid == 7 else None,
        gomaxprocs_environment=2 if pid == 7 else None,
        threads=1200,
        cgroup_path="/a",
        quota_cores=0.5 if pid == 7 else None,
        throttling=CpuStat(10, 3, 1_500_000_000) if pid == 7 else CpuStat(0, 0, 0),
        cpus=(0, 1, 5) if pid == 7 else None,
        memory_limit_bytes=1 << 30 if pid == 7 else None,
        owner=Owner("", "", container[:12], "", container),
        level="" if obstacle else "full",
        obstacle=obstacle,
        levels=() if obstacle else ("full",),
        sampled_obstacle="" if obstacle else "the compiler copied it",
    )


def narrow(listing: Listing) -> list[str]:
    """The lines, checked to be narrow; and that the JSON is JSON."""
    json.dumps(listing.json, allow_nan=False)
    result = listing.text.plain.split("\n")
    assert all(len(line) <= 79 for line in result)
    return result


def test_inspect() -> None:
    layout = Layout(
        27, "table", "go1.27.3", {"g.atomicstatus": 144}, {"g": 480}, ("", "chan receive"), "target", ()
    )
    probes = (
        Probe("runtime.casgstatus", ProbeKind.CASGSTATUS, 0x456160, 0x56160, "+0 push rbp", emulated=True),
        Probe("runtime.coroswitch_m", ProbeKind.COROUTINE_SWITCH, 0x456200, 0x56200, "+0 cmp rsp", emulated=False),
    )
    listing = inspect_listing(plan(layout, *probes, notes=("a fork of Go",)))
    assert narrow(listing) == [
        "/opt/app",
        "  go1.27.3, amd64, names from pclntab",
        "  Build id: none",
        "  Mode: casgstatus (complete, and system calls do not pass through it)",
        "  Struct layout: from table, wait reasons from target",
        "",
        "2 probes  dear: the kernel single-steps this instruction",
        "  function              instruction  address         kind",
        "  runtime.casgstatus    +0 push rbp  0x456160        casgstatus",
        "  runtime.coroswitch_m  +0 cmp rsp   0x456200  dear  coroutine_switch",
        "",
        "Can't be seen",
        "  - system calls: a goroutine in one counts as running",
        "",
        "Sampled level  attach --level sampled",
        "  not possible: the compiler copied it",
        "",
        "Notes",
        "  - a fork of Go",
    ]
    assert listing.json["layout"] == {
        "source": "table",
        "offsets": {"g.atomicstatus": 144},
        "wait_reasons": ["", "chan receive"],
        "wait_reasons_source": "target",
    }
    assert listing.json["anchor"] == 0x7A4C0
    assert listing.json["probes"][0] == {
        "function": "runtime.casgstatus",
        "kind": "casgstatus",
        "vaddr": 0x456160,
        "file_offset": 0x56160,
        "site": "+0 push rbp",
        "emulated": True,
    }
    assert listing.json["schema"] == "schedtrace.inspect/1"
    assert listing.json["build_id"] is None
    assert listing.json["settings"] == {"-trimpath": "true"}
    assert listing.json["levels"] == ["full"]
    assert listing.json["sampled"] is None
    assert listing.json["sampled_obstacle"] == "the compiler copied it"


def test_inspect_tells_of_the_sampled_level() -> None:
    listing = inspect_listing(replace(plan(None), sampled=SAMPLED, sampled_obstacle=""))
    assert narrow(listing)[-4:] == [
        "",
        "Sampled level  attach --level sampled",
        "  one probe: runtime.(*timeHistogram).record, +3 jl 0x416a4a, at 0x416a23",
        "  - can't be seen: some stops of the world",
    ]
    assert listing.json["levels"] == ["sampled", "full"]
    assert listing.json["sampled"] == {
        "function": "runtime.(*timeHistogram).record",
        "vaddr": 0x416A23,
        "file_offset": 0x16A23,
        "site": "+3 jl 0x416a4a",
        "emulated": True,
        "histograms": {"run": 0x544E28, "stopped_gc": 0x545D68},
        "stops": [{"vaddr": 0x47751D, "place": "park"}, {"vaddr": 0x44E2BB, "place": "yield"}],
        "unseen": ["some stops of the world"],
    }
    dear = replace(SAMPLED, site=replace(SAMPLED.site, emulated=False))
    lines = narrow(inspect_listing(replace(plan(None), sampled=dear)))
    assert lines[-2] == "  dear: the kernel single-steps this instruction"


def test_inspect_without_a_layout() -> None:
    listing = inspect_listing(plan(None))
    assert "  Struct layout: unknown" in narrow(listing)
    assert listing.json["layout"] is None


def test_list() -> None:
    processes = (process(7, "app", "4ab7" * 16), process(9, "app"), process(12, "proxy", obstacle="it is packed"))
    scan = Scan(processes, 3, may_ptrace=False)
    listing = list_listing(scan)
    assert narrow(listing) == [
        "  PID  name   Go      threads  GOMAXPROCS  limit  throttled  pod or container",
        "    7  app    1.27.3    1,200           4   0.50     1.50 s  4ab74ab74ab7",
        "    9  app    1.27.3    1,200               none",
        "   12  proxy  1.27.3    1,200               none",
        "",
        "2 of 3 can be watched at full level, 0 at sampled level.",
        "  - 12 (proxy): it is packed",
        "  - no sampled level, since the compiler copied it: 7 (app), 9 (app)",
        "3 processes can't be looked into without CAP_SYS_PTRACE: run as root.",
    ]
    assert listing.json["schema"] == "schedtrace.list/1"
    assert listing.json["unreadable"] == 3
    assert listing.json["processes"][0] == {
        "pid": 7,
        "name": "app",
        "exe": "/bin/app",
        "go_version": "go1.27.3",
        "gomaxprocs": 4,
        "gomaxprocs_environment": 2,
        "agent": None,
        "goroutines": 1_200,
        "threads": 1200,
        "cgroup": "/a",
        "namespace": "",
        "pod": "",
        "container": "4ab74ab74ab7",
        "pod_uid": "",
        "container_id": "4ab7" * 16,
        "cpu_quota_cores": 0.5,
        "cpus": [0, 1, 5],
        "memory_limit_bytes": 1 << 30,
        "throttled_periods": 3,
        "throttled_seconds": 1.5,
        "level": "full",
        "levels": ["full"],
        "obstacle": "",
        "sampled_obstacle": "the compiler copied it",
    }


def test_list_of_nothing() -> None:
    assert narrow(list_listing(Scan((), 0, may_ptrace=True))) == ["no Go process found"]
    assert narrow(list_listing(Scan((), 1, may_ptrace=True))) == [
        "no Go process found",
        "1 process can't be looked into.",
    ]


def test_check() -> None:
    findings = (
        Finding("kernel", "ok", "6.12.9"),
        Finding(
            "capabilities", "missing", "without CAP_BPF", "run as root; " * 8 + "or else", by_permission=True
        ),
    )
    listing = check_listing(NodeReport(findings))
    assert narrow(listing) == [
        "  ok       kernel        6.12.9",
        "  missing  capabilities  without CAP_BPF",
        "                         -> run as root; run as root; run as root; run as root;",
        "                         run as root; run as root; run as root; run as root; or",
        "                         else",
        "",
        "schedtrace lacks rights here: see above.",
    ]
    assert listing.json["exit_code"] == 77
    assert listing.json["findings"][0] == {"name": "kernel", "status": "ok", "detail": "6.12.9", "fix": ""}


def test_check_verdicts() -> None:
    fine = check_listing(NodeReport((Finding("kernel", "ok", "6.12.9"),)))
    unfit = check_listing(NodeReport((Finding("kernel", "missing", "4.4", "boot another"),)))
    assert narrow(fine)[-1] == "This node can run schedtrace."
    assert narrow(unfit)[-1] == "This node can't run schedtrace: see above."
    assert unfit.json["exit_code"] == 4


def test_every_key_of_the_json_is_documented() -> None:
    documented = (ROOT / "docs/json.md").read_text()
    listings = [
        inspect_listing(plan(None, Probe("f", ProbeKind.RUN, 1, 2, "s", emulated=True))),
        list_listing(Scan((process(7, "app"),), 0, may_ptrace=True)),
        check_listing(NodeReport((Finding("kernel", "ok", "6.12.9"),))),
    ]
    for listing in listings:
        keys = set(listing.json)
        for value in listing.json.values():
            if isinstance(value, list) and value and isinstance(value[0], dict):
                keys |= set(value[0])
        assert {key for key in keys if f"`{key}`" not in documented} == set()


def test_what_an_agent_does() -> None:
    full = AgentView(7, "full", {"sampled": 61.5, "full": 4.25}, {"sampled": 9, "full": 1_000}, {"target": 0.5}, -0.002)
    passive = AgentView(9, "passive", {}, {}, {}, None)
    scan = Scan((process(7, "app"), process(8, "other"), process(9, "third")), 0, may_ptrace=True)
    listing = list_listing(scan, {7: full, 9: passive})
    shown = listing.text.plain.split("\n")
    start = next(i for i, line in enumerate(shown) if line.startswith("What the agent does with them"))
    assert shown[start + 1 : start + 4] == [
        "  PID  name   level now  seen sampled  seen full   hits    cost      left",
        "    7  app    full             61.5 s     4.25 s  1,009  500 ms  -2.00 ms",
        "    9  third  passive               0          0      0       0  no limit",
    ]
    assert [each["agent"] and each["agent"]["level"] for each in listing.json["processes"]] == ["full", None, "passive"]
    assert "it watches none of them" in list_listing(scan, {}).text.plain


def test_a_full_list_is_narrow() -> None:
    long_name = "kube-state-metrics-with-a-long-name"
    one = replace(process(4194303, long_name), gomaxprocs_environment=64, go_version="go1.22.10", quota_cores=1.5)
    listing = list_listing(Scan((replace(one, throttling=CpuStat(9, 9, 10**14)),), 0, may_ptrace=True))
    assert narrow(listing)[1] == "  4194303  …cs-with-a-long-name  1.22.10    1,200         64?   1.50  100,000 s"


def test_a_pods_name_is_shown_whole() -> None:
    one = replace(process(9, "app"), owner=Owner("shop", "checkout-7d9f8b6c5-x2x9k", "app", "uid", "4ab7" * 16))
    listing = list_listing(Scan((one,), 0, may_ptrace=True))
    assert listing.text.plain.split("\n")[1].endswith("  shop/checkout-7d9f8b6c5-x2x9k")
    shown = listing.json["processes"][0]
    assert (shown["namespace"], shown["pod"], shown["container"]) == ("shop", "checkout-7d9f8b6c5-x2x9k", "app")
