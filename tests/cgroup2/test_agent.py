"""A node whose cpu controller is in cgroup2: labels, limits, throttling and ids."""

from __future__ import annotations

import secrets
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import pytest

from schedtrace.cgroups import layout, read_membership, read_mounts
from tests.cgroup2.controller import cpu_in_cgroup2
from tests.e2e.agent_process import Agent, Labels, agent, confined
from tests.e2e.duet import TRANSITIONS, N, parks
from tests.e2e.kubelet import TOKEN_VARIABLE, new_token, wait_for
from tests.workload import Workload, binary

NAMESPACE = "e2e-v2"
POD_OF = {
    "cgroupfs": "kubepods/burstable/pod{uid}/{id}",
    "guaranteed": "kubepods/pod{uid}/{id}",
    "systemd": "kubepods.slice/kubepods-pod{uid_}.slice/cri-containerd-{id}.scope",
}
CORES = 0.2
ARGUMENTS = {"duet": ("-n", N), "spinners": ("-threads", 4, "-duration", "2s")}


@dataclass(frozen=True)
class Container:
    """A process where a container runtime would have put it."""

    owner: Labels
    cgroup: Path
    target: Workload

    def throttled_seconds(self) -> float:
        lines = (self.cgroup / "cpu.stat").read_text().splitlines()
        return int(dict(line.split() for line in lines)["throttled_usec"]) / 1e6


@dataclass(frozen=True)
class Node:
    agent: Agent
    containers: dict[str, Container]


@pytest.fixture(scope="module")
def node(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Node]:
    folder = tmp_path_factory.mktemp("cgroup2")
    (folder / "containers").mkdir()
    token = new_token()
    programs = {"duet": binary("duet"), "spinners": binary("spinners")}
    with ExitStack() as stack:
        top = f"e2e-{token}"
        unified = stack.enter_context(cpu_in_cgroup2(top))
        containers = {}
        for number, (pod, path) in enumerate({**POD_OF, "spins": POD_OF["cgroupfs"]}.items()):
            uid = f"{token}-0000-4000-8000-{number:012x}"
            container_id = secrets.token_hex(32)
            cgroup = unified / top / path.format(uid=uid, uid_=uid.replace("-", "_"), id=container_id)
            cgroup.mkdir(parents=True)
            for parent in reversed(cgroup.relative_to(unified).parents[:-1]):
                (unified / parent / "cgroup.subtree_control").write_text("+cpu")
            (cgroup / "cpu.max").write_text(f"{int(CORES * 100_000)} 100000")
            log = folder / "pods" / f"{NAMESPACE}_{pod}_{uid}" / "app" / "0.log"
            (folder / "containers" / f"{pod}_{NAMESPACE}_app-{container_id}.log").symlink_to(log)
            name, arguments = (
                ("spinners", ("-threads", 4, "-duration", "2s")) if pod == "spins" else ("duet", ("-n", N))
            )
            target = stack.enter_context(Workload(programs[name], *arguments, env={TOKEN_VARIABLE: token}))
            (cgroup / "cgroup.procs").write_text(str(target.pid))
            containers[pod] = Container((NAMESPACE, pod, "app", name), cgroup, target)
        watching = stack.enter_context(agent(folder, "--log-root", folder, command=confined(token)))
        yield Node(watching, containers)


def test_the_cpu_cgroup_is_the_unified_one(node: Node) -> None:
    mounts = read_mounts()
    assert layout(mounts) in ("hybrid", "v2")
    for container in node.containers.values():
        membership = read_membership(container.target.pid, mounts)
        main = membership.main
        assert main is not None
        assert main.key == ("cgroup2", container.cgroup.stat().st_ino)
        assert main.levels[0] == str(container.cgroup)
        limit = membership.cpu_limit()
        assert limit is not None
        assert (limit.cores, limit.directory) == (CORES, str(container.cgroup))


def test_owners_counts_and_throttling(node: Node) -> None:
    for container in node.containers.values():
        node.agent.await_process(container.owner)
    before = node.agent.scrape()
    assert before.owners() == {container.owner for container in node.containers.values()}
    for container in node.containers.values():
        container.target.go()
    for container in node.containers.values():
        container.target.done()

    spins = node.containers["spins"]

    def stands_still() -> bool:
        throttled = {name: container.throttled_seconds() for name, container in node.containers.items()}
        scrape = node.agent.scrape()
        if throttled != {name: container.throttled_seconds() for name, container in node.containers.items()}:
            return False
        for name, container in node.containers.items():
            shown = scrape.value("schedtrace_cfs_throttled_seconds_total", container.owner)
            assert shown == pytest.approx(throttled[name], abs=1e-9)
            assert scrape.value("schedtrace_cpu_quota_cores", container.owner) == CORES
        return True

    wait_for(stands_still, "the end of throttling")
    assert spins.throttled_seconds() > 0
    after = node.agent.scrape()
    for container in node.containers.values():
        if container is not spins:
            assert parks(after, container.owner) - parks(before, container.owner) == 2 * N
            assert after.total(TRANSITIONS, container.owner, **{"from": "waiting", "to": "runnable"}) == 2 * N
