"""Can this node run schedtrace? What is there, what is missing, and how to give it.

:func:`check_node` looks and changes nothing. Everything is read below ``root``, so that a node can be laid
out in a folder. A finding is "ok", "warning" (it will work, or work in part) or "missing" (it won't).
"""

import errno
import importlib.util
import os
import platform
import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from importlib.machinery import ModuleSpec
from pathlib import Path
from typing import Literal

from schedtrace import tracefs, uprobe_multi, uprobe_pmu
from schedtrace.cgroups import UNIFIED, layout, parse_cgroup, parse_mountinfo
from schedtrace.errors import NodeUnsupported, PermissionDenied
from schedtrace.proc_formats import parse_status
from schedtrace.procfs import CAP_SYS_PTRACE, effective_capabilities

Status = Literal["ok", "warning", "missing"]

OLDEST_KERNEL = (5, 10)
CAP_SYS_ADMIN = 21
CAP_SYS_RESOURCE = 24
CAP_PERFMON = 38
CAP_BPF = 39

_MEMORY_NO_LONGER_LOCKED = (
    5,
    11,
)  # from here on BPF maps count against the memory cgroup, not RLIMIT_MEMLOCK
_INITIAL_PID_NAMESPACE = 0xEFFFFFFC  # PROC_PID_INIT_INO, include/linux/proc_ns.h
_ARCHITECTURES = {"x86_64": "amd64", "aarch64": "arm64"}
_STRICT_PARANOID = 3  # levels above 2 exist only in distributions' kernels
_SECCOMP_FILTER = "2"


@dataclass(frozen=True)
class Finding:
    """One thing looked at. ``fix`` says how to give it, empty if nothing needs to be done.
    ``by_permission``: what is missing is a right, not something of the node."""

    name: str
    status: Status
    detail: str
    fix: str = ""
    by_permission: bool = False


@dataclass(frozen=True)
class NodeReport:
    """All findings, in the order in which they matter."""

    findings: tuple[Finding, ...]

    @property
    def exit_code(self) -> int:
        """0 if nothing is missing; 4 if the node lacks something, 77 if only rights are missing."""
        missing = [finding for finding in self.findings if finding.status == "missing"]
        if any(not finding.by_permission for finding in missing):
            return NodeUnsupported.exit_code
        return PermissionDenied.exit_code if missing else 0


def _any_of(effective: int, capabilities: Iterable[int]) -> bool:
    return any(effective >> capability & 1 for capability in capabilities)


@dataclass(frozen=True)
class _Node:
    root: Path
    kernel: tuple[int, int]
    release: str
    machine: str
    capabilities: int
    seccomp: str
    mountinfo: str
    multi_refusal: int
    pmu_refusal: int
    events_refusal: int

    def may(self, *capabilities: int) -> bool:
        """Is one of these capabilities there?"""
        return _any_of(self.capabilities, capabilities)

    def read(self, path: str) -> str | None:
        """A file of the node; None if it can't be read."""
        try:
            return (self.root / path).read_text().strip()
        except OSError:
            return None


def check_node(
    root: str = "/",
    machine: str | None = None,
    multi_refusal: Callable[[], int] = uprobe_multi.refusal,
    pmu_refusal: Callable[[str], int] = uprobe_pmu.refusal,
    events_refusal: Callable[[], int] = uprobe_pmu.events_refusal,
    find_spec: Callable[[str], ModuleSpec | None] = importlib.util.find_spec,
) -> NodeReport:
    """Look at this node. Raises OSError if /proc isn't there at all.

    ``multi_refusal``, ``pmu_refusal``, ``events_refusal`` and ``find_spec`` say what trying a uprobe in two ways and
    any perf event, and looking for a Python module gave.
    """
    folder = Path(root)
    status = parse_status((folder / "proc/self/status").read_bytes())
    release = (folder / "proc/sys/kernel/osrelease").read_text().strip()
    version = re.match(r"(\d+)\.(\d+)", release)
    node = _Node(
        root=folder,
        kernel=(int(version[1]), int(version[2])) if version else (0, 0),
        release=release,
        machine=machine or platform.machine(),
        capabilities=int(status["CapEff"], 16),
        seccomp=status.get("Seccomp", "0"),
        mountinfo=os.fsdecode((folder / "proc/self/mountinfo").read_bytes()),
        multi_refusal=multi_refusal(),
        pmu_refusal=pmu_refusal(root),
        events_refusal=events_refusal(),
    )
    return NodeReport(
        (
            _kernel(node),
            _architecture(node),
            _pid_namespace(node),
            _capabilities(node.capabilities),
            *_perf_event_paranoid(node),
            *_seccomp(node),
            *_memlock(node),
            *_tracefs(node),
            _uprobes(node),
            _bcc(find_spec),
            _cgroups(node),
            _lockdown(node),
            _btf(node),
            *_leftovers(node),
        )
    )


