"""Pods of every kind on one node, run by containerd: whose the series are, that counts are exact, and when they go.

One agent watches all of it. It starts between the first pods and the others, so that both ways of finding a process are
in it. Counts are held against what the duet does by construction, throttling against the kernel's cpu.stat.
"""

from __future__ import annotations

import time
import urllib.request
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path

import pytest

from tests.e2e.agent_process import BASE_LABELS, Agent, Labels, Scrape, agent, confined, free_port
from tests.e2e.containerd import Containerd
from tests.e2e.duet import LOST, STARTUP, TRANSITIONS, N, parks
from tests.e2e.kubelet import (
    TOKEN_VARIABLE,
    ContainerSpec,
    Conversation,
    Kubelet,
    Pod,
    wait_for,
)
from tests.workload import Workload, binary
from tools import toolchains

SHOP, PAY = "e2e-shop", "e2e-pay"
SYSTEMD_PARENT = "/kubepods.slice/kubepods-burstable.slice/kubepods-burstable-pod{uid_}.slice"
LOADER = "/lib64/ld-linux-x86-64.so.2"
PROCESS = {
    "spinners": "spinners",
    "stripped": "duet-stripped",
    "pie": "duet-pie",
    "pie-stripped": "duet-pie-stripped",
    "nats": "nats-server",
    "caddy": "caddy",
}
"""Image -> its process, where that isn't the duet."""
VERSIONS = ("1.19", "1.21", "1.22", "1.23", "1.24", "1.25", "1.26")
THROTTLED = "schedtrace_cfs_throttled_seconds_total"
FOUND_SECONDS = 1.5  # far more than it takes the agent to find a process, also on a machine that has much else to do


@dataclass
class Node:
    """What runs, and the agent that watches it. ``duets``: who does the duet, and how to talk to it."""

    kubelet: Kubelet
    agent: Agent
    pods: dict[str, Pod]
    duets: dict[Labels, Conversation]
    others: dict[Labels, str] = field(default_factory=dict)
    """Other owners -> Go version."""
    go_versions: dict[Labels, str] = field(default_factory=dict)
    before: Scrape | None = None
    after: Scrape | None = None


@pytest.fixture(scope="module")
def images(containerd: Containerd, stage: Path, duet_image: str) -> dict[str, str]:
    """Name -> image: the duet in several versions and forms, and real servers."""
    found = {"duet": duet_image}

    def make(name: str, program: Path, *, talks: bool = True, comment: str = "") -> None:
        found[name] = f"localhost/{name}:1"
        inside = f"/{program.name}"
        files = {inside: program} | ({"/stage": stage} if talks else {})
        if "pie" in name:
            files[LOADER] = Path(LOADER)  # relocates it; without cgo Go makes no static PIE
        entrypoint = ["/stage", inside] if talks else [inside]
        containerd.make_image(found[name], files, entrypoint, comment=comment)

    make("twin", binary("duet"), comment="the same binary in another layer")
    make("stripped", binary("duet", "1.27", strip=True, out_name="duet-stripped"))
    make("pie", binary("duet", "1.27", buildmode="pie", out_name="duet-pie"))
    make("pie-stripped", binary("duet", "1.24", buildmode="pie", strip=True, out_name="duet-pie-stripped"))
    make("spinners", binary("spinners"))
    for version in VERSIONS:
        make(f"go{version}", binary("duet", version))
    make("nats", toolchains.program("nats-server"), talks=False)
    make("caddy", toolchains.program("caddy"), talks=False)
    return found


