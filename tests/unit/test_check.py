"""check over nodes laid out in a folder, and over the machine the tests run on."""

import errno
import importlib.util
import os
from dataclasses import dataclass, field
from importlib.machinery import ModuleSpec
from pathlib import Path

import pytest

from schedtrace import tracefs
from schedtrace.check import Finding, NodeReport, check_node

PTRACE, ADMIN, PERFMON, BPF = 1 << 19, 1 << 21, 1 << 38, 1 << 39
TRACEFS = "41 24 0:12 / /sys/kernel/tracing rw shared:9 - tracefs tracefs rw\n"
CGROUP2 = "30 24 0:26 / /sys/fs/cgroup rw shared:4 - cgroup2 cgroup2 rw\n"
CPU_V1 = "31 24 0:27 / /sys/fs/cgroup/cpu,cpuacct rw shared:5 - cgroup cgroup rw,cpu,cpuacct\n"


@dataclass
class Node:
    """A node that has everything; change what a test is about."""

    folder: Path
    release: str = "6.12.9-amd64"
    machine: str = "x86_64"
    capabilities: int = PTRACE | ADMIN | PERFMON | BPF
    pid_namespace: str = "pid:[4026531836]"
    mounts: str = TRACEFS + CGROUP2
    cgroup: str = "0::/\n"
    memlock: str = "8388608"
    multi_refusal: int = errno.EINVAL
    pmu_refusal: int = 0
    events_refusal: int = 0
    files: dict[str, str | None] = field(default_factory=dict)
    bcc_modules: tuple[str, ...] = ("__init__.py", "libbcc.py")

    def report(self) -> NodeReport:
        files: dict[str, str | None] = {
            "proc/self/status": f"Name:\tpython3\nCapEff:\t{self.capabilities:016x}\nSeccomp:\t0\n",
            "proc/self/mountinfo": self.mounts,
            "proc/self/cgroup": self.cgroup,
            "proc/self/limits": f"Max locked memory         {self.memlock}   {self.memlock}   bytes\n",
            "proc/sys/kernel/osrelease": self.release + "\n",
            "proc/sys/kernel/perf_event_paranoid": "2\n",
            "sys/kernel/security/lockdown": "[none] integrity confidentiality\n",
            "sys/kernel/tracing/uprobe_events": "",
            **{f"sys/kernel/tracing/events/{name}/id": "1\n" for name in tracefs.TRACEPOINTS},
            **self.files,
        }
        for name, text in files.items():
            path = self.folder / name
            path.parent.mkdir(parents=True, exist_ok=True)
            if text is not None:
                path.write_text(text)
        link = self.folder / "proc/self/ns/pid"
        link.parent.mkdir(exist_ok=True)
        link.symlink_to(self.pid_namespace)
        return check_node(
            str(self.folder),
            self.machine,
            multi_refusal=lambda: self.multi_refusal,
            pmu_refusal=lambda _: self.pmu_refusal,
            events_refusal=lambda: self.events_refusal,
            find_spec=self.find_spec,
        )

    def find_spec(self, name: str) -> ModuleSpec | None:
        assert name == "bcc"
        if not self.bcc_modules:
            return None
        package = self.folder / "site/bcc"
        package.mkdir(parents=True)
        for module in self.bcc_modules:
            (package / module).touch()
        return importlib.util.spec_from_file_location(
            name, package / "__init__.py", submodule_search_locations=[str(package)]
        )


@pytest.fixture
def node(tmp_path: Path) -> Node:
    return Node(tmp_path)


def finding(report: NodeReport, name: str) -> Finding:
    return next(finding for finding in report.findings if finding.name == name)


def names(report: NodeReport, status: str) -> list[str]:
    return [finding.name for finding in report.findings if finding.status == status]


def test_a_node_that_has_everything(node: Node) -> None:
    report = node.report()
    assert report.exit_code == 0
    assert [(f.name, f.status, f.detail, f.fix) for f in report.findings] == [
        ("kernel", "ok", "6.12.9-amd64", ""),
        ("architecture", "ok", "amd64", ""),
        ("PID namespace", "ok", "the node's own", ""),
        ("capabilities", "ok", "CAP_BPF CAP_PERFMON CAP_SYS_PTRACE CAP_SYS_ADMIN", ""),
        ("perf events", "ok", "kernel.perf_event_paranoid is 2", ""),
        ("tracefs", "ok", "/sys/kernel/tracing, writable", ""),
        ("tracepoints", "ok", "all 6 of them", ""),
        ("uprobes", "ok", "through the perf uprobe PMU", ""),
        ("BCC", "ok", str(node.folder / "site/bcc"), ""),
        ("cgroups", "ok", "v2; the cpu controller is in cgroup2", ""),
        ("lockdown", "ok", "none; schedtrace reads no kernel memory", ""),
        ("BTF", "ok", "not there, and not needed", ""),
    ]


