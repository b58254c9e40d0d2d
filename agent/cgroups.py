"""Control groups of a process: in v1, v2 and hybrid layouts, also from inside a cgroup namespace.

Where the hierarchies are mounted is read from /proc/self/mountinfo. A process is in one cgroup of every
hierarchy (/proc/PID/cgroup). Those that matter here are the one whose hierarchy carries the cpu controller,
since that is what throttles, and the one in cgroup2, whose id BPF reports (``bpf_get_current_cgroup_id``).
Ids are inode numbers and each hierarchy has its own, so only (hierarchy, id) names a cgroup. Processes that
were only ever put into v1 cgroups sit in the root of cgroup2, id 1.

Sources: cgroups(7), cgroup_namespaces(7), Documentation/admin-guide/cgroup-v2.rst, sched-bwc.rst.
"""

import os
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path

UNIFIED = "cgroup2"

_DELETED = " (deleted)"
_OCTAL_ESCAPE = re.compile(r"\\([0-7]{3})")
# conmon, CRI-O's and podman's monitor of a container, has a cgroup of its own that bears the container's id.
_OWNERS = re.compile(
    r"(?<![0-9a-z])pod(?P<pod>[0-9a-f]{8}[-_][0-9a-f]{4}[-_][0-9a-f]{4}[-_][0-9a-f]{4}[-_][0-9a-f]{12}|[0-9a-f]{32})"
    r"(?![0-9a-f])"
    r"|(?<![0-9a-f])(?<!conmon-)(?P<container>[0-9a-f]{64})(?![0-9a-f])"
)
# "No limit" in v1 is the largest number of whole pages (PAGE_COUNTER_MAX), which depends on the page size.
_NO_MEMORY_LIMIT_BYTES = 1 << 62
_MOST_BYTES = 4096  # the kernel gives a short file at once


@dataclass(frozen=True)
class Mount:
    """A mounted hierarchy, or a part of one. ``root`` is the cgroup that shows at ``point``, as
    /proc/self/mountinfo names it: relative to the reader's cgroup namespace, so it may begin with "/..".
    ``options`` are the controllers of a v1 hierarchy, or its name=, among other mount options."""

    unified: bool
    options: frozenset[str]
    device: int
    root: str
    point: str


@dataclass(frozen=True)
class Cgroup:
    """One cgroup. ``hierarchy`` is "cgroup2", or the controllers of the v1 hierarchy as /proc/PID/cgroup
    lists them ("cpu,cpuacct"). ``path`` is the name relative to the reader's cgroup namespace ("/../x" is
    outside of it). ``id`` is the inode number of the directory. ``levels`` are the directories from this
    cgroup up to the mount point; there are none, and ``id`` is 0, if the hierarchy isn't mounted where this
    process can see that cgroup."""

    hierarchy: str
    path: str
    id: int
    levels: tuple[str, ...]

    @property
    def key(self) -> tuple[str, int]:
        """What names this cgroup on this node."""
        return self.hierarchy, self.id


@dataclass(frozen=True)
class CpuStat:
    """CFS bandwidth counters of a cgroup since it was made. ``throttled_ns`` adds up over CPUs, so it can
    grow faster than the time that passes."""

    periods: int
    throttled_periods: int
    throttled_ns: int

    def __sub__(self, earlier: "CpuStat") -> "CpuStat":
        return CpuStat(
            self.periods - earlier.periods,
            self.throttled_periods - earlier.throttled_periods,
            self.throttled_ns - earlier.throttled_ns,
        )


@dataclass(frozen=True)
class CpuLimit:
    """The CPU quota that holds for a cgroup. ``own_cores`` is the cgroup's own, None if it has none.
    ``cores`` is the tightest of its own and its ancestors', ``directory`` where that one is set (the
    nearest of equal ones)."""

    own_cores: float | None
    cores: float
    directory: str

    def stat(self) -> CpuStat | None:
        """How much this limit throttled so far: of the level that sets it, since every level above and
        below that has a quota counts the same throttling again. None if that cgroup has gone."""
        return read_cpu_stat(self.directory)