def _kernel(node: _Node) -> Finding:
    if node.kernel >= OLDEST_KERNEL:
        return Finding("kernel", "ok", node.release)
    oldest = ".".join(map(str, OLDEST_KERNEL))
    return Finding("kernel", "missing", f"{node.release} is too old", f"boot Linux {oldest} or newer")


def _architecture(node: _Node) -> Finding:
    name = _ARCHITECTURES.get(node.machine)
    if name:
        return Finding("architecture", "ok", name)
    return Finding(
        "architecture", "missing", f"{node.machine} is not supported", "use an amd64 or arm64 node"
    )


def _pid_namespace(node: _Node) -> Finding:
    try:
        link = os.readlink(node.root / "proc/self/ns/pid")  # noqa: PTH115 (pid:[N] is no path)
    except OSError:
        link = ""
    if link == f"pid:[{_INITIAL_PID_NAMESPACE}]":
        return Finding("PID namespace", "ok", "the node's own")
    return Finding(
        "PID namespace",
        "missing",
        "not the node's: BPF would see other PIDs than the ones given here",
        "run on the node itself, or in a pod with hostPID: true (docker run --pid=host)",
    )


# Name -> capabilities of which one is enough.
_NEEDED = {
    "BPF": (CAP_BPF, CAP_SYS_ADMIN),
    "PERFMON": (CAP_PERFMON, CAP_SYS_ADMIN),
    "SYS_PTRACE": (CAP_SYS_PTRACE,),
}


def require_capabilities() -> None:
    """Raises PermissionDenied, which names those that this process lacks and should have, if there are any."""
    finding = _capabilities(effective_capabilities())
    if finding.status == "missing":
        raise PermissionDenied(f"{finding.detail}: {finding.fix}")


def _capabilities(effective: int) -> Finding:
    missing = [name for name, any_of in _NEEDED.items() if not _any_of(effective, any_of)]
    if not missing:
        have = [*_NEEDED, *(["SYS_ADMIN"] if _any_of(effective, (CAP_SYS_ADMIN,)) else [])]
        return Finding("capabilities", "ok", " ".join(f"CAP_{name}" for name in have))
    return Finding(
        "capabilities",
        "missing",
        "without " + ", ".join(f"CAP_{name}" for name in missing),
        f"run as root; in a pod: securityContext.capabilities.add: [{', '.join(missing)}]",
        by_permission=True,
    )


def _perf_event_paranoid(node: _Node) -> Iterator[Finding]:
    text = node.read("proc/sys/kernel/perf_event_paranoid")
    if text is None:
        yield Finding(
            "perf events", "missing", "the kernel has no perf events", "use a kernel with CONFIG_PERF_EVENTS"
        )
    elif int(text) >= _STRICT_PARANOID and node.events_refusal and node.may(CAP_PERFMON, CAP_SYS_ADMIN):
        yield Finding(
            "perf events",
            "missing",
            f"kernel.perf_event_paranoid is {text}, and this kernel then refuses them to CAP_PERFMON",
            f"on the node, as root: sysctl kernel.perf_event_paranoid={_STRICT_PARANOID - 1}; or grant CAP_SYS_ADMIN",
            by_permission=True,
        )
    else:
        yield Finding("perf events", "ok", f"kernel.perf_event_paranoid is {text}")