@pytest.mark.parametrize(
    ("release", "status"),
    [
        ("5.10.0-28-amd64", "ok"),
        ("5.9.16", "missing"),
        ("4.19.0", "missing"),
        ("10.1-rc1", "ok"),
        ("odd", "missing"),
    ],
)
def test_kernel_versions(node: Node, release: str, status: str) -> None:
    node.release = release
    report = node.report()
    assert finding(report, "kernel").status == status
    assert report.exit_code == (4 if status == "missing" else 0)


def test_architecture(node: Node) -> None:
    node.machine = "riscv64"
    report = node.report()
    assert finding(report, "architecture").detail == "riscv64 is not supported"
    assert report.exit_code == 4


@pytest.mark.parametrize(
    ("capabilities", "missing"),
    [
        (BPF | PERFMON | PTRACE, []),
        (ADMIN | PTRACE, []),
        (BPF | PERFMON, ["SYS_PTRACE"]),
        (ADMIN, ["SYS_PTRACE"]),
        (PTRACE | BPF, ["PERFMON"]),
        (0, ["BPF", "PERFMON", "SYS_PTRACE"]),
    ],
)
def test_capabilities(node: Node, capabilities: int, missing: list[str]) -> None:
    node.capabilities = capabilities
    report = node.report()
    found = finding(report, "capabilities")
    assert found.status == ("missing" if missing else "ok")
    assert report.exit_code == (77 if missing else 0)
    if missing:
        assert found.detail == "without " + ", ".join(f"CAP_{name}" for name in missing)
        assert found.fix == f"run as root; in a pod: securityContext.capabilities.add: [{', '.join(missing)}]"


def test_a_missing_right_on_a_node_that_lacks_something_too(node: Node) -> None:
    node.capabilities, node.release = 0, "4.4.0"
    assert node.report().exit_code == 4


def test_another_pid_namespace(node: Node) -> None:
    node.pid_namespace = "pid:[4026532201]"
    report = node.report()
    assert finding(report, "PID namespace").fix.startswith(
        "run on the node itself, or in a pod with hostPID: true"
    )
    assert report.exit_code == 4


@pytest.mark.parametrize(("refusal", "status", "exit_code"), [(0, "ok", 0), (errno.EACCES, "missing", 77)])
def test_a_distributions_strict_paranoid(node: Node, refusal: int, status: str, exit_code: int) -> None:
    node.capabilities, node.multi_refusal, node.events_refusal = BPF | PERFMON | PTRACE, 0, refusal
    node.files["proc/sys/kernel/perf_event_paranoid"] = "4\n"
    report = node.report()
    assert finding(report, "perf events").status == status
    assert finding(report, "perf events").detail.startswith("kernel.perf_event_paranoid is 4")
    assert ("CAP_SYS_ADMIN" in finding(report, "perf events").fix) == bool(refusal)
    assert report.exit_code == exit_code


def test_without_perfmon_it_is_the_capability_that_is_missing(node: Node) -> None:
    node.capabilities, node.multi_refusal, node.events_refusal = BPF | PTRACE, 0, errno.EACCES
    node.files["proc/sys/kernel/perf_event_paranoid"] = "4\n"
    assert names(node.report(), "missing") == ["capabilities"]


def test_tracefs_not_mounted(node: Node) -> None:
    node.mounts = CGROUP2
    report = node.report()
    assert finding(report, "tracefs").detail == "not mounted; attaching mounts it at /sys/kernel/tracing"
    assert "tracepoints" not in [f.name for f in report.findings]
    assert report.exit_code == 0


def test_tracefs_not_mounted_and_no_right_to(node: Node) -> None:
    node.mounts, node.capabilities, node.pmu_refusal = CGROUP2, BPF | PERFMON | PTRACE, errno.EACCES
    report = node.report()
    assert names(report, "missing") == ["tracefs", "uprobes"]
    assert "mount -t tracefs tracefs /sys/kernel/tracing" in finding(report, "tracefs").fix
    assert finding(report, "uprobes").detail == (
        "the uprobe PMU refuses (EACCES), and without tracefs there is no other way"
    )
    assert report.exit_code == 77


def test_a_tracepoint_less(node: Node) -> None:
    node.files["sys/kernel/tracing/events/sched/sched_wakeup_new/id"] = None
    report = node.report()
    assert finding(report, "tracepoints").detail == "the kernel doesn't have sched/sched_wakeup_new"
    assert report.exit_code == 4


def test_uprobes_through_links(node: Node) -> None:
    node.multi_refusal, node.capabilities = 0, BPF | PERFMON | PTRACE
    assert finding(node.report(), "uprobes").detail == "through BPF links (uprobe_multi)"


