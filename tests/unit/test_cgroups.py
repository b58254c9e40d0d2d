"""cgroups over trees laid out as the kernel lays them out, and over this machine's own."""

import os
from dataclasses import replace
from pathlib import Path

import pytest

from schedtrace.cgroups import (
    Cgroup,
    ContainerRef,
    CpuStat,
    Membership,
    Mount,
    container_of,
    layout,
    parse_cgroup,
    parse_cpu_list,
    parse_mountinfo,
    read_membership,
    read_mounts,
)

UID = "0f6a3c7e-5f0d-4c1e-9b3a-2d8e7f6a5b4c"
SLICE = "pod" + UID.replace("-", "_") + ".slice"
CONTAINER = "4ab7" * 16
SANDBOX = "9e01" * 16


class Tree:
    """Hierarchies under a folder, with the mountinfo and /proc/PID/cgroup that go with them."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.mountinfo = ["22 27 0:21 / /proc rw,relatime - proc proc rw"]
        device = folder.stat().st_dev
        self.device = f"{os.major(device)}:{os.minor(device)}"

    def mount(self, point: str, kind: str, options: str = "", root: str = "/") -> Path:
        path = self.folder / point
        path.mkdir(parents=True, exist_ok=True)
        escaped = str(path).replace("\\", "\\134").replace(" ", "\\040")
        self.mountinfo.append(
            f"31 23 {self.device} {root} {escaped} rw shared:9 - {kind} cgroup rw{options and ','}{options}"
        )
        return path

    def write(self, directory: Path, **files: str) -> None:
        directory.mkdir(parents=True, exist_ok=True)
        for name, text in files.items():
            (directory / name.replace("__", ".")).write_text(text + "\n")

    def mounts(self) -> tuple[Mount, ...]:
        return parse_mountinfo("\n".join(self.mountinfo) + "\n")

    def membership(self, cgroup: str) -> Membership:
        (self.folder / "7").mkdir(exist_ok=True)
        (self.folder / "7/cgroup").write_text(cgroup)
        return read_membership(7, self.mounts(), proc=str(self.folder))


@pytest.fixture
def tree(tmp_path: Path) -> Tree:
    return Tree(tmp_path)


def test_v1_pod_in_a_co_mounted_cpu_hierarchy(tree: Tree) -> None:
    cpu = tree.mount("cpu,cpuacct", "cgroup", "cpu,cpuacct")
    memory = tree.mount("memory", "cgroup", "memory")
    cpuset = tree.mount("cpuset", "cgroup", "cpuset")
    pod, path = "kubepods/burstable/pod" + UID, f"kubepods/burstable/pod{UID}/{CONTAINER}"
    no_quota = {"cpu__cfs_quota_us": "-1", "cpu__cfs_period_us": "100000"}
    tree.write(cpu, **no_quota)
    tree.write(cpu / "kubepods/burstable", **no_quota)
    tree.write(cpu / pod, cpu__cfs_quota_us="70000", cpu__cfs_period_us="100000", cpu__stat="nr_periods 9")
    tree.write(
        cpu / path,
        cpu__cfs_quota_us="25000",
        cpu__cfs_period_us="50000",
        cpu__stat="nr_periods 33\nnr_throttled 32\nthrottled_time 3683796897\nnr_bursts 0",
    )
    tree.write(memory, memory__limit_in_bytes="9223372036854771712")
    tree.write(memory / pod, memory__limit_in_bytes="536870912")
    tree.write(memory / path, memory__limit_in_bytes="268435456")
    tree.write(cpuset / path, cpuset__effective_cpus="0-2,7")
    membership = tree.membership(
        f"12:memory:/{path}\n4:cpu,cpuacct:/{path}\n3:cpuset:/{path}\n1:name=systemd:/\n"
    )

    assert layout(tree.mounts()) == "v1"
    assert membership.unified is None
    main = membership.main
    assert main is not None
    assert main.key == ("cpu,cpuacct", (cpu / path).stat().st_ino)
    assert main.path == "/" + path
    limit = membership.cpu_limit()
    assert limit is not None
    assert (limit.own_cores, limit.cores, limit.directory) == (0.5, 0.5, str(cpu / path))
    assert limit.stat() == membership.cpu_stat() == CpuStat(33, 32, 3683796897)
    assert membership.memory_limit_bytes() == 268435456
    assert membership.cpuset() == (0, 1, 2, 7)


def test_v2_pod_whose_pod_level_is_the_tighter_one(tree: Tree) -> None:
    root = tree.mount("cgroup", "cgroup2", "nsdelegate")
    slice_ = f"kubepods.slice/kubepods-{SLICE}"
    path = f"{slice_}/cri-containerd-{CONTAINER}.scope"
    tree.write(root, cpu__stat="usage_usec 5", cpuset__cpus__effective="0-15")
    tree.write(
        root / "kubepods.slice", cpu__max="max 100000", memory__max="max", cpuset__cpus__effective="4-7"
    )
    pod_stat = "usage_usec 9\nnr_periods 80\nnr_throttled 20\nthrottled_usec 1500000"
    tree.write(root / slice_, cpu__max="150000 100000", cpu__stat=pod_stat, memory__max="1048576")
    tree.write(root / path, cpu__max="200000 100000", cpu__stat="usage_usec 9\nnr_periods 80\nnr_throttled 0")
    membership = tree.membership(f"0::/{path}\n")

    assert layout(tree.mounts()) == "v2"
    assert membership.unified == membership.main == membership.cgroups[0]
    assert membership.cgroups[0].key == ("cgroup2", (root / path).stat().st_ino)
    limit = membership.cpu_limit()
    assert limit is not None
    assert (limit.own_cores, limit.cores, limit.directory) == (2.0, 1.5, str(root / slice_))
    assert membership.cpu_stat() == CpuStat(80, 20, 1_500_000_000)
    assert membership.memory_limit_bytes() == 1048576
    assert membership.cpuset() == (4, 5, 6, 7)


def test_equal_quotas_are_counted_at_the_container_and_only_there(tree: Tree) -> None:
    root = tree.mount("cgroup", "cgroup2")
    stat = "nr_periods {0}\nnr_throttled {0}\nthrottled_usec {0}"
    tree.write(root / "pod", cpu__max="20000 100000", cpu__stat=stat.format(16))
    tree.write(root / "pod/c", cpu__max="20000 100000", cpu__stat=stat.format(23))
    assert tree.membership("0::/pod/c\n").cpu_stat() == CpuStat(23, 23, 23000)


def test_v2_level_without_the_cpu_controller_has_no_counters(tree: Tree) -> None:
    root = tree.mount("cgroup", "cgroup2")
    tree.write(root / "leaf", cpu__stat="usage_usec 1\nuser_usec 1\nsystem_usec 0")
    membership = tree.membership("0::/leaf\n")
    assert membership.cpu_limit() is None
    assert membership.cpu_stat() is None
    assert membership.memory_limit_bytes() is None
    assert membership.cpuset() is None


def test_hybrid_takes_each_controller_from_the_hierarchy_that_has_it(tree: Tree) -> None:
    cpu, unified = tree.mount("cpu", "cgroup", "cpu"), tree.mount("unified", "cgroup2")
    tree.write(cpu / "a", cpu__cfs_quota_us="10000", cpu__cfs_period_us="100000")
    tree.write(unified / "b", cpu__max="90000 100000", memory__max="4096")
    membership = tree.membership("9:name=systemd:/s\n2:cpu:/a\n0::/b\n")
    assert layout(tree.mounts()) == "hybrid"
    main, in_unified = membership.main, membership.unified
    assert main is not None
    assert in_unified is not None
    assert (main.hierarchy, main.path) == ("cpu", "/a")
    assert in_unified.key == ("cgroup2", (unified / "b").stat().st_ino)
    limit = membership.cpu_limit()
    assert limit is not None
    assert limit.cores == 0.1
    assert membership.memory_limit_bytes() == 4096
    # the systemd hierarchy isn't mounted here
    assert membership.cgroups[0] == Cgroup("name=systemd", "/s", 0, ())


def test_no_cgroups_at_all(tree: Tree) -> None:
    membership = tree.membership("")
    assert layout(tree.mounts()) == "none"
    assert membership.main is None
    assert membership.cpu_limit() is None
    assert membership.cpu_stat() is None
    assert membership.cpuset() is None


def test_a_part_of_a_hierarchy_mounted_shows_that_part_only(tree: Tree) -> None:
    point = tree.mount("cgroup", "cgroup2", root="/kubepods/poda")
    tree.write(point / "c1", cpu__max="50000 100000")
    inside, outside = tree.membership("0::/kubepods/poda/c1\n"), tree.membership("0::/kubepods/podb/c1\n")
    assert inside.cgroups[0].levels == (str(point / "c1"), str(point))
    assert outside.cgroups[0] == Cgroup("cgroup2", "/kubepods/podb/c1", 0, ())
    assert outside.cpu_limit() is None
    assert outside.cpu_stat() is None


def test_a_mount_hidden_by_another_is_not_taken(tree: Tree) -> None:
    point = tree.mount("cgroup", "cgroup2")
    tree.write(point / "c1")
    hidden = tuple(replace(mount, device=mount.device + 1) for mount in tree.mounts())
    tree.membership("0::/c1\n")
    assert read_membership(7, hidden, proc=str(tree.folder)).cgroups[0].id == 0


def namespaced(tree: Tree) -> tuple[Path, Path]:
    """A container with a cgroup namespace of its own, /kubepods/poda/me, that also sees the node's."""
    host = tree.mount("host cgroup", "cgroup2", root="/../../..")
    for path in ("kubepods/poda/me/sub", "kubepods/poda/sibling", "kubepods/podb/other", "system/x/y"):
        tree.write(host / path)
    own = tree.mount("own", "cgroup2")
    own.rmdir()
    own.symlink_to(host / "kubepods/poda/me")  # shows the same directory, as a second mount does
    return host, own