def _seccomp(node: _Node) -> Iterator[Finding]:
    if node.seccomp == _SECCOMP_FILTER:
        yield Finding(
            "seccomp",
            "warning",
            "a filter is on; it must let bpf, perf_event_open and pidfd_open through",
            "in a pod: securityContext.seccompProfile.type: Unconfined",
        )


def _memlock(node: _Node) -> Iterator[Finding]:
    limits = re.search(r"^Max locked memory +(\S+) +(\S+)", node.read("proc/self/limits") or "", re.MULTILINE)
    if node.kernel >= _MEMORY_NO_LONGER_LOCKED or limits is None:
        return
    if limits[2] == "unlimited" or node.may(CAP_SYS_RESOURCE):
        yield Finding("locked memory", "ok", "the limit can be lifted")
    else:
        yield Finding(
            "locked memory",
            "warning",
            f"limited to {limits[2]} bytes, and BPF maps count against it before Linux 5.11",
            "ulimit -l unlimited, or grant CAP_SYS_RESOURCE",
        )


def _tracefs(node: _Node) -> Iterator[Finding]:
    found = tracefs.mount_point(node.mountinfo)
    by_hand = f"mount -t tracefs tracefs {tracefs.TRACING}"
    if found is None and not (node.root / tracefs.TRACING.lstrip("/")).is_dir():
        yield Finding("tracefs", "missing", "the kernel has none", "use a kernel with CONFIG_FTRACE")
    elif found is None and node.may(CAP_SYS_ADMIN):
        yield Finding("tracefs", "ok", f"not mounted; attaching mounts it at {tracefs.TRACING}")
    elif found is None:
        yield Finding(
            "tracefs",
            "missing",
            "not mounted, and mounting it needs CAP_SYS_ADMIN",
            f"on the node, as root: {by_hand}; in a pod: mount {tracefs.TRACING} as a hostPath",
            by_permission=True,
        )
    else:
        yield from _mounted_tracefs(node, found)


def _mounted_tracefs(node: _Node, found: str) -> Iterator[Finding]:
    folder = node.root / found.lstrip("/")
    lines = _writing_refusal(folder / tracefs.UPROBE_EVENTS)
    try:
        absent = tracefs.missing_tracepoints(str(folder))
    except PermissionError:
        yield Finding(
            "tracefs", "missing", f"{found} can't be read", "run as root (user id 0)", by_permission=True
        )
        return
    yield Finding("tracefs", "ok", f"{found}, {'writable' if lines == 0 else 'read-only'}")
    if absent:
        yield Finding(
            "tracepoints",
            "missing",
            f"the kernel doesn't have {', '.join(absent)}",
            "use a kernel with CONFIG_TRACEPOINTS and CONFIG_FTRACE; under lockdown, boot with less of it",
        )
    else:
        yield Finding("tracepoints", "ok", f"all {len(tracefs.TRACEPOINTS)} of them")


def _uprobes(node: _Node) -> Finding:
    if node.multi_refusal == 0:
        return Finding("uprobes", "ok", "through BPF links (uprobe_multi)")
    if node.pmu_refusal == 0:
        return Finding("uprobes", "ok", "through the perf uprobe PMU")
    found = tracefs.mount_point(node.mountinfo)
    refused = errno.errorcode.get(node.pmu_refusal, str(node.pmu_refusal))
    pmu = (
        "there is no uprobe PMU"
        if node.pmu_refusal == errno.ENOENT
        else f"the uprobe PMU refuses ({refused})"
    )
    if found is None:
        return Finding(
            "uprobes",
            "missing",
            f"{pmu}, and without tracefs there is no other way",
            "grant CAP_SYS_ADMIN, or mount tracefs (see there)",
            by_permission=True,
        )
    lines_refusal = _writing_refusal(node.root / found.lstrip("/") / tracefs.UPROBE_EVENTS)
    if lines_refusal == 0:
        return Finding("uprobes", "ok", f"through {found}/{tracefs.UPROBE_EVENTS}, since {pmu}")
    if lines_refusal == errno.ENOENT:
        return Finding(
            "uprobes", "missing", f"{pmu}, and the kernel has none", "use a kernel with CONFIG_UPROBE_EVENTS"
        )
    return Finding(
        "uprobes",
        "missing",
        f"{pmu}, and {found}/{tracefs.UPROBE_EVENTS} can't be written ({os.strerror(lines_refusal)})",
        "grant CAP_SYS_ADMIN, or run as root (user id 0) with tracefs mounted writable",
        by_permission=True,
    )