@dataclass(frozen=True)
class ContainerRef:
    """What a cgroup path says about its owner; empty where it says nothing. ``pod_uid`` has dashes as in
    the API, except for static pods, whose uid is a bare hash. ``place`` is the path as far as the container,
    ``nested`` whether that lies inside another container."""

    pod_uid: str
    container_id: str
    place: str = field(default="", compare=False)
    nested: bool = field(default=False, compare=False)


@dataclass(frozen=True)
class Membership:
    """The cgroups of one process, one per hierarchy, in the order of /proc/PID/cgroup."""

    cgroups: tuple[Cgroup, ...]

    @property
    def unified(self) -> Cgroup | None:
        """The cgroup in the cgroup2 hierarchy."""
        return next((cgroup for cgroup in self.cgroups if cgroup.hierarchy == UNIFIED), None)

    @property
    def main(self) -> Cgroup | None:
        """The cgroup that stands for the process: of the hierarchy with the cpu controller, else of
        cgroup2."""
        return self.of_controller("cpu")

    def of_controller(self, controller: str) -> Cgroup | None:
        """The cgroup in the v1 hierarchy with this controller; the one in cgroup2 if no v1 hierarchy has
        it. Whether cgroup2 has it shows in whether its files exist."""
        own = (cgroup for cgroup in self.cgroups if controller in cgroup.hierarchy.split(","))
        return next(own, self.unified)

    def cpu_limit(self, quota_of: Callable[[str, str], float | None] | None = None) -> CpuLimit | None:
        """The CPU quota that holds for the process; None if no level has one. ``quota_of`` instead of
        :func:`read_quota_cores`, for whoever asks for many processes that have levels in common."""
        quota_of = quota_of or read_quota_cores
        cgroup = self.of_controller("cpu")
        if cgroup is None:
            return None
        quotas = [quota_of(directory, cgroup.hierarchy) for directory in cgroup.levels]
        limits = [(cores, depth) for depth, cores in enumerate(quotas) if cores is not None]
        if not limits:
            return None
        cores, depth = min(limits)
        return CpuLimit(own_cores=quotas[0], cores=cores, directory=cgroup.levels[depth])

    def cpu_stat(self) -> CpuStat | None:
        """Throttling so far by the quota that holds for the process; the counters of its own cgroup if
        there is no quota now. None without a cpu controller."""
        limit = self.cpu_limit()
        if limit is not None:
            return limit.stat()
        cgroup = self.of_controller("cpu")
        return read_cpu_stat(cgroup.levels[0]) if cgroup and cgroup.levels else None

    def cpuset(self) -> tuple[int, ...] | None:
        """The CPUs that the process's cgroup may use, ascending; None without a cpuset controller."""
        cgroup = self.of_controller("cpuset")
        if cgroup is None:
            return None
        name = "cpuset.cpus.effective" if cgroup.hierarchy == UNIFIED else "cpuset.effective_cpus"
        # In cgroup2 only the levels to which the controller was passed down have the file.
        texts = (_read(directory, name) for directory in cgroup.levels)
        return next((parse_cpu_list(text) for text in texts if text), None)

    def memory_limit_bytes(self) -> int | None:
        """The tightest memory limit of the process's cgroup and its ancestors; None if there is none."""
        cgroup = self.of_controller("memory")
        if cgroup is None:
            return None
        name = "memory.max" if cgroup.hierarchy == UNIFIED else "memory.limit_in_bytes"
        texts = (_read(directory, name) for directory in cgroup.levels)
        limits = [int(text) for text in texts if text and text != "max"]
        return min((limit for limit in limits if limit < _NO_MEMORY_LIMIT_BYTES), default=None)


def read_mounts(mountinfo: str = "/proc/self/mountinfo") -> tuple[Mount, ...]:
    """The mounted cgroup hierarchies, those first that show most of their hierarchy. Raises OSError."""
    return parse_mountinfo(os.fsdecode(Path(mountinfo).read_bytes()))