@pytest.mark.parametrize(
    ("path", "directory"),
    [
        ("/", "kubepods/poda/me"),
        ("/sub", "kubepods/poda/me/sub"),
        ("/../sibling", "kubepods/poda/sibling"),
        ("/../../podb/other", "kubepods/podb/other"),
        ("/../../../system/x/y", "system/x/y"),
        ("/../../..", "."),
    ],
)
def test_from_inside_a_cgroup_namespace(tree: Tree, path: str, directory: str) -> None:
    host, _ = namespaced(tree)
    cgroup = tree.membership(f"0::{path}\n").cgroups[0]
    assert cgroup.id == (host / directory).stat().st_ino
    assert cgroup.levels[0] == str(host / directory)
    assert cgroup.levels[-1] == str(host)


def test_from_inside_a_cgroup_namespace_without_the_hosts_mount(tree: Tree) -> None:
    _, own = namespaced(tree)
    tree.mountinfo = [line for line in tree.mountinfo if "host" not in line]
    assert tree.membership("0::/sub\n").cgroups[0].levels == (str(own / "sub"), str(own))
    assert tree.membership("0::/../sibling\n").cgroups[0] == Cgroup("cgroup2", "/../sibling", 0, ())


def test_a_removed_cgroup_has_no_directory(tree: Tree) -> None:
    point = tree.mount("cgroup", "cgroup2")
    assert tree.membership("0::/gone (deleted)\n").cgroups[0] == Cgroup("cgroup2", "/gone", 0, ())
    tree.write(point / "odd (deleted)")
    assert tree.membership("0::/odd (deleted)\n").cgroups[0].id == (point / "odd (deleted)").stat().st_ino


