"""Which processes of this node are Go programs, and how much could be seen of each.

One look over /proc. Executables are told apart by device and inode, so that a node with a hundred processes
of one binary reads that binary once.
"""

import mmap
from collections.abc import Callable
from contextlib import closing
from dataclasses import dataclass, replace
from pathlib import Path

from schedtrace import plan
from schedtrace.cgroups import CpuStat, Mount, read_membership, read_mounts
from schedtrace.errors import NotTraceable, PermissionDenied
from schedtrace.passive_level import PassiveLevel
from schedtrace.pods import Owner, PodIndex
from schedtrace.procfs import CAP_SYS_PTRACE, Process, effective_capabilities, open_process, running_pids
from schedtrace.runtime_plan import RuntimePlan
from schedtrace.runtime_state import RuntimeState
from schedtrace.window import FULL_LEVEL

_BUILD_INFORMATION = b"\xff Go buildinf:"  # debug/buildinfo
_BUILD_INFORMATION_ALIGN = 16


@dataclass(frozen=True)
class GoBinary:
    """What an executable says of itself. ``level`` is how much of it can be seen, "full" or empty, and
    ``obstacle`` why not more. ``levels``: all that need probes and are possible; ``sampled_obstacle``: why the sampled
    level isn't, where the full one is. ``runtime``: where its runtime's own state is, or why that can't be read."""

    go_version: str
    level: str
    obstacle: str
    levels: tuple[str, ...] = ()
    sampled_obstacle: str = ""
    runtime: RuntimePlan | str = ""


@dataclass(frozen=True)
class GoProcess:
    """A running Go program. ``runtime`` is what its runtime says of itself, None if that can't be read;
    ``gomaxprocs_environment`` what its environment set GOMAXPROCS to at the start, None if nothing did.
    ``quota_cores``, ``memory_limit_bytes`` and ``cpus`` (a cpuset's, ascending) are what its cgroup and those above
    allow, None if nothing is set or known; ``throttling`` is that of its cgroup so far."""

    pid: int
    name: str
    exe: str
    go_version: str
    runtime: RuntimeState | None
    gomaxprocs_environment: int | None
    threads: int
    cgroup_path: str
    quota_cores: float | None
    throttling: CpuStat | None
    cpus: tuple[int, ...] | None
    memory_limit_bytes: int | None
    owner: Owner
    level: str
    obstacle: str
    levels: tuple[str, ...] = ()
    sampled_obstacle: str = ""


@dataclass(frozen=True)
class Scan:
    """The Go processes found, by PID. ``unreadable`` processes couldn't be looked into; ``may_ptrace`` says
    whether CAP_SYS_PTRACE is there, without which that is to be expected of other users'."""

    processes: tuple[GoProcess, ...]
    unreadable: int
    may_ptrace: bool


def look_at(path: str) -> GoBinary | None:
    """What kind of Go binary a file is; None if it isn't one. Raises PermissionDenied or OSError if it can't
    be read."""
    try:
        found = plan.make_plan(path)
        return GoBinary(found.go_version, FULL_LEVEL, "", found.levels, found.sampled_obstacle, found.runtime)
    except NotTraceable as error:
        if not has_build_information(path):
            return None
        return GoBinary("unknown", "", str(error).removeprefix(f"{path}: "))


def has_build_information(path: str) -> bool:
    """Did Go's linker (1.13 and newer) leave its mark? Tells a Go program that is refused from all others."""
    with Path(path).open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as content:
        at = content.find(_BUILD_INFORMATION)
        while at >= 0 and at % _BUILD_INFORMATION_ALIGN:
            at = content.find(_BUILD_INFORMATION, at + 1)
        return at >= 0


def scan(look: Callable[[str], GoBinary | None] = look_at) -> Scan:
    """Look at every process of this node. Processes that end meanwhile are left out. Raises OSError without
    /proc."""
    scanner = _Scanner(look, read_mounts())
    with closing(scanner.passive):
        found = [process for pid in running_pids() if (process := scanner.examine(pid))]
        scanner.passive.read()
        found = [replace(process, runtime=scanner.passive.state(process.pid)) for process in found]
    return Scan(
        processes=tuple(found),
        unreadable=scanner.unreadable,
        may_ptrace=bool(effective_capabilities() >> CAP_SYS_PTRACE & 1),
    )


class _Scanner:
    def __init__(self, look: Callable[[str], GoBinary | None], mounts: tuple[Mount, ...]) -> None:
        self._look = look
        self._mounts = mounts
        self._pods = PodIndex()
        self._binaries: dict[tuple[int, int], GoBinary | None] = {}
        self.passive = PassiveLevel(lambda _pid, _reason: None)
        self.unreadable = 0

    def examine(self, pid: int) -> GoProcess | None:
        """The process if it runs a Go program. Most don't, and most of those run a binary that was seen
        before."""
        try:
            file = Path(f"/proc/{pid}/exe").stat()
            if self._binaries.get((file.st_dev, file.st_ino), True) is None:
                return None
            with open_process(pid) as process:
                binary = self._binary_of(process)
                found = None if binary is None else self._describe(process, binary)
                if not process.still_same():
                    return None
                if binary and not isinstance(binary.runtime, str):
                    self.passive.watch(process, binary.runtime, process.load_bias())
                return found
        except (FileNotFoundError, ProcessLookupError, NotTraceable):
            pass  # a kernel thread, or it has gone
        except (OSError, PermissionDenied):
            self.unreadable += 1
        return None

    def _binary_of(self, process: Process) -> GoBinary | None:
        key = (process.identity.device, process.identity.inode)
        if key not in self._binaries:
            binary = self._look(process.exe_path)
            if not process.still_same():
                return None  # /proc/PID/exe may have led to another file meanwhile
            self._binaries[key] = binary
        return self._binaries[key]

    def _describe(self, process: Process, binary: GoBinary) -> GoProcess:
        membership = read_membership(process.pid, self._mounts)
        main, limit = membership.main, membership.cpu_limit()
        return GoProcess(
            pid=process.pid,
            name=process.name,
            exe=process.exe,
            go_version=binary.go_version,
            runtime=None,
            gomaxprocs_environment=_gomaxprocs(process.environment()),
            threads=process.thread_count(),
            cgroup_path=main.path if main else "",
            quota_cores=limit.cores if limit else None,
            throttling=membership.cpu_stat(),
            cpus=membership.cpuset(),
            memory_limit_bytes=membership.memory_limit_bytes(),
            owner=self._pods.owner_of_process(membership),
            level=binary.level,
            obstacle=binary.obstacle,
            levels=binary.levels,
            sampled_obstacle=binary.sampled_obstacle,
        )


def _gomaxprocs(environment: dict[str, str]) -> int | None:
    """What the runtime makes of the variable: a positive number counts, everything else is ignored."""
    text = environment.get("GOMAXPROCS", "")
    return int(text) if text.isdecimal() and text.isascii() and int(text) > 0 else None
