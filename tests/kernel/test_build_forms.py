"""Every form in which a Go program comes, watched while it runs: a ping-pong's counts are exact in all of them."""

import shutil
import subprocess
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest

from schedtrace.attach import Watch, plan_of
from schedtrace.errors import NotTraceable
from schedtrace.window import Window
from tests.unit.forms import without_sections
from tests.workload import GOLANG, Workload, binary
from tools import toolchains

N = 2003
VERSIONS = ("1.21", "1.24", "1.27")
BUILDINFO_MAGIC = b"\xff Go buildinf:"
EXTERNAL = ("-linkmode", "external")

# Form -> flags as for toolchains.build.
BUILT: Mapping[str, Mapping[str, Any]] = {
    "plain": {},
    "stripped": {"strip": True},
    "trimpath": {"trimpath": True},
    "pie, internal linking": {"buildmode": "pie"},
    "pie, external linking": {"buildmode": "pie", "cgo": True, "ldflags": EXTERNAL},
    "static pie": {"buildmode": "pie", "cgo": True, "ldflags": (*EXTERNAL, "-extldflags", "-static-pie")},
    "external linking": {"cgo": True, "ldflags": EXTERNAL},
}


def _without_buildinfo(image: bytes) -> bytes:
    assert image.count(BUILDINFO_MAGIC) >= 1
    return image.replace(BUILDINFO_MAGIC, bytes(len(BUILDINFO_MAGIC)))


# Form -> (the form it is made from, how).
ALTERED: Mapping[str, tuple[str, Callable[[bytes], bytes]]] = {
    "no section headers": ("stripped", without_sections),
    "no section headers, pie": ("pie, internal linking", without_sections),
    "no section headers, external pie": ("pie, external linking", without_sections),
    "no build information": ("stripped", _without_buildinfo),
}


def _watch(program: Path, *arguments: object) -> Window:
    with Workload(program, *arguments) as target, Watch(target.pid) as watch:
        target.run()
        watch.stop()
        return watch.window()


def _assert_exact(window: Window) -> None:
    functions = [f for f in window.functions if f.function in ("main.ping", "main.pong")]
    assert [f.created for f in functions] == [f.exits for f in functions] == [1, 1]
    assert sum(f.parks for f in functions) == sum(f.readies for f in functions) == 2 * N
    for f in functions:
        assert f.runs == f.readies + f.created + f.preempted + f.yielded, f
    assert window.sched_latency["channel"].count >= 2 * N
    # Which of the two it is depends on who comes first to the channel.
    assert sum(h.count for reason, h in window.wait.items() if reason in ("chan receive", "chan send")) >= 2 * N
    assert set(window.lost) <= {"interval_began_before_window", "thread_switch_unseen"}


def _altered(path: Path, image: bytes) -> Path:
    path.write_bytes(image)
    path.chmod(0o755)
    return path


@pytest.mark.parametrize("form", BUILT)
@pytest.mark.parametrize("version", VERSIONS)
def test_built(version: str, form: str) -> None:
    window = _watch(binary("pingpong", version, **BUILT[form]), "-n", N)
    assert window.target.symbols == ("pclntab" if "stripped" in form else "symtab")
    assert window.target.go_version == f"go{toolchains.release(version)}"
    _assert_exact(window)


@pytest.mark.parametrize("form", ALTERED)
@pytest.mark.parametrize("version", VERSIONS)
def test_altered(version: str, form: str, tmp_path: Path) -> None:
    origin, alter = ALTERED[form]
    image = alter(binary("pingpong", version, **BUILT[origin]).read_bytes())
    window = _watch(_altered(tmp_path / "pingpong", image), "-n", N)
    assert window.target.symbols == "pclntab"
    assert window.target.go_version == f"go{toolchains.release(version)}"
    _assert_exact(window)


@pytest.mark.parametrize("version", VERSIONS)
def test_strip_command(version: str, tmp_path: Path) -> None:
    program = binary("pingpong", version, **BUILT["pie, external linking"])
    subprocess.run(["strip", "--strip-all", "-o", tmp_path / "pingpong", program], check=True)
    window = _watch(tmp_path / "pingpong", "-n", N)
    assert window.target.symbols == "pclntab"
    _assert_exact(window)


def _host() -> Path:
    return toolchains.compile_c(GOLANG / "cshared/host/host.c", flags=["-ldl"])


def _library(version: str, **flags: Any) -> Path:
    return binary("cshared", version, cgo=True, buildmode="c-shared", **flags)


@pytest.mark.parametrize("strip", [False, True], ids=["plain", "stripped"])
@pytest.mark.parametrize("version", VERSIONS)
def test_library_of_a_c_program(version: str, strip: bool) -> None:
    library = _library(version, strip=strip)
    window = _watch(_host(), library, N)
    assert window.target.exe == str(_host())
    assert window.target.go_version == f"go{toolchains.release(version)}"
    _assert_exact(window)


def test_library_that_two_programs_use_and_that_is_deleted(tmp_path: Path) -> None:
    library = tmp_path / "library.so"
    shutil.copyfile(_library("1.27"), library)
    with Workload(_host(), library, N) as one, Workload(_host(), library, 10 * N) as other:
        assert plan_of(str(one.pid), syscalls=False).path == str(library)
        library.unlink()
        with Watch(one.pid) as watch:
            other.run()
            one.run()
            watch.stop()
            _assert_exact(watch.window())


def test_library_whose_runtime_is_not_known(tmp_path: Path) -> None:
    image = _library("1.27").read_bytes().replace(b"runtime.casgstatus\0", b"runtime.casGstatus\0")
    library = _altered(tmp_path / "library.so", image)
    with (
        Workload(_host(), library, N) as target,
        pytest.raises(NotTraceable, match=rf"{library} in {_host()} \(PID {target.pid}\): no function"),
    ):
        Watch(target.pid)


def test_program_without_go() -> None:
    with subprocess.Popen(["sleep", "60"]) as process:
        try:
            with pytest.raises(NotTraceable, match=rf"sleep \(PID {process.pid}\): not a Go program"):
                Watch(process.pid)
        finally:
            process.kill()