@pytest.fixture(scope="module")
def node(kubelet: Kubelet, images: dict[str, str], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Node]:
    folder = tmp_path_factory.mktemp("pods")
    with ExitStack() as stack:
        pods: dict[str, Pod] = {}
        duets: dict[Labels, Conversation] = {}
        others: dict[Labels, str] = {}
        versions: dict[Labels, str] = {}

        def duet(
            namespace: str,
            name: str,
            specs: list[ContainerSpec],
            qos: str,
            process: str = "duet",
            go: str = "1.27",
            **how: str,
        ) -> None:
            pods[name] = pod = stack.enter_context(kubelet.pod(namespace, name, specs, qos=qos, **how))
            for spec in specs:
                owner = (namespace, name, spec.name, process)
                duets[owner] = pod[spec.name].talk
                versions[owner] = f"go{toolchains.release(go)}"

        def one(image: str, cores: float | None = None, name: str = "app") -> ContainerSpec:
            return ContainerSpec(name, images[image], ("-n", str(N)), cpu_cores=cores)

        duet(SHOP, "cart-0", [one("duet", 0.5)], "burstable")
        duet(SHOP, "cart-1", [one("duet")], "burstable")
        duet(SHOP, "checkout", [one("duet", 0.4), one("duet", 0.3, "sidecar")], "guaranteed")
        duet(PAY, "stripped", [one("stripped")], "besteffort", "duet-stripped")
        for version in VERSIONS[:3]:
            duet(PAY, f"go{version}", [one(f"go{version}")], "besteffort", go=version)
        listen = f"127.0.0.1:{free_port()}"
        watching = stack.enter_context(agent(folder, "--log-root", kubelet.log_root, command=confined(kubelet.token)))

        duet(SHOP, "twin", [one("twin")], "burstable")
        duet(PAY, "pie", [one("pie")], "besteffort", "duet-pie")
        duet(PAY, "pie-stripped", [one("pie-stripped", 0.5)], "guaranteed", "duet-pie-stripped", "1.24")
        for version in VERSIONS[3:]:
            duet(PAY, f"go{version}", [one(f"go{version}", 0.5)], "guaranteed", go=version)

        # Of two containers only one has a limit, so that the pod has none and all throttling is of that container.
        spinners = ContainerSpec("app", images["spinners"], ("-threads", "4", "-duration", "2s"), cpu_cores=0.1)
        pods["spinners"] = stack.enter_context(kubelet.pod(SHOP, "spinners", [spinners, one("duet", name="idle")]))
        duets[SHOP, "spinners", "idle", "duet"] = pods["spinners"]["idle"].talk
        others[SHOP, "spinners", "app", "spinners"] = "go1.27.3"
        nats = ContainerSpec("nats", images["nats"], ("-a", "127.0.0.1", "-p", str(free_port())), talks=False)
        pods["nats"] = stack.enter_context(kubelet.pod(PAY, "nats", [nats], qos="besteffort"))
        others[PAY, "nats", "nats", "nats-server"] = "go1.27.2"
        caddy = ContainerSpec(
            "web", images["caddy"], ("respond", "--listen", listen, "hello"), cpu_cores=0.5, talks=False
        )
        pods["caddy"] = stack.enter_context(kubelet.pod(PAY, "caddy", [caddy]))
        others[PAY, "caddy", "web", "caddy"] = "go1.27.1"

        bare = ("/stage", "/duet", "-n", str(N))
        outside, talk = stack.enter_context(kubelet.bare_container(images["duet"], bare, "/outside/{id}"))
        duets["", "", outside[:12], "duet"] = talk
        uid = kubelet.new_uid()
        scope = f"{SYSTEMD_PARENT.format(uid_=uid.replace('-', '_'))}/cri-containerd-{{id}}.scope"
        container_id, talk = stack.enter_context(kubelet.bare_container(images["duet"], bare, scope))
        kubelet.link(SHOP, "scope", uid, "app", container_id)
        duets[SHOP, "scope", "app", "duet"] = talk
        host = stack.enter_context(Workload(binary("duet"), "-n", N, env={TOKEN_VARIABLE: kubelet.token}))
        others["", "", "", "duet"] = "go1.27.3"

        node = Node(kubelet, watching, pods, duets, others, versions)
        for owner in (*duets, *others):
            watching.await_owner(owner)
        for talk in duets.values():
            talk.expect("ready")
        time.sleep(1)
        node.before = watching.scrape()
        for talk in duets.values():
            talk.say("go")
        for talk in duets.values():
            talk.expect("done")
        with urllib.request.urlopen(f"http://{listen}/", timeout=10) as answer:
            assert answer.read() == b"hello"
        assert host.run()["parks"] == 2 * N
        time.sleep(1)  # until each partner waits for a message that won't come
        node.after = watching.scrape()
        yield node