def test_lines_of_proc_pid_cgroup() -> None:
    text = "5:cpu,cpuacct:/system.slice/containerd.service/kubepods-pod1.slice:cri-containerd:abc\n0::/a:b\n"
    assert list(parse_cgroup(text)) == [
        ("cpu,cpuacct", "/system.slice/containerd.service/kubepods-pod1.slice:cri-containerd:abc"),
        ("cgroup2", "/a:b"),
    ]


def test_cpu_lists() -> None:
    assert parse_cpu_list("0-3,8,10-11\n") == (0, 1, 2, 3, 8, 10, 11)
    assert parse_cpu_list("\n") == ()


@pytest.mark.parametrize(
    ("path", "pod", "container"),
    [
        (f"/kubepods/burstable/pod{UID}/{CONTAINER}", UID, CONTAINER),
        (f"/kubepods/pod{UID}/{CONTAINER}", UID, CONTAINER),
        (
            f"/kubepods.slice/kubepods-besteffort.slice/kubepods-besteffort-{SLICE}/cri-containerd-{CONTAINER}.scope",
            UID,
            CONTAINER,
        ),
        (
            f"/system.slice/containerd.service/kubepods-burstable-{SLICE}:cri-containerd:{CONTAINER}",
            UID,
            CONTAINER,
        ),
        (
            f"/kubepods.slice/kubepods-{SLICE}/crio-{CONTAINER}.scope/container",
            UID,
            CONTAINER,
        ),
        (f"/kubepods/burstable/podce1eeab6{'0' * 24}/{CONTAINER}", "ce1eeab6" + "0" * 24, CONTAINER),
        (f"/docker/{SANDBOX}/kubelet/kubepods/pod{UID}/{CONTAINER}", UID, CONTAINER),
        (f"/../../pod{UID}/{CONTAINER}", UID, CONTAINER),
        (f"/system.slice/docker-{CONTAINER}.scope", "", CONTAINER),
        (f"/machine.slice/libpod-{CONTAINER}.scope", "", CONTAINER),
        ("/system.slice/containerd.service", "", ""),
        (f"/system.slice/docker-{SANDBOX}.scope/docker/{CONTAINER}", "", CONTAINER),
        (f"/kubepods/burstable/pod{UID}/{CONTAINER}/docker/{SANDBOX}", UID, CONTAINER),
        (f"/kubepods/burstable/pod{UID}/{CONTAINER}/kubepods/pod{'0' * 32}/{SANDBOX}", UID, CONTAINER),
        (f"/kubepods/burstable/pod{UID}", UID, ""),
        (f"/kubepods.slice/kubepods-{SLICE}/crio-conmon-{CONTAINER}.scope", UID, ""),
        (f"/machine.slice/libpod-conmon-{CONTAINER}.scope", "", ""),
        (f"/x/{CONTAINER}0", "", ""),
        ("/tripod" + "0" * 32, "", ""),
        ("/", "", ""),
    ],
)
def test_what_a_path_says_about_its_owner(path: str, pod: str, container: str) -> None:
    assert container_of(path) == ContainerRef(pod, container)


