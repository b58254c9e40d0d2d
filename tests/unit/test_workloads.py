"""The workloads do what they say they do, by the word of Go's own execution trace. No privilege is needed."""

from pathlib import Path

import pytest

from tests import gotrace
from tests.workload import GOLANG, Workload, WorkloadError, binary
from tools import toolchains

VERSIONS = tuple(toolchains.RELEASES)


@pytest.mark.parametrize("procs", [1, 2, 4])
@pytest.mark.parametrize("version", VERSIONS)
def test_pingpong_parks_exactly_twice_a_round_trip(version: str, procs: int, tmp_path: Path) -> None:
    n = 1009
    file = tmp_path / "trace"
    with Workload(binary("pingpong", version), "-n", n, "-procs", procs, "-trace", file) as target:
        facts = target.run()
    assert (facts["parks"], facts["readies"]) == (2 * n, 2 * n)

    trace = gotrace.read(file)
    workers = ("main.ping", "main.pong")
    assert sorted(name for name in trace.goroutines.values() if name in workers) == [*workers]
    assert trace.count("Running", "Waiting", *workers) == 2 * n
    assert trace.count("Waiting", "Runnable", *workers) == 2 * n
    assert trace.count("NotExist", "Runnable", *workers) == 2
    assert trace.count("Running", "NotExist", *workers) == 2
    preempted_or_yielded = trace.count("Running", "Runnable", *workers)
    assert trace.count("Runnable", "Running", *workers) == 2 * n + 2 + preempted_or_yielded
    reasons = {reason for function, reason in trace.parks if function in workers}
    assert reasons <= {"chan send", "chan receive"}


def test_coroutines_switch_exactly_as_often_as_they_say(tmp_path: Path) -> None:
    file = tmp_path / "trace"
    with Workload(binary("coroutines"), "-n", 1009, "-trace", file) as target:
        assert target.run()["switches"] == 2020
    trace = gotrace.read(file)
    assert trace.count("Running", "Waiting", "main.puller") == 1010
    assert trace.count("Running", "Waiting", "runtime.corostart") == 1009
    assert trace.count("Running", "NotExist", "runtime.corostart") == 1


@pytest.mark.parametrize("version", [version for version in VERSIONS if toolchains.minor(version) >= 22])
def test_mixed_has_every_kind_of_transition_and_counts_right(version: str, tmp_path: Path) -> None:
    file = tmp_path / "trace"
    arguments = ("-duration", "500ms", "-syscalls", "-gc", "-trace", file)
    with Workload(binary("mixed", version), *arguments) as target:
        facts = target.run()
    trace = gotrace.read(file)
    assert trace.parks["main.selector", "select"] <= facts["selects"]
    assert trace.parks["main.sleeper", "sleep"] == facts["sleeps"] > 0
    assert trace.count("NotExist", "Runnable", "main.child") == facts["spawns"] > 0
    assert trace.count("Running", "Runnable", "main.yielder") >= facts["yields"] > 0
    assert trace.count("Running", "Runnable", "main.locker") >= facts["locks"] > 0
    assert trace.count("Running", "Syscall", "main.writer") >= facts["writes"] > 0
    assert trace.count("Running", "Runnable", "main.spinner") > 0  # preempted
    assert facts["messages"] > 0
    assert facts["exchanges"] > 0
    assert facts["allocations"] > 0
    parks = {reason for _, reason in trace.parks}
    assert {"chan send", "chan receive", "select", "sync", "sleep", "network"} <= parks
    assert trace.goroutines  # all of the work's goroutines began and ended within the trace
    for function in {name for name in trace.goroutines.values() if name.startswith("main.")}:
        begun = trace.count("NotExist", "Runnable", function)
        assert trace.count("Running", "NotExist", function) == begun > 0


@pytest.mark.parametrize("version", ["1.19", "1.27"])
def test_torture_has_one_checksum(version: str) -> None:
    checksums = set()
    for procs in (1, 3):
        with Workload(binary("torture", version), "-rounds", 33, "-procs", procs) as target:
            checksums.add(target.run()["checksum"])
    assert checksums == {"f930f62e1d144f53"}


def test_cgo_and_shared_library() -> None:
    with Workload(binary("cgohello", cgo=True), "-n", 101) as target:
        assert target.run()["callbacks"] == 101
    library = binary("cshared", cgo=True, buildmode="c-shared")
    host = toolchains.compile_c(GOLANG / "cshared/host/host.c", flags=["-ldl"])
    with Workload(host, library, 101) as target:
        assert target.run()["parks"] == 202


def test_workload_that_is_killed_says_so() -> None:
    with Workload(binary("hello")) as target:
        target.kill()
        with pytest.raises(WorkloadError, match="ended with status -9"):
            target.done()
        assert not target.alive
