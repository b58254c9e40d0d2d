"""The command line against a real kernel: exit codes, one line an error; attach refuses what check finds missing."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from schedtrace.errors import AttachFailed, NodeUnsupported, PermissionDenied
from tests.command import (
    COMMAND,
    TRACEFS_READ_ONLY,
    UNMOUNT_TRACEFS,
    WITHOUT_LINKS,
    as_nobody,
    elsewhere,
    environment,
    one_line_error,
    run,
    without,
)
from tests.workload import Workload, binary

USAGE = 2
COMMANDS = ("attach", "record", "report", "inspect", "list", "check")

USAGE_ERRORS = {
    ("bogus",): "No such command 'bogus'",
    ("--bogus",): "No such option '--bogus'",
    ("attach",): "Missing argument 'PID'",
    ("attach", "abc"): "'abc' is not a valid integer",
    ("attach", "0"): "0 is not in the range x>=1",
    ("attach", "--", "-1"): "-1 is not in the range x>=1",
    ("attach", "1.5"): "'1.5' is not a valid integer",
    ("attach", "1", "2"): "unexpected extra argument (2)",
    ("attach", "1", "--duration", "0"): "0.0 is not in the range x>0",
    ("attach", "1", "--duration", "soon"): "'soon' is not a valid float",
    ("attach", "1", "--interval", "0.01"): "0.01 is not in the range x>=0.1",
    ("attach", "1", "--max-goroutines", "0"): "0 is not in the range",
    ("attach", "1\n2"): r"'1\n2' is not a valid integer",
    ("record", "-o", "x"): "Missing argument 'PID...'",
    ("record", "1"): "Missing option '-o'",
    ("record", "1", "1", "-o", "x"): "a process can be recorded only once",
    ("record", "1", "-o", "x", "--duration", "0"): "0.0 is not in the range x>0",
    ("record", "1", "-o", "x", "--max-size", "1000"): "'1000' is no size of at least 1M",
    ("record", "1", "-o", "x", "--max-size", "1023K"): "'1023K' is no size of at least 1M",
    ("record", "1", "-o", "x", "--ring", "nan"): "'nan' is not a number of seconds",
    ("record", "1", "-o", "x", "--when", "latency<5ms"): "'latency<5ms' is no condition",
    ("report",): "Missing argument 'FILE'",
    ("report", "x", "--from", "soon"): "'soon' is not a valid float",
    ("report", "x", "--from", "inf"): "inf is not in the range",
    ("report", "x", "--goroutine", "0"): "0 is not in the range",
    ("record", *map(str, range(1, 66)), "-o", "x"): "more than 64 processes in one recording",
    ("inspect",): "Missing argument 'PID|FILE'",
    ("inspect", "a", "b"): "unexpected extra argument (b)",
    ("list", "all"): "unexpected extra argument (all)",
    ("a\nb\x1b[31m",): r"No such command 'a\nb\x1b[31m'",
}


@pytest.mark.parametrize("arguments", USAGE_ERRORS, ids=" ".join)
def test_usage_errors(arguments: tuple[str, ...]) -> None:
    message = one_line_error(run(*arguments), USAGE)
    assert USAGE_ERRORS[arguments] in message
    assert message.endswith("--help)")


def test_help() -> None:
    nothing = run()
    assert (nothing.returncode, nothing.stdout) == (USAGE, "")
    assert all(f"  {command} " in nothing.stderr for command in COMMANDS)
    for command in COMMANDS:
        done = run(command, "--help")
        assert (done.returncode, done.stderr) == (0, "")
        assert f"schedtrace {command}" in done.stdout.partition("Examples:")[2]


def test_reader_is_gone() -> None:
    with subprocess.Popen([*COMMAND, "check"], stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        assert process.stdout
        process.stdout.close()
        assert process.wait(60) == 141
        assert process.stderr
        assert process.stderr.read() == b""


@pytest.mark.parametrize("arguments", [["check"], ["check", "--json"], ["inspect", sys.executable]])
def test_disk_is_full(arguments: list[str]) -> None:
    if arguments[0] == "inspect":
        arguments = ["inspect", str(binary("hello"))]
    with Path("/dev/full").open("w") as full:
        done = subprocess.run([*COMMAND, *arguments], stdout=full, stderr=subprocess.PIPE, text=True, check=False)
    assert done.returncode == 1
    assert done.stderr == "schedtrace: the output can't be written: No space left on device\n"


# What a process may lack, and what it then is told; None: it needs no more.
CAPABILITIES = {
    "bpf": None,  # CAP_SYS_ADMIN includes it
    "perfmon": None,
    "sys_admin": None,
    "sys_ptrace": "CAP_SYS_PTRACE",
    "bpf,sys_admin": "CAP_BPF",
    "perfmon,sys_admin": "CAP_PERFMON",
    "sys_ptrace,sys_admin": "CAP_SYS_PTRACE",
    "bpf,perfmon,sys_ptrace,sys_admin": "CAP_SYS_PTRACE",
}


@pytest.mark.parametrize("missing", CAPABILITIES)
def test_check_and_attach_agree_on_capabilities(missing: str) -> None:
    named = CAPABILITIES[missing]
    prefix = without(*missing.split(","))
    with Workload(binary("hello")) as target:
        attached = run("attach", target.pid, "--duration", 0.2, prefix=prefix)
    checked = run("check", "--json", prefix=prefix)
    findings = json.loads(checked.stdout)["findings"]
    assert checked.returncode == attached.returncode, (attached, findings)
    if named is None:
        assert (attached.returncode, attached.stderr) == (0, "")
    else:
        assert named in one_line_error(attached, PermissionDenied.exit_code)
        (capabilities,) = [finding for finding in findings if finding["name"] == "capabilities"]
        assert capabilities["status"] == "missing"
        assert named in capabilities["detail"]


# Command, what is done to its surroundings, capabilities taken away, what it says.
TRACEFS = {
    "not mounted and may not be": (COMMAND, UNMOUNT_TRACEFS, ["sys_admin"], "mount -t tracefs"),
    "read-only without links": (WITHOUT_LINKS, TRACEFS_READ_ONLY, ["sys_admin"], "uprobe_events can't be written"),
}


@pytest.mark.parametrize("case", TRACEFS)
def test_check_and_attach_agree_on_tracefs(case: str) -> None:
    command, script, capabilities, said = TRACEFS[case]
    prefix = [*elsewhere(script), *without(*capabilities)]
    with Workload(binary("hello")) as target:
        attached = run("attach", target.pid, "--duration", 0.2, prefix=prefix, command=command)
    assert said in one_line_error(attached, PermissionDenied.exit_code)
    checked = run("check", prefix=prefix, command=command)
    assert checked.returncode == PermissionDenied.exit_code
    assert said in " ".join(checked.stdout.split())


def test_nobody_is_told_what_is_missing() -> None:
    """A process of nobody's own, which nobody may look into, and BPF, which nobody may load."""
    nobody = as_nobody("dac_read_search")
    with subprocess.Popen([*nobody, binary("hello")], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as target:
        assert target.stdout
        assert b"ready" in target.stdout.readline()
        attached = run("attach", target.pid, "--duration", 0.2, prefix=nobody)
        target.kill()
    message = one_line_error(attached, PermissionDenied.exit_code)
    assert "CAP_BPF, CAP_PERFMON" in message
    assert run("check", prefix=nobody).returncode == PermissionDenied.exit_code


def test_without_bcc(tmp_path: Path) -> None:
    start = "; from schedtrace import cli; sys.exit(cli.main())"
    hide = "import sys; sys.modules['bcc'] = None"
    (tmp_path / "other/bcc").mkdir(parents=True)
    (tmp_path / "other/bcc/__init__.py").write_text("")
    broken = tmp_path / "broken/bcc"
    broken.mkdir(parents=True)
    (broken / "__init__.py").write_text("from . import libbcc\n")
    (broken / "libbcc.py").write_text("import ctypes\nlib = ctypes.CDLL('libbcc-is-not-here.so.0')\n")
    cases = {
        hide: "apt-get install python3-bpfcc",
        f"import sys; sys.path.insert(0, '{tmp_path}/other')": "is another package of that name",
        f"import sys; sys.path.insert(0, '{tmp_path}/broken')": "libbcc-is-not-here.so.0",
    }
    with Workload(binary("hello")) as target:
        for beginning, said in cases.items():
            command = [sys.executable, "-c", beginning + start]
            message = one_line_error(run("attach", target.pid, command=command), NodeUnsupported.exit_code)
            assert said in message
    checked = run("check", command=[sys.executable, "-c", hide + start])
    assert (checked.returncode, checked.stderr) == (NodeUnsupported.exit_code, "")


IN_A_PID_NAMESPACE = """
import sys
from tests.command import run
from tests.workload import Workload, binary
with Workload(binary("hello")) as target:
    done = run("attach", target.pid, "--duration", 0.2)
sys.stdout.write(done.stdout)
sys.stderr.write(done.stderr)
sys.exit(done.returncode)
"""


def test_pid_namespace_that_bpf_knows_nothing_of() -> None:
    """Where PIDs are others than those the kernel uses, nothing would be counted: it is refused."""
    command = ["unshare", "--pid", "--fork", "--kill-child", "--mount-proc"]
    done = subprocess.run(
        [*command, sys.executable, "-c", IN_A_PID_NAMESPACE],
        cwd=Path(__file__).parents[2],
        capture_output=True,
        text=True,
        check=False,
    )
    assert "hostPID: true" in one_line_error(done, NodeUnsupported.exit_code)


def test_too_few_file_descriptors() -> None:
    with Workload(binary("hello")) as target:
        for limit in (9, 20):
            done = run("attach", target.pid, "--duration", 0.2, prefix=["prlimit", f"--nofile={limit}"])
            assert "Too many open files" in one_line_error(done, done.returncode)
            assert done.returncode in (AttachFailed.exit_code, NodeUnsupported.exit_code)


def test_environment_is_no_trap(tmp_path: Path) -> None:
    """A module of ours, or one that Python starts with, in the folder it is started in."""
    for name in ("schedtrace.py", "uprobe_multi.py", "socket.py", "bcc.py"):
        (tmp_path / name).write_text("raise SystemExit('a trap')\n")
    script = Path(sys.executable).with_name("schedtrace")
    with Workload(binary("hello")) as target:
        command = [str(script), "attach", str(target.pid), "--duration", "0.2"]
        done = subprocess.run(command, cwd=tmp_path, env=environment({}), capture_output=True, check=False)
    assert (done.returncode, done.stderr) == (0, b"")