@pytest.mark.parametrize(
    ("path", "place", "nested"),
    [
        ("/kubepods/pod{uid}/{a}", "/kubepods/pod{uid}/{a}", False),
        ("/kubepods/pod{uid}/crio-{a}.scope/container/x", "/kubepods/pod{uid}/crio-{a}.scope", False),
        ("/docker/{b}/kubelet/kubepods/pod{uid}/{a}/x", "/docker/{b}/kubelet/kubepods/pod{uid}/{a}", True),
        ("/docker/{b}/docker/{a}", "/docker/{b}/docker/{a}", True),
        ("/kubepods/pod{uid}/{a}/docker/{b}", "/kubepods/pod{uid}/{a}", False),
        ("/system.slice/nginx.service", "", False),
    ],
)
def test_where_a_container_is(path: str, place: str, nested: bool) -> None:
    names = {"uid": UID, "a": CONTAINER, "b": SANDBOX}
    ref = container_of(path.format(**names))
    assert (ref.place, ref.nested) == (place.format(**names), nested)


def test_this_machine() -> None:
    """Ids and paths against what the shell would say: /proc/self/cgroup and the directory's inode number."""
    membership = read_membership(os.getpid(), read_mounts())
    lines = [line.split(":", 2) for line in Path("/proc/self/cgroup").read_text().splitlines()]
    assert [(c.hierarchy, c.path) for c in membership.cgroups] == [
        (controllers or "cgroup2", path) for _, controllers, path in lines
    ]
    for cgroup in membership.cgroups:
        for level in cgroup.levels:
            assert Path(level, "cgroup.procs").exists()
        if cgroup.levels:
            assert cgroup.id == Path(cgroup.levels[0]).stat().st_ino
            assert str(os.getpid()) in Path(cgroup.levels[0], "cgroup.procs").read_text().split()
    cpus = membership.cpuset()
    assert cpus is None or set(os.sched_getaffinity(0)) <= set(cpus)
