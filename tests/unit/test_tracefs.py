"""tracefs: finding it, and the lines of dead sessions. Mounting and removing need root: tests/kernel."""

import os
import re
import subprocess
from pathlib import Path

import pytest

from schedtrace import tracefs

ROOT = Path(__file__).parents[2]
OTHER = "24 22 0:6 / /sys rw shared:2 - sysfs sysfs rw\n"
TRACING = "41 24 0:12 / /sys/kernel/tracing rw,relatime shared:9 - tracefs tracefs rw\n"
DEBUG = "42 24 0:7 / /sys/kernel/debug rw,relatime shared:8 - debugfs debugfs rw\n"
TRACING_IN_DEBUG = "43 42 0:12 / /sys/kernel/debug/tracing rw,relatime - tracefs tracefs rw\n"
ELSEWHERE = "43 42 0:12 / /mnt/tracing rw,relatime - tracefs tracefs rw\n"


@pytest.mark.parametrize(
    ("mountinfo", "path"),
    [
        (OTHER + TRACING, "/sys/kernel/tracing"),
        (OTHER + DEBUG + TRACING_IN_DEBUG, "/sys/kernel/debug/tracing"),
        (OTHER + DEBUG, "/sys/kernel/debug/tracing"),
        (OTHER + DEBUG + TRACING, "/sys/kernel/tracing"),
        (OTHER + ELSEWHERE, None),
        (OTHER, None),
        ("", None),
    ],
)
def test_where_it_is(mountinfo: str, path: str | None) -> None:
    assert tracefs.mount_point(mountinfo) == path


def test_the_tracepoints_are_those_of_the_bpf_programs() -> None:
    sources = "".join(path.read_text() for path in (ROOT / "bpf").glob("*.[ch]"))
    used = re.findall(r"^TRACEPOINT_PROBE\((\w+), (\w+)\)", sources, re.MULTILINE)
    assert sorted(f"{category}/{name}" for category, name in used) == list(tracefs.TRACEPOINTS)


def test_missing_tracepoints(tmp_path: Path) -> None:
    for name in tracefs.TRACEPOINTS[:-1]:
        (tmp_path / "events" / name).mkdir(parents=True)
        (tmp_path / "events" / name / "id").write_text("7\n")
    assert tracefs.missing_tracepoints(str(tmp_path)) == (tracefs.TRACEPOINTS[-1],)


def test_lines_of_dead_sessions_and_nobody_elses() -> None:
    text = (
        "p:uprobes/p_schedtrace_3fbd2_7c4e0_bcc_41 /proc/self/fd/5:0x000000000007c4e0\n"
        "p:uprobes/p_schedtrace_3fbd2_7c4e0_bcc_42 /proc/self/fd/5:0x000000000007c4e0\n"
        "p:uprobes/p__usr_bin_app_0x1234_bcc_41 /usr/bin/app:0x0000000000001234\n"
        "p:mine/p_schedtrace_1_2_bcc_41 /usr/bin/app:0x0000000000001234\n"
        "p:kprobes/p_do_exit_bcc_41 do_exit\n"
    )
    assert tracefs.dead_lines(text, lambda pid: pid == 42) == ("uprobes/p_schedtrace_3fbd2_7c4e0_bcc_41",)


def test_a_pid_taken_over_by_another_program_is_no_session() -> None:
    child = subprocess.Popen(["/bin/cat"], stdin=subprocess.PIPE)
    assert not tracefs.session_lives(child.pid)
    child.communicate()
    assert not tracefs.session_lives(child.pid)
    # the likes of a session: a process that has a file called libbcc.so mapped
    assert not tracefs.session_lives(os.getpid())


def test_a_process_that_maps_bccs_library_may_be_a_session(tmp_path: Path) -> None:
    library = tmp_path / "libbcc.so.0"
    library.write_bytes(bytes(4096))
    script = (
        f"import mmap; f = open('{library}', 'r+b'); m = mmap.mmap(f.fileno(), 0); print(flush=True); input()"
    )
    child = subprocess.Popen(
        ["/usr/bin/python3", "-c", script], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    assert child.stdout is not None
    child.stdout.readline()
    assert tracefs.session_lives(child.pid)
    child.communicate(b"\n")
    assert not tracefs.session_lives(child.pid)


def test_removing_writes_a_line_each_and_truncates_nothing(tmp_path: Path) -> None:
    """On an ordinary file, which keeps what is written to it."""
    (tmp_path / "uprobe_events").write_text("p:uprobes/other /bin/x:0x10\n")
    assert tracefs.remove_lines(str(tmp_path), ["uprobes/a", "uprobes/b"]) == 2
    assert (
        tmp_path / "uprobe_events"
    ).read_text() == "p:uprobes/other /bin/x:0x10\n-:uprobes/a\n-:uprobes/b\n"