def read_membership(pid: int, mounts: tuple[Mount, ...], proc: str = "/proc") -> Membership:
    """The cgroups of a process. Raises FileNotFoundError or ProcessLookupError if it has gone."""
    text = os.fsdecode(Path(f"{proc}/{pid}/cgroup").read_bytes())
    return Membership(tuple(_find(hierarchy, path, mounts) for hierarchy, path in parse_cgroup(text)))


def layout(mounts: tuple[Mount, ...]) -> str:
    """Which kind of node this is: "v1", "v2", "hybrid" (both are mounted) or "none"."""
    unified = any(mount.unified for mount in mounts)
    legacy = any(not mount.unified for mount in mounts)
    return {(True, True): "hybrid", (True, False): "v2", (False, True): "v1"}.get((unified, legacy), "none")


def container_of(path: str) -> ContainerRef:
    """Pod UID and container id in a cgroup path, as the cgroupfs and systemd drivers of the container
    runtimes write them.

    Of pods that contain each other the outermost counts, since everything below a pod's container may have
    been made by that container; what contains the pod is a node that is itself a container, as in kind. Where
    there is no pod, the innermost container counts."""
    pod_uid, container_id, end, nested = "", "", 0, False
    for match in _OWNERS.finditer(path):
        if match["pod"]:
            if not pod_uid:
                pod_uid, nested, container_id = match["pod"].replace("_", "-"), bool(container_id), ""
        elif not (pod_uid and container_id):
            nested, container_id, end = nested or bool(container_id), match["container"], match.end()
    place = path[:end] + path[end:].partition("/")[0] if container_id else ""
    return ContainerRef(pod_uid, container_id, place, nested)


def parse_mountinfo(text: str) -> tuple[Mount, ...]:
    """The cgroup mounts in the text of /proc/PID/mountinfo, those first that show most of their
    hierarchy."""
    mounts = []
    for line in text.split("\n"):
        ours, separator, theirs = line.partition(" - ")
        if not separator:
            continue
        kind, _, options = [*theirs.split(" "), "", ""][:3]
        if kind in ("cgroup", "cgroup2"):
            device, root, point = ours.split(" ")[2:5]
            major, _, minor = device.partition(":")
            mounts.append(
                Mount(
                    unified=kind == "cgroup2",
                    options=frozenset(options.split(",")),
                    device=os.makedev(int(major), int(minor)),
                    root=_unescape(root),
                    point=_unescape(point),
                )
            )
    return tuple(sorted(mounts, key=_parts_hidden))


def parse_cgroup(text: str) -> Iterator[tuple[str, str]]:
    """(hierarchy, path) of each line of /proc/PID/cgroup."""
    for line in text.split("\n"):
        number, _, rest = line.partition(":")
        controllers, separator, path = rest.partition(":")
        if separator:
            yield (UNIFIED if number == "0" else controllers), path


def parse_cpu_list(text: str) -> tuple[int, ...]:
    """CPU numbers of a list such as "0-3,8"; ascending, as the kernel writes it."""
    cpus: list[int] = []
    for item in filter(None, text.strip().split(",")):
        first, _, last = item.partition("-")
        cpus.extend(range(int(first), int(last or first) + 1))
    return tuple(cpus)


def _find(hierarchy: str, path: str, mounts: tuple[Mount, ...]) -> Cgroup:
    wanted = {*hierarchy.split(",")}
    candidates = [
        m for m in mounts if (m.unified if hierarchy == UNIFIED else not m.unified and wanted <= m.options)
    ]
    for mount in candidates:
        names = _names_below(mount, path, _namespace_root_inode(candidates))
        if names is None:
            continue
        levels = [str(Path(mount.point, *names[:depth])) for depth in range(len(names), -1, -1)]
        inode = _inode(levels[0], mount)
        if inode is not None:
            return Cgroup(hierarchy, path, inode, tuple(levels))
    # The mark of a removed cgroup, in which only exited processes can be.
    return Cgroup(hierarchy, path.removesuffix(_DELETED), 0, ())


