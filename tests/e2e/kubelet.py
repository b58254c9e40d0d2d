"""What the kubelet does for a pod on its node, and no more: cgroups, sandbox, containers, log links, restarts, removal.

Paths and names are those of kubernetes/kubernetes: pkg/kubelet/cm (cgroups by QoS class, a quota on the pod if all of
its containers have one), pkg/kubelet/kuberuntime/legacy.go (links). Links and logs lie under a log root of ours.
"""

from __future__ import annotations

import json
import os
import secrets
import select
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import Any, TypeVar

from tests.e2e.containerd import Containerd, hierarchies, kill_and_remove_cgroup
from tests.e2e.cri import Limits, Mount, Sandbox, Security

TOKEN_VARIABLE = "SCHEDTRACE_E2E"
"""Set in the environment of every process of these tests, so that agents know which to look at."""
WAIT_SECONDS = 60.0
DEFAULT_SECURITY = Security()
_QOS_PARENT = {"guaranteed": "/kubepods", "burstable": "/kubepods/burstable", "besteffort": "/kubepods/besteffort"}
_Value = TypeVar("_Value")


def wait_for(look: Callable[[], _Value | None], what: str, seconds: float = WAIT_SECONDS) -> _Value:
    """The first value of ``look`` that isn't None or False; AssertionError if there is none in time."""
    deadline = time.monotonic() + seconds
    while True:
        value = look()
        if value is not None and value is not False:
            return value
        assert time.monotonic() < deadline, f"not in {seconds:g} s: {what}"
        time.sleep(0.05)


class Conversation:
    """Both ends of a workload's protocol, through FIFOs in a folder that its container sees as /control."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        folder.mkdir(parents=True)
        folder.chmod(0o777)
        for name in ("in", "out"):
            os.mkfifo(folder / name, 0o666)
            (folder / name).chmod(0o666)
        # For reading and writing, so that neither side waits for the other to open it, nor sees its end in between.
        self._in = os.open(folder / "in", os.O_RDWR | os.O_NONBLOCK)
        self._out = os.open(folder / "out", os.O_RDWR | os.O_NONBLOCK)
        self._pending = b""

    def say(self, word: str) -> None:
        os.write(self._in, f"{word}\n".encode())

    def expect(self, event: str, seconds: float = WAIT_SECONDS) -> dict[str, Any]:
        """The facts of the workload's next line, which must be of that event."""
        deadline = time.monotonic() + seconds
        while b"\n" not in self._pending:
            left = deadline - time.monotonic()
            assert left > 0, f"the workload doesn't say {event!r} in {seconds:g} s"
            assert select.select([self._out], [], [], left)[0], f"the workload doesn't say {event!r} in {seconds:g} s"
            self._pending += os.read(self._out, 65536)
        line, self._pending = self._pending.split(b"\n", 1)
        facts = dict(json.loads(line))
        assert facts["event"] == event, facts
        return facts

    def close(self) -> None:
        """Close both: for the workload that is the end of its input, and it ends."""
        os.close(self._in)
        os.close(self._out)


@dataclass(frozen=True)
class ContainerSpec:
    """One container of a pod. ``talks``: it follows the workloads' protocol, through the image's ``/stage``."""

    name: str
    image: str
    arguments: tuple[str, ...] = ()
    cpu_cores: float | None = None
    memory_bytes: int = 0
    talks: bool = True
    security: Security = DEFAULT_SECURITY
    mounts: tuple[Mount, ...] = ()


class Container:
    """One run of a container: a restart makes a new one."""

    def __init__(
        self, spec: ContainerSpec, container_id: str, cgroup: str, link: Path, talk: Conversation | None
    ) -> None:
        self.spec, self.id, self.cgroup, self.link, self._talk = spec, container_id, cgroup, link, talk

    @property
    def talk(self) -> Conversation:
        assert self._talk, f"{self.spec.name} doesn't talk"
        return self._talk

    @property
    def pids(self) -> list[int]:
        """Its processes, as the node numbers them."""
        return [int(pid) for pid in (cpu_hierarchy() / self.cgroup.lstrip("/") / "cgroup.procs").read_text().split()]

    def cpu_statistics(self) -> dict[str, int]:
        """cpu.stat of its cgroup."""
        lines = (cpu_hierarchy() / self.cgroup.lstrip("/") / "cpu.stat").read_text().splitlines()
        return {key: int(value) for key, value in (line.split() for line in lines)}

    @contextmanager
    def frozen(self) -> Iterator[None]:
        """Its processes stand still for as long as the block."""
        state = (
            next(path for path in hierarchies() if path.name == "freezer") / self.cgroup.lstrip("/") / "freezer.state"
        )
        state.write_text("FROZEN")
        try:
            wait_for(lambda: state.read_text().strip() == "FROZEN", f"{self.spec.name} to freeze")
            yield
        finally:
            state.write_text("THAWED")

    def throttled_seconds(self) -> float:
        """How long its limit held CPUs back."""
        statistics = self.cpu_statistics()
        if "throttled_time" in statistics:
            return statistics["throttled_time"] / 1e9
        return statistics["throttled_usec"] / 1e6


