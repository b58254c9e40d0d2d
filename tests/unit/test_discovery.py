"""discovery over real processes of this machine; what kind of binary each runs is made up."""

import os
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from schedtrace.cgroups import read_membership, read_mounts
from schedtrace.discovery import GoBinary, GoProcess, _gomaxprocs, look_at, scan
from schedtrace.window import FULL_LEVEL

GO = GoBinary("go1.27.3", FULL_LEVEL, "")
REFUSED = GoBinary("go1.19.8", "", "casgstatus is nowhere to be found")


@pytest.fixture
def programs(tmp_path: Path) -> Iterator["Programs"]:
    with ExitStack() as stack:
        yield Programs(tmp_path, stack)


class Programs:
    """Copies of cat, some of which pass for Go programs, and running processes of them."""

    def __init__(self, folder: Path, stack: ExitStack) -> None:
        self.folder = folder
        self.stack = stack
        self.binaries: dict[bytes, GoBinary] = {}
        self.looked_at: list[str] = []

    def add(self, name: str, binary: GoBinary | None) -> Path:
        path = self.folder / name
        shutil.copy("/bin/cat", path)
        if binary is not None:
            with path.open("ab") as file:
                file.write(name.encode())
            self.binaries[path.read_bytes()] = binary
        return path

    def run(self, path: Path, **environment: str) -> int:
        child = subprocess.Popen([path], stdin=subprocess.PIPE, env=environment)
        self.stack.callback(child.communicate)
        return child.pid

    def look(self, path: str) -> GoBinary | None:
        self.looked_at.append(os.readlink(path))  # noqa: PTH115
        return self.binaries.get(Path(path).read_bytes())

    def found(self) -> dict[int, GoProcess]:
        return {process.pid: process for process in scan(self.look).processes}


def test_go_processes_and_no_others(programs: Programs) -> None:
    app, refused, other = (
        programs.add("app", GO),
        programs.add("refused", REFUSED),
        programs.add("other", None),
    )
    first = programs.run(app, GOMAXPROCS="4", HOME="/")
    second, third = programs.run(app), programs.run(refused)
    programs.run(other)
    found = programs.found()

    assert list(found) == sorted([first, second, third])
    assert [(p.name, p.exe, p.go_version, p.gomaxprocs_environment, p.level, p.obstacle) for p in found.values()] == [
        ("app", str(app), "go1.27.3", 4, "full", ""),
        ("app", str(app), "go1.27.3", None, "full", ""),
        ("refused", str(refused), "go1.19.8", None, "", "casgstatus is nowhere to be found"),
    ]
    assert found[first].threads == 1
    main = read_membership(first, read_mounts()).main
    assert main is not None
    assert found[first].cgroup_path == main.path
    # two processes of one binary: read once; and so is what isn't Go
    assert [programs.looked_at.count(str(path)) for path in (app, refused, other)] == [1, 1, 1]


def test_a_deleted_binary_is_still_read(programs: Programs) -> None:
    app = programs.add("app", GO)
    pid = programs.run(app)
    app.unlink()
    found = programs.found()
    assert (found[pid].name, found[pid].exe) == ("app", str(app))


def test_a_process_that_ends_meanwhile_is_left_out(programs: Programs) -> None:
    app = programs.add("app", GO)
    pid = programs.run(app)

    def look_too_late(path: str) -> GoBinary | None:
        binary = programs.look(path)
        if path == f"/proc/{pid}/exe":
            os.kill(pid, 9)
            os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)
        return binary

    assert pid not in {process.pid for process in scan(look_too_late).processes}


def test_what_may_not_be_read_is_counted(programs: Programs) -> None:
    app = programs.add("app", GO)
    programs.run(app)
    programs.run(app)

    def refuse(path: str) -> GoBinary | None:
        if Path(path).read_bytes() in programs.binaries:
            raise PermissionError
        return None

    readable, refused = scan(lambda _: None), scan(refuse)
    assert refused.processes == ()
    assert refused.unreadable - readable.unreadable == 2
    assert refused.may_ptrace == (os.geteuid() == 0)


@pytest.mark.parametrize(
    ("text", "number"),
    [("8", 8), ("0", None), ("-1", None), ("", None), ("many", None), ("4 ", None), ("٣", None)],
)
def test_gomaxprocs_as_the_runtime_takes_it(text: str, number: int | None) -> None:
    assert _gomaxprocs({"GOMAXPROCS": text}) == number


def test_gomaxprocs_not_set() -> None:
    assert _gomaxprocs({}) is None


def test_a_go_program_that_is_refused_is_told_from_all_others(tmp_path: Path) -> None:
    mark = b"\xff Go buildinf:"
    marked, misplaced = tmp_path / "marked", tmp_path / "misplaced"
    content = Path("/bin/cat").read_bytes()
    content += bytes(-len(content) % 16)
    marked.write_bytes(content + b"x" + mark + mark[:1] + mark)  # at 1 and at 16 behind an aligned offset
    misplaced.write_bytes(content + b"x" + mark)
    assert look_at("/bin/cat") is None
    assert look_at(str(misplaced)) is None
    binary = look_at(str(marked))
    assert binary is not None
    assert (binary.go_version, binary.level) == ("unknown", "")
    assert binary.obstacle.startswith("not a Go program")