def _names_below(mount: Mount, path: str, namespace_root_inode: int | None) -> list[str] | None:
    """The directory names from a mount point down to the cgroup ``path``; None if it isn't below that
    mount.

    Both the mount's root and ``path`` are relative to the root of our cgroup namespace, and the kernel
    writes the shortest way: as many ".." as needed, then names. Of the levels between the two, those that
    lead to the namespace's root are nowhere named; they are found by its inode number.
    """
    root_up, root_names = _split(mount.root)
    path_up, path_names = _split(path)
    if root_up == path_up:
        inside = path_names[: len(root_names)] == root_names
        return path_names[len(root_names) :] if inside else None
    if root_up < path_up or root_names or namespace_root_inode is None:
        return None
    to_namespace_root = _descend_to(mount.point, root_up, namespace_root_inode)
    return None if to_namespace_root is None else [*to_namespace_root[: root_up - path_up], *path_names]


def _namespace_root_inode(mounts: list[Mount]) -> int | None:
    """Inode of our cgroup namespace's root in a hierarchy, from a mount of the hierarchy that shows just
    it."""
    inodes = (_inode(mount.point, mount) for mount in mounts if mount.root == "/")
    return next((inode for inode in inodes if inode is not None), None)


def _inode(directory: str, mount: Mount) -> int | None:
    """Inode number of a directory of this mount; None if it doesn't exist or another mount hides it."""
    try:
        found = Path(directory).stat()
    except OSError:
        return None
    return found.st_ino if found.st_dev == mount.device else None


@lru_cache(maxsize=64)
def _descend_to(directory: str, depth: int, inode: int) -> tuple[str, ...] | None:
    """Names on the way from ``directory`` to the one ``depth`` levels below it that has this inode
    number."""
    try:
        with os.scandir(directory) as entries:
            children = [
                (entry.name, entry.inode()) for entry in entries if entry.is_dir(follow_symlinks=False)
            ]
    except OSError:
        return None
    for name, number in children:
        if depth == 1:
            if number == inode:
                return (name,)
            continue
        rest = _descend_to(f"{directory}/{name}", depth - 1, inode)
        if rest is not None:
            return (name, *rest)
    return None


def _parts_hidden(mount: Mount) -> tuple[int, int]:
    up, names = _split(mount.root)
    return -up, len(names)


def _split(path: str) -> tuple[int, list[str]]:
    """Number of leading ".." and the names after them."""
    parts = [part for part in path.split("/") if part]
    up = next((i for i, part in enumerate(parts) if part != ".."), len(parts))
    return up, parts[up:]


def read_quota_cores(directory: str, hierarchy: str) -> float | None:
    """The CPU quota of a cgroup directory alone, in cores; None without one."""
    if hierarchy == UNIFIED:
        quota, _, period = (_read(directory, "cpu.max") or "max").partition(" ")
        return None if quota == "max" else int(quota) / int(period)
    quota_us = int(_read(directory, "cpu.cfs_quota_us") or -1)
    period_us = int(_read(directory, "cpu.cfs_period_us") or -1) if quota_us >= 0 else -1
    return quota_us / period_us if period_us > 0 else None


def read_cpu_stat(directory: str) -> CpuStat | None:
    text = _read(directory, "cpu.stat") or ""
    values = {
        name: int(value) for name, _, value in (line.partition(" ") for line in text.split("\n")) if value
    }
    if (
        "nr_periods" not in values
    ):  # cgroup2 shows cpu.stat also where the controller isn't, without these lines
        return None
    throttled_ns = values["throttled_time"] if "throttled_time" in values else values["throttled_usec"] * 1000
    return CpuStat(values["nr_periods"], values["nr_throttled"], throttled_ns)


def _read(directory: str, name: str) -> str | None:
    """A file of a cgroup; None if the cgroup has gone or doesn't have it. A scrape reads hundreds."""
    try:
        return read_at_once(f"{directory}/{name}", _MOST_BYTES).decode().strip()
    except OSError:
        return None


def read_at_once(path: str, most_bytes: int) -> bytes:
    """A file of the kernel's that gives all it has to one read, without Python's file objects, which take longer than
    that. Raises OSError."""
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        return os.read(descriptor, most_bytes)
    finally:
        os.close(descriptor)


def _unescape(field: str) -> str:

    return _OCTAL_ESCAPE.sub(lambda match: chr(int(match[1], 8)), field)
