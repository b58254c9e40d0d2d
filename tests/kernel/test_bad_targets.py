"""What can't be attached to or inspected is refused with the right exit code and one line that says why."""

import os
import random
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from types import FrameType

import pytest

from schedtrace import attach, cli, compilation
from schedtrace.attach import Watch
from schedtrace.bpf_text import PROBE
from schedtrace.compilation import Compilation
from schedtrace.errors import AttachFailed, NotTraceable, PermissionDenied, SchedtraceError
from schedtrace.session import Session
from tests.command import Done, as_nobody, attaching, one_line_error, run
from tests.workload import Workload, binary

NO_SUCH_PID = 4_194_304  # the kernel gives none above 4,194,303 (PID_MAX_LIMIT)


@contextmanager
def zombie() -> Iterator[int]:
    pid = os.fork()
    if pid == 0:
        os._exit(0)
    try:
        deadline = time.monotonic() + 10
        while ") Z " not in Path(f"/proc/{pid}/stat").read_text():
            assert time.monotonic() < deadline
            time.sleep(0.001)
        yield pid
    finally:
        os.waitpid(pid, 0)


@contextmanager
def thread() -> Iterator[int]:
    """A thread of this process other than the first."""
    over = threading.Event()
    running = threading.Thread(target=over.wait)
    running.start()
    assert running.native_id
    try:
        yield running.native_id
    finally:
        over.set()
        running.join()


@contextmanager
def number(pid: int) -> Iterator[int]:
    yield pid


NO_PROCESSES: dict[str, tuple[Callable[[], object], str]] = {
    "none of that number": (lambda: number(NO_SUCH_PID), "there is no process 4194304"),
    "a number no process can have": (lambda: number(10**20), "there is no process 1000"),
    "not Go": (lambda: number(os.getpid()), "not a Go program"),
    "a kernel thread": (lambda: number(2), "(kthreadd) is a kernel thread"),
    "a zombie": (zombie, "has exited: a zombie"),
    "a thread": (thread, f"is a thread of process {os.getpid()}"),
}


@pytest.mark.parametrize("command", ["attach", "inspect"])
@pytest.mark.parametrize("kind", NO_PROCESSES)
def test_processes(kind: str, command: str) -> None:
    make, said = NO_PROCESSES[kind]
    with make() as pid:  # type: ignore[attr-defined]
        message = one_line_error(run(command, pid), NotTraceable.exit_code)
    assert said in message
    if kind == "not Go":
        assert f"{Path(sys.executable).resolve()} (PID {os.getpid()}): " in message


@pytest.mark.parametrize("command", ["attach", "inspect"])
def test_another_users_process(command: str) -> None:
    with Workload(binary("hello")) as target:
        done = run(command, target.pid, prefix=as_nobody("dac_read_search"))
    message = one_line_error(done, PermissionDenied.exit_code)
    assert f"process {target.pid} (hello) of user 0" in message
    assert "CAP_SYS_PTRACE" in message


@contextmanager
def at_call(wanted: int, act: Callable[[], None]) -> Iterator[list[str]]:
    """Count the calls of functions in the module attach and of what it calls of ours, and act before one of them."""
    folder = str(Path(attach.__file__).parent)
    calls: list[str] = []

    def count(frame: FrameType, event: str, _argument: object) -> None:
        caller = frame.f_back
        ours = event == "call" and frame.f_code.co_filename.startswith(folder)
        if ours and caller and caller.f_code.co_filename == attach.__file__:
            calls.append(frame.f_code.co_name)
            if len(calls) == wanted:
                act()

    sys.setprofile(count)
    try:
        yield calls
    finally:
        sys.setprofile(None)


