"""The agent as deploy/ ships it: the image of its Dockerfile, run with exactly what daemonset.yaml grants.

What differs from a cluster: the network is the node's, so that no CNI plugin is needed; the kubelet's links are those
of these tests; and --select names the tests' pods, so that no other program of the machine is touched.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.e2e import agent_image
from tests.e2e.agent_process import Labels, Scrape, fetch
from tests.e2e.containerd import Containerd
from tests.e2e.cri import Mount, Security
from tests.e2e.duet import TRANSITIONS, N, parks
from tests.e2e.kubelet import ContainerSpec, Kubelet, Pod, wait_for
from tests.workload import binary

DAEMONSET = Path(__file__).parents[2] / "deploy/daemonset.yaml"
IMAGE = "localhost/schedtrace:0.1.0"
NAMESPACE = "e2e-agent"
STARTS_IN_SECONDS = 60.0


@pytest.fixture(scope="module")
def manifest() -> dict[str, Any]:
    """The pod of the DaemonSet."""
    return dict(yaml.safe_load(DAEMONSET.read_text())["spec"]["template"]["spec"])


@pytest.fixture(scope="module")
def image(containerd: Containerd) -> str:
    archive = containerd.root / "agent.tar"
    agent_image.build(IMAGE, archive)
    containerd.ctr("images", "import", archive, seconds=300)
    archive.unlink()
    return IMAGE


@pytest.fixture(scope="module")
def shipped(manifest: dict[str, Any], image: str, kubelet: Kubelet) -> ContainerSpec:
    """The agent's container as the manifest says, but for --select and the folder of the links."""
    (container,) = manifest["containers"]
    context = container["securityContext"]
    assert set(context) == {
        "runAsUser",
        "runAsGroup",
        "allowPrivilegeEscalation",
        "readOnlyRootFilesystem",
        "capabilities",
        "appArmorProfile",  # there is no AppArmor in the runtime of these tests
    }
    assert context["capabilities"]["drop"] == ["ALL"]
    assert manifest["securityContext"] == {"seccompProfile": {"type": "RuntimeDefault"}}
    sources: dict[str, str] = {}
    for volume in manifest["volumes"]:
        if "hostPath" in volume:
            sources[volume["name"]] = volume["hostPath"]["path"]
        else:
            assert "emptyDir" in volume
            folder = kubelet.containerd.root / f"volume-{volume['name']}"
            folder.mkdir()
            sources[volume["name"]] = str(folder)
    links = next(name for name, path in sources.items() if path == "/var/log/containers")
    sources[links] = str(kubelet.log_root / "containers")
    limits = container["resources"]["limits"]
    return ContainerSpec(
        "schedtrace",
        image,
        (*container["args"], f"--select={NAMESPACE}", "--max-overhead=none"),
        cpu_cores=float(limits["cpu"]),
        memory_bytes=int(limits["memory"].removesuffix("Mi")) << 20,
        talks=False,
        security=Security(
            capabilities=tuple(context["capabilities"]["add"]),
            readonly_root=context["readOnlyRootFilesystem"],
            no_new_privileges=not context["allowPrivilegeEscalation"],
            user=context["runAsUser"],
            group=context["runAsGroup"],
            runtime_default_seccomp=True,
        ),
        mounts=tuple(
            Mount(sources[one["name"]], one["mountPath"], bool(one.get("readOnly")))
            for one in container["volumeMounts"]
        ),
    )


def url_of(manifest: dict[str, Any]) -> str:
    (port,) = manifest["containers"][0]["ports"]
    return f"http://127.0.0.1:{port['containerPort']}"


def run_agent(kubelet: Kubelet, spec: ContainerSpec, manifest: dict[str, Any]) -> Pod:
    return kubelet.run("schedtrace", "schedtrace-x2x7q", [spec], host_pid=manifest["hostPID"])


@pytest.fixture
def workloads(kubelet: Kubelet, duet_image: str, stage: Path) -> Iterator[dict[Labels, Pod]]:
    """Pods of three kinds: two of one image, one of them with a limit, and a stripped program of another Go."""
    stripped = "localhost/stripped-for-agent:1"
    program = binary("duet", "1.24", strip=True)
    kubelet.containerd.make_image(stripped, {"/duet": program, "/stage": stage}, ["/stage", "/duet"])
    pods = {}
    for name, image, cores, qos in (
        ("one", duet_image, 0.5, "guaranteed"),
        ("two", duet_image, None, "burstable"),
        ("three", stripped, None, "besteffort"),
    ):
        spec = ContainerSpec("app", image, ("-n", str(N)), cpu_cores=cores)
        pods[NAMESPACE, name, "app", "duet"] = kubelet.run(NAMESPACE, name, [spec], qos=qos)
    yield pods
    for pod in pods.values():
        pod.remove()