def _writing_refusal(path: Path) -> int:
    """0 if the file can be opened for writing, else the error number. Nothing is written, and nothing
    truncated."""
    try:
        os.close(os.open(path, os.O_WRONLY | os.O_APPEND))
    except OSError as error:
        return error.errno or errno.EIO
    return 0


def _bcc(find_spec: Callable[[str], ModuleSpec | None]) -> Finding:
    fix = (
        "apt-get install python3-bpfcc (Fedora: dnf install python3-bcc), and run schedtrace in a Python that"
        " sees it: the system's, or a venv of it made with --system-site-packages"
    )
    spec = find_spec("bcc")
    folders = [Path(folder) for folder in (spec.submodule_search_locations or ())] if spec else []
    if spec is None:
        return Finding("BCC", "missing", "its Python module isn't to be found", fix)
    if not any((folder / "libbcc.py").exists() for folder in folders):
        where = spec.origin or ", ".join(map(str, folders))
        return Finding(
            "BCC",
            "missing",
            f"{where} is another package of that name (PyPI's bcc)",
            f"pip uninstall bcc; {fix}",
        )
    return Finding("BCC", "ok", str(folders[0]))


def _cgroups(node: _Node) -> Finding:
    mounts = parse_mountinfo(node.mountinfo)
    kind = layout(mounts)
    if kind == "none":
        return Finding(
            "cgroups",
            "warning",
            "no hierarchy is mounted: quotas and throttling can't be seen",
            "in a pod: mount /sys/fs/cgroup as a hostPath, read-only",
        )
    hierarchies = [hierarchy for hierarchy, _ in parse_cgroup(node.read("proc/self/cgroup") or "")]
    cpu = next((name for name in hierarchies if "cpu" in name.split(",")), UNIFIED)
    return Finding("cgroups", "ok", f"{kind}; the cpu controller is in {'v1' if cpu != UNIFIED else UNIFIED}")


def _lockdown(node: _Node) -> Finding:
    text = node.read("sys/kernel/security/lockdown")
    chosen = re.search(r"\[(\w+)\]", text or "")
    level = chosen[1] if chosen else "unknown (securityfs isn't mounted)"
    if level == "confidentiality":
        return Finding(
            "lockdown",
            "missing",
            "confidentiality: the kernel lets nobody use tracefs",
            "boot with lockdown=integrity or without it",
        )
    return Finding("lockdown", "ok", f"{level}; schedtrace reads no kernel memory")


def _btf(node: _Node) -> Finding:
    there = (node.root / "sys/kernel/btf/vmlinux").exists()
    return Finding("BTF", "ok", f"{'there' if there else 'not there'}, and not needed")


def _leftovers(node: _Node) -> Iterator[Finding]:
    found = tracefs.mount_point(node.mountinfo)
    if found is None:
        return
    try:
        names = tracefs.read_dead_lines(str(node.root / found.lstrip("/")))
    except OSError:
        return
    if names:
        yield Finding(
            "leftovers",
            "warning",
            f"{len(names)} probes of killed sessions are still listed in {found}/{tracefs.UPROBE_EVENTS}"
            " (they cost the target nothing)",
            "the next attach removes them",
        )