class Pod:
    """A pod that runs."""

    def __init__(self, kubelet: Kubelet, namespace: str, name: str, uid: str, cgroup: str, sandbox: Sandbox) -> None:
        self.kubelet, self.namespace, self.name, self.uid = kubelet, namespace, name, uid
        self.cgroup, self.sandbox = cgroup, sandbox
        self.containers: dict[str, Container] = {}
        self._attempts: dict[str, Iterator[int]] = {}
        self._talks: dict[str, Conversation] = {}

    def __getitem__(self, container: str) -> Container:
        return self.containers[container]

    @property
    def log_directory(self) -> Path:
        return self.kubelet.log_root / "pods" / f"{self.namespace}_{self.name}_{self.uid}"

    def start(self, spec: ContainerSpec) -> Container:
        """Make and start a container, or its next run; then the link, as the kubelet does."""
        attempt = next(self._attempts.setdefault(spec.name, count()))
        mounts = list(spec.mounts)
        if spec.talks:
            folder = self.kubelet.containerd.root / "control" / self.uid / spec.name
            talk = self._talks.get(spec.name) or self._talks.setdefault(spec.name, Conversation(folder))
            mounts.append(Mount(str(talk.folder), "/control"))
        quota_us = 0 if spec.cpu_cores is None else int(spec.cpu_cores * 100_000)
        cri = self.kubelet.containerd.cri
        (self.log_directory / spec.name).mkdir(parents=True, exist_ok=True)
        container_id = cri.create_container(
            self.sandbox,
            spec.name,
            attempt,
            spec.image,
            list(spec.arguments),
            env={TOKEN_VARIABLE: self.kubelet.token},
            mounts=mounts,
            limits=Limits(quota_us, memory_bytes=spec.memory_bytes),
            security=spec.security,
        )
        cri.start_container(container_id)
        link = self.kubelet.link(self.namespace, self.name, self.uid, spec.name, container_id, attempt)
        talking = self._talks.get(spec.name) if spec.talks else None
        container = Container(spec, container_id, f"{self.cgroup}/{container_id}", link, talking)
        self.containers[spec.name] = container
        return container

    def restart(self, name: str) -> Container:
        """A container has ended: the next run of it, and the one before goes."""
        dead = self.containers[name]
        container = self.start(dead.spec)
        self.kubelet.containerd.cri.remove_container(dead.id)
        dead.link.unlink()
        return container

    def exit_code(self, name: str) -> int | None:
        """Of a container's present run; None while it hasn't ended."""
        return self.kubelet.containerd.cri.container_exit_code(self.containers[name].id)

    def log(self, name: str) -> list[str]:
        """The lines that a container's present run has written, without what the runtime puts before each."""
        file = max((self.log_directory / name).glob("*.log"), key=lambda path: int(path.stem))
        return [line.split(" ", 3)[3] for line in file.read_text(errors="replace").splitlines()]

    def wait_for_exit(self, name: str, seconds: float = WAIT_SECONDS) -> int:
        """The exit code of a container's present run."""
        cri = self.kubelet.containerd.cri
        container_id = self.containers[name].id
        return wait_for(lambda: cri.container_exit_code(container_id), f"the end of {self.name}/{name}", seconds)

    def remove(self) -> None:
        """The pod is deleted: containers and cgroups. The links go when the next one is deleted: the kubelet, too, does
        that later."""
        self.kubelet.containerd.cri.remove_sandbox(self.sandbox.id)
        kill_and_remove_cgroup(self.cgroup.lstrip("/"))
        for link in self.kubelet.old_links:
            link.unlink(missing_ok=True)
        self.kubelet.old_links = [container.link for container in self.containers.values()]
        for talk in self._talks.values():
            talk.close()
        self._talks.clear()
        self.kubelet.pods.remove(self)


