"""``schedtrace export`` as a user runs it: where the output goes, and what is said when something is wrong."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from schedtrace.cli import CLOSED_PIPE, INTERRUPTED, USAGE_ERROR
from schedtrace.errors import SchedtraceError, UnreadableRecording
from tests.command import COMMAND, one_line_error, run
from tests.perfetto_trace import read
from tests.unit import recordings
from tests.unit.simulated import Simulation

EXAMPLE = Path(__file__).parents[2] / "examples/nats-server.rec"
FORMATS = ("perfetto", "chrome", "csv", "html")


@pytest.mark.parametrize("form", FORMATS)
def test_to_a_file_and_to_standard_output(tmp_path: Path, form: str) -> None:
    output = tmp_path / "out"
    done = run("export", EXAMPLE, "--format", form, "-o", output)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
    piped = subprocess.run([*COMMAND, "export", EXAMPLE, "--format", form], capture_output=True, check=True)
    assert piped.stdout == output.read_bytes()
    assert piped.stdout
    umask = os.umask(0)
    os.umask(umask)
    assert output.stat().st_mode & 0o777 == 0o666 & ~umask


def test_without_bcc_and_without_rights(tmp_path: Path) -> None:
    recording = tmp_path / "x.rec"
    recording.write_bytes(recordings.whole_file())
    program = "import sys; sys.modules['bcc'] = None; from schedtrace import cli; sys.exit(cli.main())"
    done = run("export", recording, "--format", "csv", command=(sys.executable, "-c", program))
    assert (done.returncode, len(done.stdout.splitlines())) == (0, 5)


@pytest.mark.parametrize("form", FORMATS)
def test_a_cut_file_is_exported_up_to_its_last_whole_frame(tmp_path: Path, form: str) -> None:
    whole = Simulation(600).file(50)
    cut, output = tmp_path / "cut.rec", tmp_path / "out"
    cut.write_bytes(whole[: len(whole) // 2])
    done = run("export", cut, "--format", form, "-o", output)
    assert done.returncode == 0
    (line,) = done.stderr.splitlines()
    assert line.startswith(
        f"schedtrace: {cut}: the end of the recording: it was cut at byte {len(whole) // 2}: the last"
    )
    content = output.read_bytes()
    if form == "perfetto":
        assert len(read(content).slices) > 100
    elif form == "chrome":
        assert "it was cut at byte" in json.loads(content)["otherData"]["remarks"][0]
    elif form == "html":
        assert b"Not all is here" in content


def test_what_was_lost_is_said(tmp_path: Path) -> None:
    recording = tmp_path / "x.rec"
    recording.write_bytes(recordings.whole_file())
    assert run("export", recording, "--format", "csv").stderr.splitlines() == [
        f"schedtrace: {recording}: 3 events lost, since they were not read fast enough",
        f"schedtrace: {recording}: 12 events of 0.000 s were not kept: not kept",
    ]


def test_what_is_no_recording_is_refused_and_no_output_made(tmp_path: Path) -> None:
    whole, output = recordings.whole_file(), tmp_path / "out"
    hostile = {
        "text": b"hello",
        "empty": b"",
        "damaged": whole[:60] + b"\xff" * 40 + whole[100:],
        "slot": recordings.written(recordings.some_events()),
    }
    for name, content in hostile.items():
        path = tmp_path / name
        path.write_bytes(content)
        done = run("export", path, "--format", "perfetto", "-o", output)
        assert str(path) in one_line_error(done, UnreadableRecording.exit_code)
        assert sorted(p.name for p in tmp_path.iterdir()) == sorted([*list(hostile)[: list(hostile).index(name) + 1]])


@pytest.mark.parametrize(
    ("output", "why"),
    [
        ("/proc/nothing/out", "No such file or directory"),
        ("/", "Is a directory"),
        ("/dev/full", "No space left on device"),
    ],
)
def test_an_output_that_cannot_be_written(output: str, why: str) -> None:
    done = run("export", EXAMPLE, "--format", "csv", "-o", output)
    assert one_line_error(done, SchedtraceError.exit_code) == f"{output}: can't be written: {why}"


def test_a_disk_that_is_full_leaves_nothing_and_keeps_what_was_there(tmp_path: Path) -> None:
    output = tmp_path / "out"
    output.write_text("before")
    done = run("export", EXAMPLE, "--format", "chrome", "-o", output, prefix=["prlimit", "--fsize=100000"])
    assert one_line_error(done, SchedtraceError.exit_code) == f"{output}: can't be written: File too large"
    assert [path.name for path in tmp_path.iterdir()] == ["out"]
    assert output.read_text() == "before"


def test_the_recording_itself_is_no_output(tmp_path: Path) -> None:
    link = tmp_path / "link"
    link.hardlink_to(EXAMPLE) if os.stat(EXAMPLE).st_dev == os.stat(tmp_path).st_dev else link.symlink_to(EXAMPLE)  # noqa: PTH116
    before = EXAMPLE.read_bytes()
    done = run("export", EXAMPLE, "--format", "csv", "-o", link)
    assert one_line_error(done, SchedtraceError.exit_code) == f"{link}: that is the recording itself"
    assert EXAMPLE.read_bytes() == before


def test_a_full_standard_output() -> None:
    with Path("/dev/full").open("wb") as full:
        done = subprocess.run(
            [*COMMAND, "export", EXAMPLE, "--format=csv"], stdout=full, stderr=subprocess.PIPE, text=True, check=False
        )
    assert (done.returncode, done.stderr) == (1, "schedtrace: the output can't be written: No space left on device\n")


@pytest.mark.parametrize("form", FORMATS)
def test_a_closed_pipe(form: str) -> None:
    with subprocess.Popen(
        [*COMMAND, "export", EXAMPLE, "--format", form], stdout=subprocess.PIPE, stderr=subprocess.PIPE
    ) as process:
        assert process.stdout
        assert process.stderr
        process.stdout.close()
        assert (process.wait(60), process.stderr.read()) == (CLOSED_PIPE, b"")


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_interrupted_it_leaves_nothing(tmp_path: Path, number: signal.Signals) -> None:
    recording, folder = tmp_path / "x.rec", tmp_path / "out"
    folder.mkdir()
    simulation = Simulation(3000)
    events = simulation.all_events()
    recording.write_bytes(recordings.written(recordings.TARGET, *[events] * 150))
    output = folder / "out"
    command = [*COMMAND, "export", str(recording), "--format", "chrome", "-o", str(output)]
    for _ in range(5):  # on a busy machine the export may be done before the signal
        with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
            deadline = time.monotonic() + 60
            while not list(folder.iterdir()):
                assert process.poll() is None
                assert time.monotonic() < deadline
                time.sleep(0.005)
            process.send_signal(number)
            out, error = process.communicate(timeout=60)
        if not output.exists():
            break
        output.unlink()
    assert (process.returncode, out, error) == (INTERRUPTED, b"", b"\n")  # behind the ^C of a terminal
    assert list(folder.iterdir()) == []


def test_usage() -> None:
    done = run("export", EXAMPLE)
    assert "--format" in one_line_error(done, USAGE_ERROR)
    done = run("export", EXAMPLE, "--format", "svg")
    assert "'perfetto', 'chrome', 'csv', 'html'" in one_line_error(done, USAGE_ERROR)
    help_text = run("export", "--help").stdout
    assert all(f"--format {form}" in help_text for form in FORMATS)
