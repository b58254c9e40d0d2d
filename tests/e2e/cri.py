"""The Container Runtime Interface, as far as a kubelet needs it to run pods: gRPC over the runtime's socket."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import grpc
from cri_api.v1 import api_pb2 as api
from cri_api.v1 import api_pb2_grpc

CALL_SECONDS = 60.0


@dataclass(frozen=True)
class Limits:
    """CPU and memory of a container, as CRI wants them. ``cpu_quota_us`` 0: no limit."""

    cpu_quota_us: int = 0
    cpu_period_us: int = 100_000
    cpu_shares: int = 2
    memory_bytes: int = 0

    def message(self) -> Any:
        return api.LinuxContainerResources(
            cpu_period=self.cpu_period_us,
            cpu_quota=self.cpu_quota_us,
            cpu_shares=self.cpu_shares,
            memory_limit_in_bytes=self.memory_bytes,
        )


@dataclass(frozen=True)
class Mount:
    """A folder or file of the node that shows in a container."""

    host_path: str
    container_path: str
    readonly: bool = False


@dataclass(frozen=True)
class Security:
    """What of a container's securityContext reaches the runtime. ``capabilities``: those added after all are dropped;
    None leaves the runtime's default."""

    capabilities: tuple[str, ...] | None = None
    readonly_root: bool = False
    no_new_privileges: bool = False
    user: int | None = None
    group: int | None = None
    runtime_default_seccomp: bool = False

    def message(self, host_pid: bool) -> Any:
        capabilities = None
        if self.capabilities is not None:
            capabilities = api.Capability(drop_capabilities=["ALL"], add_capabilities=self.capabilities)
        kind = api.SecurityProfile.RuntimeDefault if self.runtime_default_seccomp else api.SecurityProfile.Unconfined
        return api.LinuxContainerSecurityContext(
            namespace_options=_namespaces(host_pid),
            capabilities=capabilities,
            readonly_rootfs=self.readonly_root,
            no_new_privs=self.no_new_privileges,
            run_as_user=None if self.user is None else api.Int64Value(value=self.user),
            run_as_group=None if self.group is None else api.Int64Value(value=self.group),
            seccomp=api.SecurityProfile(profile_type=kind),
        )


@dataclass(frozen=True)
class Sandbox:
    """A pod's sandbox: its id and the configuration it was made with, which CRI asks for again with each container."""

    id: str
    config: Any = field(repr=False)
    host_pid: bool = False


def _namespaces(host_pid: bool) -> Any:
    # The host's network: no network has to be made, and the pods' servers can be reached.
    return api.NamespaceOption(network=api.NODE, pid=api.NODE if host_pid else api.CONTAINER)


class Cri:
    """Calls of the runtime behind a socket. All raise grpc.RpcError."""

    def __init__(self, socket: Path) -> None:
        self._channel = grpc.insecure_channel(f"unix://{socket}")
        stub: Any = api_pb2_grpc.RuntimeServiceStub
        self._runtime = stub(self._channel)

    def close(self) -> None:
        self._channel.close()

    def ready(self) -> bool:
        """Does the runtime answer, and says that it is ready?"""
        try:
            status = self._runtime.Status(api.StatusRequest(), timeout=2)
        except grpc.RpcError:
            return False
        return any(one.type == "RuntimeReady" and one.status for one in status.status.conditions)

    def run_sandbox(
        self, namespace: str, pod: str, uid: str, cgroup_parent: str, log_directory: Path, *, host_pid: bool = False
    ) -> Sandbox:
        """Start a pod's sandbox with the labels that the kubelet gives it."""
        security = api.LinuxSandboxSecurityContext(namespace_options=_namespaces(host_pid))
        config = api.PodSandboxConfig(
            metadata=api.PodSandboxMetadata(name=pod, uid=uid, namespace=namespace, attempt=0),
            log_directory=str(log_directory),
            labels={
                "io.kubernetes.pod.name": pod,
                "io.kubernetes.pod.namespace": namespace,
                "io.kubernetes.pod.uid": uid,
            },
            linux=api.LinuxPodSandboxConfig(cgroup_parent=cgroup_parent, security_context=security),
        )
        reply = self._runtime.RunPodSandbox(api.RunPodSandboxRequest(config=config), timeout=CALL_SECONDS)
        return Sandbox(reply.pod_sandbox_id, config, host_pid)

    def create_container(
        self,
        sandbox: Sandbox,
        name: str,
        attempt: int,
        image: str,
        arguments: list[str],
        *,
        env: dict[str, str],
        mounts: list[Mount],
        limits: Limits,
        security: Security,
    ) -> str:
        """Make a container; its id. ``arguments`` follow the image's entrypoint."""
        config = api.ContainerConfig(
            metadata=api.ContainerMetadata(name=name, attempt=attempt),
            image=api.ImageSpec(image=image),
            args=arguments,
            envs=[api.KeyValue(key=key, value=value) for key, value in env.items()],
            mounts=[
                api.Mount(host_path=one.host_path, container_path=one.container_path, readonly=one.readonly)
                for one in mounts
            ],
            labels={**sandbox.config.labels, "io.kubernetes.container.name": name},
            log_path=f"{name}/{attempt}.log",
            linux=api.LinuxContainerConfig(
                resources=limits.message(), security_context=security.message(sandbox.host_pid)
            ),
        )
        request = api.CreateContainerRequest(pod_sandbox_id=sandbox.id, config=config, sandbox_config=sandbox.config)
        return str(self._runtime.CreateContainer(request, timeout=CALL_SECONDS).container_id)

    def start_container(self, container_id: str) -> None:
        self._runtime.StartContainer(api.StartContainerRequest(container_id=container_id), timeout=CALL_SECONDS)

    def container_exit_code(self, container_id: str) -> int | None:
        """None while it hasn't ended."""
        request = api.ContainerStatusRequest(container_id=container_id)
        status = self._runtime.ContainerStatus(request, timeout=CALL_SECONDS).status
        return int(status.exit_code) if status.state == api.CONTAINER_EXITED else None

    def stop_container(self, container_id: str, grace_seconds: int = 0) -> None:
        request = api.StopContainerRequest(container_id=container_id, timeout=grace_seconds)
        self._runtime.StopContainer(request, timeout=CALL_SECONDS)

    def remove_container(self, container_id: str) -> None:
        self._runtime.RemoveContainer(api.RemoveContainerRequest(container_id=container_id), timeout=CALL_SECONDS)

    def sandbox_ids(self) -> list[str]:
        """All sandboxes that the runtime has."""
        reply = self._runtime.ListPodSandbox(api.ListPodSandboxRequest(), timeout=CALL_SECONDS)
        return [str(one.id) for one in reply.items]

    def remove_sandbox(self, sandbox_id: str) -> None:
        """End it and all its containers, and remove them."""
        self._runtime.StopPodSandbox(api.StopPodSandboxRequest(pod_sandbox_id=sandbox_id), timeout=CALL_SECONDS)
        self._runtime.RemovePodSandbox(api.RemovePodSandboxRequest(pod_sandbox_id=sandbox_id), timeout=CALL_SECONDS)
