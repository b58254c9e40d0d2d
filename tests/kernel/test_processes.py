"""procfs, cgroups and discovery over running Go programs: limits, namespaces, build forms."""

import os
import subprocess
from pathlib import Path

import pytest

from schedtrace.cgroups import CpuStat, read_membership, read_mounts
from schedtrace.discovery import scan
from schedtrace.procfs import open_process
from schedtrace.window import FULL_LEVEL
from tests.workload import GOLANG, Workload, binary
from tools import toolchains
from tools.cgroup import CpuLimit


def test_limit_and_throttling_of_a_process() -> None:
    with CpuLimit(0.25) as limit, Workload(binary("spinners"), "-duration", "1s", limit=limit) as target:
        target.run()
        membership = read_membership(target.pid, read_mounts())
        main, found = membership.main, membership.cpu_limit()
        assert main is not None
        assert found is not None
        assert (main.path, main.id) == (f"/{limit.path.name}", limit.path.stat().st_ino)
        assert (found.own_cores, found.cores, found.directory) == (0.25, 0.25, str(limit.path))
        before, stat, after = limit.statistics(), membership.cpu_stat(), limit.statistics()
        assert isinstance(stat, CpuStat)
        assert 5 <= before["nr_throttled"] <= stat.throttled_periods <= after["nr_throttled"]
        assert before["nr_periods"] <= stat.periods <= after["nr_periods"]
        assert stat.throttled_ns / 1e9 == pytest.approx(limit.throttled_seconds(), rel=0.2)


def test_list_shows_go_programs_and_their_limits() -> None:
    with (
        CpuLimit(0.5) as limit,
        Workload(binary("hello", "1.21"), limit=limit, env={"GOMAXPROCS": "3"}) as limited,
        Workload(binary("hello", "1.27", strip=True)) as free,
        subprocess.Popen(["/bin/cat"], stdin=subprocess.PIPE) as cat,
    ):
        found = {process.pid: process for process in scan().processes}
        cat.communicate()
        assert cat.pid not in found
        assert os.getpid() not in found
        one, two = found[limited.pid], found[free.pid]
        assert (one.name, one.go_version) == ("hello", f"go{toolchains.release('1.21')}")
        assert one.runtime
        assert two.runtime
        assert (one.gomaxprocs_environment, one.runtime.gomaxprocs) == (3, 3)
        assert (two.gomaxprocs_environment, two.runtime.gomaxprocs) == (None, os.cpu_count())
        assert one.runtime.goroutines >= 1
        assert (one.quota_cores, one.cgroup_path) == (0.5, f"/{limit.path.name}")
        assert one.threads == len(list(Path(f"/proc/{limited.pid}/task").iterdir()))
        assert two.go_version == f"go{toolchains.release('1.27')}"
        assert (one.level, one.obstacle, two.level) == (FULL_LEVEL, "", FULL_LEVEL)


def test_a_process_in_namespaces_of_its_own() -> None:
    with (
        Workload(binary("hello"), namespaces=True) as target,
        open_process(target.pid) as process,
        open_process(os.getpid()) as here,
    ):
        assert process.container_pid == 1
        assert process.name == "hello"
        assert process.exe == str(binary("hello"))
        theirs, ours = process.namespaces, here.namespaces
        assert theirs.pid != ours.pid
        assert theirs.mnt != ours.mnt
        assert theirs.user != ours.user
        assert process.thread_ids()[0] == target.pid  # numbers of our own namespace
        target.kill()
        assert process.wait(10)


@pytest.mark.parametrize("version", ["1.21", "1.27"])
@pytest.mark.parametrize("buildmode", ["exe", "pie"])
def test_load_bias_of_go_programs(version: str, buildmode: str) -> None:
    program = binary("hello", version, buildmode=buildmode)
    with Workload(program) as target, open_process(target.pid) as process:
        lowest = min(mapping.start for mapping in process.mappings() if mapping.path == str(program))
        assert process.load_bias() == lowest - first_vaddr(program)
        assert (process.load_bias() == 0) == (buildmode == "exe")


def first_vaddr(program: Path) -> int:
    """Virtual address of the first segment that is loaded, by readelf."""
    headers = subprocess.run(["readelf", "-lW", program], capture_output=True, text=True, check=True).stdout
    return min(int(line.split()[2], 16) for line in headers.splitlines() if line.split()[:1] == ["LOAD"])


def test_a_go_runtime_in_a_shared_object_is_among_the_mapped_files(tmp_path: Path) -> None:
    library = toolchains.build("1.27", GOLANG / "cshared", buildmode="c-shared", cgo=True)
    program = tmp_path / "loads"
    source = tmp_path / "loads.c"
    source.write_text(
        "#include <dlfcn.h>\n"
        "#include <stdio.h>\n"
        "int main(int n, char **v) {\n"
        '  puts(dlopen(v[1], RTLD_NOW) ? "ready" : dlerror());\n'
        "  fflush(stdout);\n"
        "  getchar();\n"
        "}\n"
    )
    subprocess.run(["cc", "-o", program, source, "-ldl"], check=True)
    with subprocess.Popen([program, library], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as child:
        assert child.stdout is not None
        assert child.stdout.readline() == "ready\n"
        with open_process(child.pid) as process:
            (found,) = [file for file in process.shared_objects() if file.path == str(library)]
            assert (found.device, found.inode) == (library.stat().st_dev, library.stat().st_ino)
            assert found.file_offset == 0
            assert not [file for file in process.shared_objects() if file.path == str(program)]
        child.communicate("\n")