@pytest.fixture
def session_at_once(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Let attaching find its BPF programs compiled: what takes long, and has nothing to do with the target."""
    with Compilation() as compilation, Session(compilation, [PROBE]) as session:

        @contextmanager
        def reuse(_compilation: None, wanted: Iterable[str]) -> Iterator[Session]:
            assert set(wanted) == {PROBE}
            try:
                yield session
            finally:
                session.detach(list(session._attachments))
                for pid in list(session._targets):
                    session.retire([pid])
                session.threads.retire(list(session.threads._watched))

        monkeypatch.setattr(attach, "Compilation", lambda **_: nullcontext())
        monkeypatch.setattr(attach, "Session", reuse)
        yield


def steps_of_attaching() -> list[str]:
    with Workload(binary("hello")) as target, at_call(0, lambda: None) as calls, Watch(target.pid):
        sys.setprofile(None)
    return calls


def try_to_watch(pid: int) -> tuple[str, int, str]:
    """How an attempt went: what ended it, the exit code, the message."""
    try:
        with Watch(pid) as watch:
            ended = watch.ended(20)
            watch.stop()
            watch.window(ended)
            return "watched", 0, ended
    except SchedtraceError as error:
        return "refused", error.exit_code, str(error)


@pytest.mark.usefixtures("session_at_once")
def test_target_exits_at_any_step_of_attaching() -> None:
    """It is killed, and gone, just before each of the calls that attaching consists of."""
    outcomes = []
    for i in range(1, len(steps_of_attaching()) + 1):
        with Workload(binary("hello")) as target:

            def end(target: Workload = target) -> None:
                target.kill()
                target.wait()

            with at_call(i, end) as calls:
                outcome = try_to_watch(target.pid)
            assert not target.alive, calls
        outcomes.append((calls[i - 1], *outcome))
        kind, exit_code, message = outcome
        assert message.isprintable()
        assert (kind, exit_code) in (("watched", 0), ("refused", NotTraceable.exit_code)), outcomes
        assert f"{target.pid}" in message, outcomes
        assert "exited" in message or "there is no process" in message, outcomes
    assert [kind for _, kind, *_ in outcomes].count("refused") >= 8, outcomes


@pytest.mark.usefixtures("session_at_once")
def test_target_executes_at_any_step_of_attaching() -> None:
    """Itself once more, at the same addresses: what is watched then is the first program, the second or nothing."""
    refusals = []
    for i in range(1, len(steps_of_attaching()) + 1):
        with Workload(Path("/usr/bin/setarch"), "-R", binary("successor"), "-n", 1) as target:

            def execute(target: Workload = target) -> None:
                target.go()
                assert target._expect("ready", 20)["generation"] == 2

            with at_call(i, execute):
                try:
                    watch = Watch(target.pid)
                except SchedtraceError as error:
                    refusals.append(error)
                    continue
            with watch:
                if watch.ended(0):
                    continue
                target.run()
                watch.stop()
                rows = {row.function: row for row in watch.window().functions}
                assert rows["main.sender"].created == rows["main.receiver"].created == 1
    assert len(refusals) >= 5
    assert {error.exit_code for error in refusals} <= {NotTraceable.exit_code, AttachFailed.exit_code}
    assert all(str(error).isprintable() for error in refusals)


def test_target_exits_while_attached_to() -> None:
    """The same from outside, at random moments."""
    for _ in range(4):
        with Workload(binary("hello")) as target, attaching(target.pid, "--duration", 30) as session:
            time.sleep(random.uniform(0, 2.5))
            target.kill()
            done = session.end()
        if done.returncode == 0:
            assert f"(PID {target.pid}) exited\n" in done.stdout
            assert done.stderr == ""
        else:
            assert str(target.pid) in one_line_error(done, NotTraceable.exit_code)


def main(*arguments: str, capsys: pytest.CaptureFixture[str]) -> Done:
    """The command line within this process: much faster than a process each."""
    exit_code = cli.main(arguments)
    captured = capsys.readouterr()
    return subprocess.CompletedProcess(arguments, exit_code, captured.out, captured.err)


def no_permission(folder: Path) -> Path:
    path = folder / "secret"
    path.write_bytes(b"\x7fELF")
    path.chmod(0)
    return path


def fifo(folder: Path) -> Path:
    os.mkfifo(folder / "fifo")
    return folder / "fifo"


def written(content: bytes) -> Callable[[Path], Path]:
    def write(folder: Path) -> Path:
        (folder / "file").write_bytes(content)
        return folder / "file"

    return write


def link_to_itself(folder: Path) -> Path:
    (folder / "link").symlink_to(folder / "link")
    return folder / "link"


FILES: dict[str, tuple[Callable[[Path], Path], str]] = {
    "empty": (written(b""), "empty file"),
    "a text": (written(b"#!/bin/sh\necho hello\n"), "not an ELF file"),
    "four bytes of ELF": (written(b"\x7fELF"), "truncated"),
    "ELF of zeros": (written(b"\x7fELF\x02\x01\x01" + bytes(1000)), ""),
    "ELF without Go": (lambda _: Path("/bin/sh").resolve(), "not a Go program"),
    "a directory": (lambda folder: folder, "not a regular file"),
    "a FIFO": (fifo, "not a regular file"),
    "a device": (lambda _: Path("/dev/zero"), "not a regular file"),
    "nothing": (lambda folder: folder / "nothing", "No such file or directory"),
    "nothing of an endless name": (lambda folder: folder / ("x" * 300), "File name too long"),
    "a link to itself": (link_to_itself, "Too many levels of symbolic links"),
    "a file as a folder": (lambda folder: written(b"")(folder) / "x", "Not a directory"),
}


@pytest.mark.parametrize("kind", FILES)
def test_files(kind: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    make, said = FILES[kind]
    path = make(tmp_path)
    done = main("inspect", str(path), capsys=capsys)
    message = one_line_error(done, NotTraceable.exit_code)
    assert said in message
    assert str(path)[:50] in message
    if kind in ("empty", "a FIFO", "a directory", "nothing"):
        again = run("inspect", path, seconds=20)  # and so does a process of its own
        assert (again.returncode, again.stdout, again.stderr) == (done.returncode, done.stdout, done.stderr)


def test_file_without_permission(tmp_path: Path) -> None:
    path = no_permission(tmp_path)
    for folder in (tmp_path, *list(tmp_path.parents)[:3]):
        folder.chmod(0o755)
    # All that nobody is allowed is to read the program itself, wherever it is installed.
    script = f"""
import os, sys
from schedtrace import attach, cli, plan, symbols, listings
os.setgroups([]); os.setgid(65534); os.setuid(65534)
sys.exit(cli.main(["inspect", {str(path)!r}]))
"""
    done = run(command=[sys.executable, "-c", script])
    assert "no permission to read it" in one_line_error(done, PermissionDenied.exit_code)


NAMES = ("a\nb", "\x1b[31mred\x1b[0m", "tab\tbell\x07", "bad \udcff\udcfe bytes", "\u202egnp.exe")


@pytest.mark.parametrize("name", NAMES)
def test_names_stay_on_one_printable_line(name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    absent = main("inspect", str(tmp_path / name), capsys=capsys)
    assert "No such file" in one_line_error(absent, NotTraceable.exit_code)
    (tmp_path / name).write_text("text")
    text = main("inspect", str(tmp_path / name), capsys=capsys)
    assert "not an ELF file" in one_line_error(text, NotTraceable.exit_code)


def test_name_of_a_process_stays_on_one_printable_line(tmp_path: Path) -> None:
    name = "".join(NAMES)
    shutil.copy("/bin/sleep", tmp_path / f"program {name}")
    with subprocess.Popen([tmp_path / f"program {name}", "60"]) as process:
        message = one_line_error(run("attach", process.pid), NotTraceable.exit_code)
        process.kill()
    assert "not a Go program" in message
    assert f"(PID {process.pid})" in message


def test_truncated_at_many_points(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Refused, as long as what is needed is missing; never half a plan, and never anything but one line."""
    whole = binary("hello", strip=True).read_bytes()
    expected = main("inspect", str(written(whole)(tmp_path)), capsys=capsys)
    assert expected.returncode == 0
    sizes = {*range(66), *(len(whole) * i // 60 for i in range(60)), *(len(whole) - 2**i for i in range(12))}
    refused = 0
    for size in sorted(sizes):
        done = main("inspect", str(written(whole[:size])(tmp_path)), capsys=capsys)
        if done.returncode == 0:
            assert done.stdout == expected.stdout, size
        else:
            one_line_error(done, NotTraceable.exit_code)
            refused += 1
    assert refused >= len(sizes) - 15


@pytest.mark.parametrize("has_own", [True, False])
def test_relative_paths_mean_what_they_did_while_bcc_compiles(
    monkeypatch: pytest.MonkeyPatch, has_own: bool
) -> None:
    """BCC works in another directory; without one of its own for the thread nothing goes on beside it."""
    if not has_own:
        monkeypatch.setattr(compilation, "_has_own_directory", lambda: False)
    here, seen = Path.cwd(), set()
    with Compilation():
        while any(thread.name == "compilation" for thread in threading.enumerate()):
            seen.add(Path.cwd())
    assert seen == {here} if has_own else seen <= {here}
    assert Path.cwd() == here
