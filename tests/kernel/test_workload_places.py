"""Workloads inside CPU limits and namespaces: the tools that other tests here rely on."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.workload import Workload, binary
from tools.cgroup import PREFIX, CpuLimit


def cpu_seconds(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(") ")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def test_limit_is_kept_and_told_and_the_cgroup_removed() -> None:
    with CpuLimit(0.25) as limit, Workload(binary("spinners"), "-duration", "2s", limit=limit) as target:
        before = cpu_seconds(target.pid)
        facts = target.run()
        used = cpu_seconds(target.pid) - before
        # A period's worth may be used at once at the start, and clock ticks are 10 ms.
        assert used / facts["seconds"] == pytest.approx(0.25, abs=0.1)
        assert limit.statistics()["nr_throttled"] >= 10
        assert limit.throttled_seconds() > 0
    assert not limit.path.exists()
    assert not target.alive


def test_cgroup_is_removed_after_a_failure() -> None:
    limit = CpuLimit(0.5)
    with pytest.raises(ZeroDivisionError), limit, Workload(binary("hello"), limit=limit) as target:
        _ = 1 // 0
    assert not limit.path.exists()
    assert not target.alive


def test_cgroup_of_a_killed_maker_is_removed_by_the_next() -> None:
    program = (
        "import subprocess, time\n"
        "from tools.cgroup import CpuLimit\n"
        "with CpuLimit(0.5) as limit:\n"
        "    subprocess.Popen(limit.enter(['sleep', '60']))\n"
        "    time.sleep(0.5)\n"
        "    print(limit.path, flush=True)\n"
        "    time.sleep(60)\n"
    )
    with subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True) as maker:
        assert maker.stdout
        left = Path(maker.stdout.readline().strip())
        maker.send_signal(signal.SIGKILL)
    assert left.name.startswith(f"{PREFIX}{maker.pid}-")
    assert (left / "cgroup.procs").read_text()
    with CpuLimit(0.5):
        assert not left.exists()


def test_namespaces_of_its_own() -> None:
    with Workload(binary("hello"), namespaces=True) as target:
        for kind in ("mnt", "pid", "user"):
            theirs, ours = (Path(f"/proc/{pid}/ns/{kind}").readlink() for pid in (target.pid, "self"))
            assert theirs != ours
        assert Path(f"/proc/{target.pid}/exe").readlink() == binary("hello")
        assert target.run()["greeting"] == "hello"
        target.kill()
        target.wait()
    deadline = time.monotonic() + 5
    while Path(f"/proc/{target.pid}").exists() and time.monotonic() < deadline:
        time.sleep(0.01)
    assert not Path(f"/proc/{target.pid}").exists()
