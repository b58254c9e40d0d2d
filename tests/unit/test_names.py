"""Names of start functions, on nats-server as its makers built it; nm gives the addresses."""

import subprocess

import pytest

from schedtrace.plan import FunctionNames
from tools import toolchains


@pytest.fixture(scope="module")
def addresses() -> dict[str, int]:
    listing = subprocess.run(
        ["nm", toolchains.program("nats-server")], capture_output=True, text=True, check=True, timeout=60
    ).stdout
    fields = (line.split(maxsplit=2) for line in listing.splitlines())
    return {name: int(address, 16) for address, kind, name in fields if kind in "tT"}


@pytest.mark.parametrize(
    ("start", "name"),
    [
        ("runtime.main", "runtime.main"),
        ("main.main", "main.main"),
        # closures of "go f(x)" go by f
        ("runtime.gcenable.gowrap1", "runtime.bgsweep"),
        ("net/http.(*Server).Serve.gowrap3", "net/http.(*conn).serve"),
        # the call is through a function value: nobody knows what it started
        ("net.(*sysDialer).dialParallel.gowrap4", "net.(*sysDialer).dialParallel.gowrap4"),
        # people's own closures keep their names
        ("net/http.(*Transport).dialConnFor", "net/http.(*Transport).dialConnFor"),
    ],
)
def test_start_functions(addresses: dict[str, int], start: str, name: str) -> None:
    with FunctionNames(str(toolchains.program("nats-server"))) as names:
        assert names.name(addresses[start]) == name
        assert names.name(addresses[start] + 1) == name


def test_no_function_there() -> None:
    with FunctionNames(str(toolchains.program("nats-server"))) as names:
        assert names.name(0x10) is None