def test_works_with_what_the_manifest_grants(
    kubelet: Kubelet, shipped: ContainerSpec, manifest: dict[str, Any], workloads: dict[Labels, Pod]
) -> None:
    url = url_of(manifest)
    for pod in workloads.values():
        pod["app"].talk.expect("ready")
    pod = run_agent(kubelet, shipped, manifest)
    try:

        def look() -> Scrape | None:
            assert pod.exit_code("schedtrace") is None, pod.log("schedtrace")
            if fetch(f"{url}/readyz")[0] != 200:
                return None
            scrape = Scrape.parse(fetch(f"{url}/metrics")[1])
            return scrape if scrape.owners() == workloads.keys() else None

        try:
            before = wait_for(look, "series of all pods and of nothing else", STARTS_IN_SECONDS)
        except AssertionError as error:
            raise AssertionError(f"{error}\n{fetch(f'{url}/metrics')}\n{pod.log('schedtrace')}") from error
        assert fetch(f"{url}/healthz")[0] == 200
        for workload in workloads.values():
            workload["app"].talk.say("go")
        for workload in workloads.values():
            workload["app"].talk.expect("done")
        after = Scrape.parse(fetch(f"{url}/metrics")[1])
        for owner, workload in workloads.items():
            assert parks(after, owner) - parks(before, owner) == 2 * N, owner
            assert after.total(TRANSITIONS, owner, **{"from": "waiting", "to": "runnable"}) == 2 * N, owner
            throttled = after.value("schedtrace_cfs_throttled_seconds_total", owner)
            assert throttled == pytest.approx(workload["app"].throttled_seconds(), abs=1e-9)
        quotas = after.values("schedtrace_cpu_quota_cores")
        assert list(quotas.values()) == [0.5]
        # Every line of the log is an object; the only complaints may be of the node's other processes.
        events = [json.loads(line) for line in pod.log("schedtrace")]
        assert {one["event"] for one in events if one["level"] != "info"} <= {"vanished", "permission"}, events
        pids = pod["schedtrace"].pids
        status = Path(f"/proc/{pids[0]}/status").read_text()
        assert "NoNewPrivs:\t1" in status
        assert "Seccomp:\t2" in status
        effective = next(line for line in status.splitlines() if line.startswith("CapEff"))
        assert int(effective.split()[1], 16).bit_count() == len(shipped.security.capabilities or ())
        kubelet.containerd.cri.stop_container(pod["schedtrace"].id, manifest["terminationGracePeriodSeconds"])
        assert pod.wait_for_exit("schedtrace") == 0
    finally:
        pod.remove()


@pytest.mark.parametrize("missing", ["BPF", "PERFMON", "SYS_PTRACE"])
def test_says_which_capability_is_missing(
    kubelet: Kubelet, shipped: ContainerSpec, manifest: dict[str, Any], missing: str
) -> None:
    capabilities = shipped.security.capabilities or ()
    assert missing in capabilities
    left = tuple(name for name in capabilities if name != missing)
    spec = replace(shipped, security=replace(shipped.security, capabilities=left))
    pod = run_agent(kubelet, spec, manifest)
    try:
        assert pod.wait_for_exit("schedtrace", STARTS_IN_SECONDS) == 77, pod.log("schedtrace")
        (line,) = pod.log("schedtrace")
        assert f"CAP_{missing}" in line
        assert not any(f"CAP_{name}" in line for name in left), line
    finally:
        pod.remove()


@pytest.mark.usefixtures("workloads")
@pytest.mark.parametrize("path", ["/sys/fs/cgroup", "/sys/kernel/tracing", "/var/log/containers"])
def test_says_which_mount_is_missing(
    kubelet: Kubelet, shipped: ContainerSpec, manifest: dict[str, Any], path: str
) -> None:
    mounts = tuple(mount for mount in shipped.mounts if mount.container_path != path)
    assert len(mounts) == len(shipped.mounts) - 1
    pod = run_agent(kubelet, replace(shipped, mounts=mounts), manifest)
    try:

        def told() -> bool:
            lines = [line for line in pod.log("schedtrace") if path in line]
            if pod.exit_code("schedtrace") is not None:
                assert lines, pod.log("schedtrace")
            return bool(lines)

        try:
            wait_for(told, f"a word on {path}", STARTS_IN_SECONDS)
        except AssertionError as error:
            raise AssertionError(f"{error}: {pod.log('schedtrace')}") from error
    finally:
        pod.remove()
