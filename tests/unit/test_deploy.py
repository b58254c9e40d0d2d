"""What is in deploy/: valid to the validators, and in agreement with the agent and with itself."""

import json
import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
import yaml

from schedtrace.web import parse_address

ROOT = Path(__file__).parents[2]
DEPLOY = ROOT / "deploy"
COMPONENTS = sorted(path.parent.name for path in DEPLOY.glob("components/*/kustomization.yaml"))
# From the first that knows every field to the latest.
KUBERNETES = ["1.31", "1.34", "1.37"]
# Their schemas don't come with Kubernetes.
OTHERS = {"Kustomization", "Component", "PodMonitor"}

Document = dict[str, Any]


def load(name: str) -> Document:
    document: Document = yaml.safe_load((DEPLOY / name).read_text())
    return document


def merged(base: Any, patch: Any) -> Any:
    """A strategic merge: lists of named or mounted things by name, other lists as a whole."""
    if isinstance(base, dict) and isinstance(patch, dict):
        return base | {key: merged(base.get(key), value) for key, value in patch.items()}
    if isinstance(base, list) and isinstance(patch, list) and isinstance(patch[0], dict):
        key = "mountPath" if "mountPath" in patch[0] else "name"
        by_key = {item[key]: item for item in base}
        return list((by_key | {item[key]: merged(by_key.get(item[key]), item) for item in patch}).values())
    return patch


def daemonset(*components: str) -> Document:
    """The DaemonSet as kustomize makes it."""
    document = load("daemonset.yaml") | {}
    document["metadata"]["namespace"] = load("kustomization.yaml")["namespace"]
    for component in components:
        for patch in load(f"components/{component}/kustomization.yaml")["patches"]:
            document = merged(document, yaml.safe_load(patch["patch"]))
    return document


def pod(document: Document) -> Document:
    spec: Document = document["spec"]["template"]["spec"]
    return spec


def container(document: Document) -> Document:
    (only,) = pod(document)["containers"]
    found: Document = only
    return found


def unordered(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: unordered(value[key]) for key in sorted(value)}
    return sorted((unordered(item) for item in value), key=json.dumps) if isinstance(value, list) else value


def test_yamllint_has_nothing_to_say() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "yamllint", "--strict", "-d", "default", DEPLOY], capture_output=True, check=False
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, b"", b"")


@pytest.mark.parametrize("version", KUBERNETES)
def test_every_manifest_is_valid(version: str) -> None:
    validated = set()
    for path in DEPLOY.rglob("*.yaml"):
        for document in yaml.safe_load_all(path.read_text()):
            if document["kind"] not in OTHERS:
                kubernetes_validate.validate(document, version, strict=True)
                validated.add(document["kind"])
    assert validated == {"Namespace", "DaemonSet"}
    for component in COMPONENTS:
        kubernetes_validate.validate(daemonset(component), version, strict=True)
    kubernetes_validate.validate(daemonset(*COMPONENTS), version, strict=True)


def test_the_validator_would_find_a_slip() -> None:
    document = daemonset()
    container(document)["securityContext"]["readOnlyRootFileSystem"] = True
    with pytest.raises(kubernetes_validate.ValidationError, match="readOnlyRootFileSystem"):
        kubernetes_validate.validate(document, KUBERNETES[-1], strict=True)


def test_what_the_agent_may_do() -> None:
    spec, agent = pod(daemonset()), container(daemonset())
    assert agent["securityContext"] == {
        "runAsUser": 0,
        "runAsGroup": 0,
        "allowPrivilegeEscalation": False,
        "readOnlyRootFilesystem": True,
        "capabilities": {"drop": ["ALL"], "add": ["BPF", "PERFMON", "SYS_PTRACE", "SYS_NICE"]},
        "appArmorProfile": {"type": "Unconfined"},
    }
    assert spec["securityContext"] == {"seccompProfile": {"type": "RuntimeDefault"}}
    assert (spec["hostPID"], spec["automountServiceAccountToken"]) == (True, False)
    assert {"hostNetwork", "hostIPC", "serviceAccountName"}.isdisjoint(spec)
    assert spec["tolerations"] == [{"operator": "Exists"}]
    assert {"cpu", "memory"} == set(agent["resources"]["limits"]) == set(agent["resources"]["requests"])


def test_what_the_agent_sees_of_the_node() -> None:
    paths = {
        volume["name"]: volume["hostPath"]["path"] for volume in pod(daemonset())["volumes"] if "hostPath" in volume
    }
    mounts = {mount["name"]: mount for mount in container(daemonset())["volumeMounts"]}
    assert paths == {"cgroup": "/sys/fs/cgroup", "tracefs": "/sys/kernel/tracing", "pod-links": "/var/log/containers"}
    for name, path in paths.items():
        assert (mounts[name]["mountPath"], mounts[name]["readOnly"]) == (path, True)
    assert set(mounts) - set(paths) == {"tmp"}


def test_no_rights_in_the_api() -> None:
    kinds = {document["kind"] for path in DEPLOY.rglob("*.yaml") for document in yaml.safe_load_all(path.read_text())}
    assert kinds == {"Namespace", "DaemonSet"} | OTHERS


