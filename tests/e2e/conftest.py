"""One containerd and one kubelet for all tests that run pods."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.e2e import containerd as containerd_module
from tests.e2e.containerd import Containerd
from tests.e2e.kubelet import Kubelet, new_token
from tests.workload import binary
from tools import toolchains

PROGRAMS = Path(__file__).parent / "programs"


@pytest.fixture(scope="session")
def containerd() -> Iterator[Containerd]:
    with containerd_module.running() as containerd:
        yield containerd


@pytest.fixture(scope="session")
def kubelet(containerd: Containerd) -> Iterator[Kubelet]:
    kubelet = Kubelet(containerd, new_token())
    yield kubelet
    kubelet.close()


@pytest.fixture(scope="session")
def stage() -> Path:
    return toolchains.compile_c(PROGRAMS / "stage.c", flags=("-static",))


@pytest.fixture(scope="session")
def duet_image(containerd: Containerd, stage: Path) -> str:
    """An image with the duet of the newest Go."""
    name = "localhost/duet:1"
    containerd.make_image(name, {"/duet": binary("duet"), "/stage": stage}, ["/stage", "/duet"])
    return name