def await_end(agent: Agent, *owners: Labels) -> None:
    """A pod has been removed: its series are there once more at most, then not."""

    def gone() -> bool:
        return not agent.scrape().owners() & set(owners)

    shown = 0
    while not gone():
        shown += 1
        time.sleep(0.5)
        assert shown < 10, f"still there: {owners}"
    # A scrape may come before the agent has noticed the end of the processes, or that of the pod.
    assert shown <= 3
    assert gone(), "came back"


def decreases(before: Scrape, after: Scrape, owner: Labels) -> list[str]:
    """Counters of that owner that are less than before, or missing."""
    wanted = set(zip(BASE_LABELS, owner, strict=True))
    return [
        f"{name} {sorted(labels)}: {value} -> {after.samples.get((name, labels))}"
        for (name, labels), value in before.samples.items()
        if wanted <= labels
        and name.endswith(("_total", "_count", "_sum", "_bucket"))
        and after.samples.get((name, labels), -1) < value
    ]


def test_every_series_has_its_owner(node: Node) -> None:
    assert node.after
    assert node.after.owners() == {*node.duets, *node.others}
    for owner, version in {**node.go_versions, **node.others}.items():
        node.after.value("schedtrace_target_info", owner, go_version=version, level="full")
    symbols = {
        owner: dict(next(iter(node.after.values("schedtrace_target_info", owner))))["symbols"] for owner in node.duets
    }
    assert {owner[3] for owner, source in symbols.items() if source == "pclntab"} == {
        "duet-stripped",
        "duet-pie-stripped",
    }


def test_counts_are_exact(node: Node) -> None:
    """Also where two pods share an image, so that one probe counts for both."""
    assert node.before
    assert node.after
    host = ("", "", "", "duet")
    for owner in (*node.duets, host):
        before, after = node.before, node.after
        assert parks(after, owner) - parks(before, owner) == 2 * N, owner
        for old, new in (("running", "waiting"), ("waiting", "runnable")):
            states = {"from": old, "to": new}
            made = after.total(TRANSITIONS, owner, **states) - before.total(TRANSITIONS, owner, **states)
            assert made == 2 * N, f"{owner} {old} -> {new}: {made}\n{after.of(owner)}"
        reasons = {dict(labels)["reason"] for labels in after.values(LOST, owner)}
        # The first is among the parks; the second is about threads, of which the node has more than it has CPUs for.
        assert reasons <= {"interval_began_before_window", "thread_switch_unseen"}, owner


def test_limits_and_throttling_are_the_kernels(node: Node) -> None:
    pod = node.pods["spinners"]
    owner = (SHOP, "spinners", "app", "spinners")
    pod["app"].talk.expect("ready")
    assert node.agent.scrape().value("schedtrace_cpu_quota_cores", owner) == 0.1
    pod["app"].talk.say("go")
    pod["app"].talk.expect("done")

    def look() -> Scrape | None:
        """A scrape during which the kernel's counter stood still."""
        before = pod["app"].throttled_seconds()
        scrape = node.agent.scrape()
        return scrape if pod["app"].throttled_seconds() == before else None

    scrape = wait_for(look, "an end of throttling")
    assert pod["app"].throttled_seconds() > 0.5
    assert scrape.value(THROTTLED, owner) == pytest.approx(pod["app"].throttled_seconds(), abs=1e-9)
    for name, pod in node.pods.items():
        for container in pod.containers.values():
            process = Path(container.spec.image.partition(":")[0]).name
            whose = (pod.namespace, name, container.spec.name, PROCESS.get(process, "duet"))
            limits = list(scrape.values("schedtrace_cpu_quota_cores", whose).values())
            assert limits == ([] if container.spec.cpu_cores is None else [container.spec.cpu_cores]), whose
            throttled = list(scrape.values(THROTTLED, whose).values())
            assert throttled == [pytest.approx(container.throttled_seconds(), abs=1e-9)], whose