def test_what_each_component_changes() -> None:
    assert COMPONENTS == ["cri-o", "sys-admin", "writable-tracefs"]
    plain = container(daemonset())
    admin = container(daemonset("sys-admin"))
    assert admin["securityContext"]["capabilities"] == {
        "drop": ["ALL"],
        "add": [*plain["securityContext"]["capabilities"]["add"], "SYS_ADMIN"],
    }
    assert admin["securityContext"]["allowPrivilegeEscalation"] is True
    assert admin["volumeMounts"] == plain["volumeMounts"]
    writable = {m["name"] for m in container(daemonset("writable-tracefs"))["volumeMounts"] if not m.get("readOnly")}
    assert writable == {"tracefs", "tmp"}
    assert pod(daemonset("cri-o"))["securityContext"] == {
        "seccompProfile": {"type": "Unconfined"},
        "seLinuxOptions": {"type": "spc_t"},
    }


def test_kustomize_makes_the_same_of_it(tmp_path: Path) -> None:
    """kubectl is no package of Debian's that could be required; where it is, it is asked."""
    kustomization = load("kustomization.yaml")
    for name in kustomization["resources"]:
        assert (DEPLOY / name).is_file()
    commented = re.findall(r"^#  - (components/\S+)$", (DEPLOY / "kustomization.yaml").read_text(), re.MULTILINE)
    assert sorted(commented) == [f"components/{name}" for name in COMPONENTS]
    if shutil.which("kubectl") is None:
        return
    shutil.copytree(DEPLOY, tmp_path / "deploy")
    (tmp_path / "own").mkdir()
    for component in COMPONENTS:
        own = {"resources": ["../deploy"], "components": [f"../deploy/components/{component}"]}
        (tmp_path / "own/kustomization.yaml").write_text(yaml.safe_dump(own))
        done = subprocess.run(["kubectl", "kustomize", tmp_path / "own"], capture_output=True, check=True, timeout=60)
        made = {document["kind"]: document for document in yaml.safe_load_all(done.stdout)}
        assert unordered(made["DaemonSet"]) == unordered(daemonset(component))
        assert made["Namespace"] == load("namespace.yaml")


def test_ports_labels_and_probes_agree() -> None:
    document = daemonset()
    agent, labels = container(document), document["spec"]["template"]["metadata"]["labels"]
    listen = next(arg.removeprefix("--listen=") for arg in agent["args"] if arg.startswith("--listen="))
    (port,) = agent["ports"]
    assert parse_address(listen).host == ""
    assert parse_address(listen).port == port["containerPort"]
    probes = {probe: agent[probe]["httpGet"] for probe in ("startupProbe", "livenessProbe", "readinessProbe")}
    assert {get["port"] for get in probes.values()} == {port["name"]}
    assert [get["path"] for get in probes.values()] == ["/healthz", "/healthz", "/readyz"]
    monitor = load("podmonitor.yaml")
    assert document["spec"]["selector"]["matchLabels"] == labels == monitor["spec"]["selector"]["matchLabels"]
    (endpoint,) = monitor["spec"]["podMetricsEndpoints"]
    assert (endpoint["port"], endpoint["honorLabels"]) == (port["name"], True)
    assert (
        monitor["metadata"]["namespace"]
        == document["metadata"]["namespace"]
        == load("namespace.yaml")["metadata"]["name"]
    )


def test_the_scrape_config_is_one(tmp_path: Path) -> None:
    """Debian's Prometheus is built without Kubernetes discovery, so the check gets other targets."""
    config = load("prometheus-scrape.yml")
    (job,) = config["scrape_configs"]
    (discovery,) = job.pop("kubernetes_sd_configs")
    labels = container(daemonset())["ports"][0]["name"], daemonset()["spec"]["selector"]["matchLabels"]
    assert job["honor_labels"] is True
    assert job["relabel_configs"][0]["regex"] == labels[0]
    assert discovery["selectors"][0]["label"] == ",".join(f"{key}={value}" for key, value in labels[1].items())
    job["static_configs"] = [{"targets": ["127.0.0.1:9755"]}]
    (tmp_path / "prometheus.yml").write_text(yaml.safe_dump(config))
    done = subprocess.run(
        ["promtool", "check", "config", tmp_path / "prometheus.yml"], capture_output=True, check=False, timeout=60
    )
    assert done.returncode == 0, done.stderr.decode()


def test_the_image() -> None:
    """Built from the files that the package is made of, under its version, on Debian 12."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    text = (DEPLOY / "Dockerfile").read_text()
    assert re.findall(r"^(?:ARG|FROM) .*", text, re.MULTILINE) == [
        "ARG BASE=debian:bookworm-slim",
        "FROM ${BASE} AS build",
        "FROM ${BASE}",
    ]
    copied = [name for line in re.findall(r"^COPY (?!--)(.*) \S+$", text, re.MULTILINE) for name in line.split()]
    assert set(project["tool"]["setuptools"]["package-dir"].values()) <= set(copied)
    assert {"pyproject.toml", project["project"]["readme"], "LICENSE"} <= set(copied)
    ignored = (ROOT / ".dockerignore").read_text().split()
    for name in copied:
        assert (ROOT / name).exists()
        assert name not in ignored
    name, _, version = container(daemonset())["image"].partition(":")
    assert [name, version] == ["schedtrace", project["project"]["version"]]
    assert load("kustomization.yaml")["images"] == [{"name": name, "newTag": version}]
    assert f"-t {name}:{version} " in text
    assert 'ENTRYPOINT ["schedtrace"]' in text
    assert container(daemonset())["args"][0] == "agent"