def test_uprobes_through_tracefs(node: Node) -> None:
    node.capabilities, node.pmu_refusal = BPF | PERFMON | PTRACE, errno.EACCES
    report = node.report()
    assert report.exit_code == 0
    assert finding(report, "uprobes").detail == (
        "through /sys/kernel/tracing/uprobe_events, since the uprobe PMU refuses (EACCES)"
    )
    assert (node.folder / "sys/kernel/tracing/uprobe_events").read_text() == ""


def test_no_uprobes_in_the_kernel(node: Node) -> None:
    node.pmu_refusal = errno.ENOENT
    node.files["sys/kernel/tracing/uprobe_events"] = None
    report = node.report()
    assert finding(report, "uprobes").detail == "there is no uprobe PMU, and the kernel has none"
    assert report.exit_code == 4


@pytest.mark.parametrize(
    ("modules", "detail"),
    [
        ((), "its Python module isn't to be found"),
        (("__init__.py",), "is another package of that name (PyPI's bcc)"),
    ],
)
def test_bcc(node: Node, modules: tuple[str, ...], detail: str) -> None:
    node.bcc_modules = modules
    report = node.report()
    assert detail in finding(report, "BCC").detail
    assert "apt-get install python3-bpfcc" in finding(report, "BCC").fix
    assert report.exit_code == 4


@pytest.mark.parametrize(
    ("mounts", "cgroup", "status", "detail"),
    [
        (CPU_V1, "3:cpu,cpuacct:/\n", "ok", "v1; the cpu controller is in v1"),
        (CPU_V1 + CGROUP2, "3:cpu,cpuacct:/\n0::/\n", "ok", "hybrid; the cpu controller is in v1"),
        (CPU_V1 + CGROUP2, "0::/\n", "ok", "hybrid; the cpu controller is in cgroup2"),
        ("", "", "warning", "no hierarchy is mounted: quotas and throttling can't be seen"),
    ],
)
def test_cgroup_layouts(node: Node, mounts: str, cgroup: str, status: str, detail: str) -> None:
    node.mounts, node.cgroup = TRACEFS + mounts, cgroup
    found = finding(node.report(), "cgroups")
    assert (found.status, found.detail) == (status, detail)


@pytest.mark.parametrize(
    ("text", "status", "detail"),
    [
        ("none [integrity] confidentiality\n", "ok", "integrity; schedtrace reads no kernel memory"),
        (None, "ok", "unknown (securityfs isn't mounted); schedtrace reads no kernel memory"),
        (
            "none integrity [confidentiality]\n",
            "missing",
            "confidentiality: the kernel lets nobody use tracefs",
        ),
    ],
)
def test_lockdown(node: Node, text: str | None, status: str, detail: str) -> None:
    node.files["sys/kernel/security/lockdown"] = text
    found = finding(node.report(), "lockdown")
    assert (found.status, found.detail) == (status, detail)


@pytest.mark.parametrize(
    ("release", "memlock", "found"),
    [
        ("5.11.0", "65536", []),
        ("5.10.0", "unlimited", ["ok"]),
        ("5.10.0", "65536", ["warning"]),
    ],
)
def test_locked_memory_matters_before_5_11(node: Node, release: str, memlock: str, found: list[str]) -> None:
    node.release, node.memlock = release, memlock
    assert [f.status for f in node.report().findings if f.name == "locked memory"] == found


def test_seccomp_filter(node: Node) -> None:
    node.files["proc/self/status"] = f"CapEff:\t{node.capabilities:016x}\nSeccomp:\t2\n"
    report = node.report()
    assert names(report, "warning") == ["seccomp"]
    assert report.exit_code == 0


def test_leftovers_of_killed_sessions(node: Node) -> None:
    nobody = 4_194_304  # above every possible PID
    node.files["sys/kernel/tracing/uprobe_events"] = (
        f"p:uprobes/p_schedtrace_1a_2b_bcc_{nobody} /proc/self/fd/5:0x2b\np:uprobes/other /bin/x:0x10\n"
    )
    report = node.report()
    assert finding(report, "leftovers").detail.startswith("1 probes of killed sessions are still listed")
    assert report.exit_code == 0


def test_this_machine() -> None:
    report = check_node()
    uname = os.uname()
    assert finding(report, "kernel").detail.startswith(uname.release)
    assert finding(report, "architecture").detail == {"x86_64": "amd64", "aarch64": "arm64"}[uname.machine]
    assert all(f.fix for f in report.findings if f.status != "ok")
    assert not any(f.fix for f in report.findings if f.status == "ok")
    if os.geteuid():
        assert finding(report, "capabilities").by_permission
        assert report.exit_code in (4, 77)