def test_pods_that_live_under_a_second(node: Node, images: dict[str, str]) -> None:
    """Each is seen, nothing is lost from when it is seen, and its series go one scrape after it."""
    counts = []
    for attempt in range(4):
        owner = (SHOP, f"brief-{attempt}", "job", "duet")
        arguments = ("-n", str(N), "-exit", "0", "-before", "500ms", "-after", "100ms")
        with node.kubelet.pod(owner[0], owner[1], [ContainerSpec("job", images["duet"], arguments)]) as pod:
            assert pod.wait_for_exit("job") == 0
        counts.append(parks(node.agent.scrape(), owner))
        await_end(node.agent, owner)
    assert all(0 < count <= 2 * N + STARTUP for count in counts), counts
    # On a machine that is busy with other things, one may be seen only when it has begun its work.
    assert sum(count >= 2 * N for count in counts) >= 2, counts


def test_pod_recreated_under_its_name(node: Node, images: dict[str, str]) -> None:
    """Another UID, the same labels: at once its counters go on, and after a scrape without it they begin anew."""
    owner = (SHOP, "web", "app", "duet")
    spec = ContainerSpec("app", images["duet"], ("-n", str(N)))
    scrapes: list[Scrape] = []
    for _ in range(2):
        with node.kubelet.pod(SHOP, "web", [spec]) as pod:
            pod["app"].talk.expect("ready")
            time.sleep(FOUND_SECONDS)  # a scrape before the agent has found it would be the one that ends the series
            before = node.agent.await_process(owner)
            pod["app"].talk.say("go")
            pod["app"].talk.expect("done")
            scrapes.append(node.agent.scrape())
            assert parks(scrapes[-1], owner) - parks(before, owner) == 2 * N
    assert parks(scrapes[1], owner) >= 4 * N
    assert decreases(scrapes[0], scrapes[1], owner) == []
    await_end(node.agent, owner)
    with node.kubelet.pod(SHOP, "web", [spec]) as pod:
        pod["app"].talk.expect("ready")
        assert parks(node.agent.await_process(owner), owner) <= STARTUP
    await_end(node.agent, owner)


def test_crash_loop(node: Node, images: dict[str, str]) -> None:
    """Counters go up with every run of the container, by what that run did, and never down."""
    owner = (PAY, "crash", "app", "duet")
    arguments = ("-n", str(N), "-exit", "2", "-before", "600ms")
    scrapes = []
    with node.kubelet.pod(PAY, "crash", [ContainerSpec("app", images["duet"], arguments, cpu_cores=0.2)]) as pod:
        for run in range(4):
            if run:
                pod.restart("app")
            assert pod.wait_for_exit("app") == 2
            scrapes.append(node.agent.scrape())
    counts = [parks(scrape, owner) for scrape in scrapes]
    gains = [after - before for before, after in pairwise([0, *counts])]
    assert all(0 < gain <= 2 * N + STARTUP for gain in gains), gains
    assert sum(gain >= 2 * N for gain in gains) >= 2, gains
    for before, after in pairwise(scrapes):
        assert decreases(before, after, owner) == []
    await_end(node.agent, owner)


def test_series_end_with_their_pods(node: Node) -> None:
    """Of one pod of an image that others have too, and of one whose image is its own."""
    for name, namespace, process in (("cart-1", SHOP, "duet"), ("stripped", PAY, "duet-stripped")):
        node.pods[name].remove()
        await_end(node.agent, (namespace, name, "app", process))
    owners = node.agent.scrape().owners()
    assert (SHOP, "cart-0", "app", "duet") in owners
    assert len(owners) == len(node.duets) + len(node.others) - 2