class Kubelet:
    """Makes pods. ``log_root`` stands for the node's /var/log."""

    def __init__(self, containerd: Containerd, token: str) -> None:
        self.containerd, self.token = containerd, token
        self.log_root = containerd.root / "log"
        (self.log_root / "containers").mkdir(parents=True)
        self.pods: list[Pod] = []
        self.old_links: list[Path] = []
        self._uids = count(1)

    def new_uid(self) -> str:
        """The UID of a new pod; all of one run begin alike."""
        return f"{self.token}-0000-4000-8000-{next(self._uids):012x}"

    def run(
        self,
        namespace: str,
        name: str,
        specs: Sequence[ContainerSpec],
        *,
        qos: str = "burstable",
        parent: str | None = None,
        host_pid: bool = False,
    ) -> Pod:
        """Run a pod. ``parent``: its cgroup where that isn't what the cgroupfs driver makes of UID and QoS class;
        "{uid}" in it is the UID, "{uid_}" the same with underscores."""
        uid = self.new_uid()
        path = (parent or f"{_QOS_PARENT[qos]}/pod{{uid}}").format(uid=uid, uid_=uid.replace("-", "_"))
        self.will_remove(path)
        limits = [spec.cpu_cores for spec in specs]
        make_cgroup(path, None if None in limits else sum(limit or 0 for limit in limits))
        logs = self.log_root / "pods" / f"{namespace}_{name}_{uid}"
        logs.mkdir(parents=True)
        sandbox = self.containerd.cri.run_sandbox(namespace, name, uid, path, logs, host_pid=host_pid)
        pod = Pod(self, namespace, name, uid, path, sandbox)
        self.pods.append(pod)
        for spec in specs:
            pod.start(spec)
        return pod

    @contextmanager
    def pod(self, namespace: str, name: str, specs: Sequence[ContainerSpec], **how: Any) -> Iterator[Pod]:
        """A pod for as long as the block."""
        pod = self.run(namespace, name, specs, **how)
        try:
            yield pod
        finally:
            if pod in self.pods:
                pod.remove()

    def will_remove(self, cgroup: str) -> None:
        """Note a cgroup that has to go at the end, whatever happens."""
        with (self.containerd.root / "cgroups").open("a") as file:
            file.write(f"{cgroup}\n")

    def link(self, namespace: str, pod: str, uid: str, container: str, container_id: str, attempt: int = 0) -> Path:
        """The link that tells whose a container is."""
        link = self.log_root / "containers" / f"{pod}_{namespace}_{container}-{container_id}.log"
        link.symlink_to(self.log_root / "pods" / f"{namespace}_{pod}_{uid}" / container / f"{attempt}.log")
        return link

    @contextmanager
    def bare_container(self, image: str, arguments: Sequence[str], cgroup: str) -> Iterator[tuple[str, Conversation]]:
        """A container that no CRI knows of, in exactly that cgroup ("{id}" in it is its id): its id, and how to talk to
        it."""
        container_id = secrets.token_hex(32)
        path = cgroup.format(id=container_id)
        self.will_remove(path)
        make_cgroup(path, None)
        talk = Conversation(self.containerd.root / "control" / container_id)
        ctr = self.containerd.ctr
        mount = f"type=bind,src={talk.folder},dst=/control,options=rbind:rw"
        where = ("--cgroup", path, "--net-host", "--mount", mount, "--env", f"{TOKEN_VARIABLE}={self.token}")
        try:
            ctr("run", "--detach", *where, image, container_id, *arguments)
            yield container_id, talk
        finally:
            talk.close()
            with suppress(RuntimeError):
                ctr("task", "rm", "--force", container_id)
            with suppress(RuntimeError):
                ctr("container", "rm", container_id)
            kill_and_remove_cgroup(path.lstrip("/"))

    def close(self) -> None:
        """Delete all pods."""
        for pod in list(self.pods):
            with suppress(Exception):
                pod.remove()


def new_token() -> str:
    """Eight hexadecimal digits for one run of the tests."""
    return secrets.token_hex(4)


def cpu_hierarchy() -> Path:
    """Where the hierarchy with the cpu controller is mounted."""
    for path in hierarchies():
        if (path / "cpu.cfs_quota_us").exists() or "cpu" in path.name.split(","):
            return path
    return next(path for path in hierarchies() if (path / "cgroup.subtree_control").exists())


def make_cgroup(path: str, cores: float | None) -> None:
    """Make a pod's cgroup in every hierarchy, with a CPU limit if any."""
    for hierarchy in hierarchies():
        folder = hierarchy / path.lstrip("/")
        folder.mkdir(parents=True, exist_ok=True)
        _inherit_cpuset(hierarchy, folder)
        if cores is not None and (folder / "cpu.cfs_quota_us").exists():
            (folder / "cpu.cfs_quota_us").write_text(str(int(cores * 100_000)))


def _inherit_cpuset(hierarchy: Path, folder: Path) -> None:
    """In cgroup v1 a new cgroup has no CPUs and no memory nodes, and takes no process, until it is given some."""
    if not (folder / "cpuset.cpus").exists() or not (hierarchy / "cpuset.mems").exists():
        return
    for level in [*reversed(folder.relative_to(hierarchy).parents), folder.relative_to(hierarchy)]:
        here = hierarchy / level
        for name in ("cpuset.cpus", "cpuset.mems"):
            if here != hierarchy and not (here / name).read_text().strip():
                (here / name).write_text((here.parent / name).read_text())
