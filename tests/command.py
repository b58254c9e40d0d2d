"""The command line as its users start it: a process of its own, its two streams, its exit code.

>>> done = run("inspect", "/etc/passwd")
>>> one_line_error(done, NotTraceable.exit_code)
'/etc/passwd: not an ELF file'
"""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tests.target_text import TargetText

COMMAND = (sys.executable, "-m", "schedtrace")
_REFUSE_LINKS = """
import errno, sys
from schedtrace import cli, uprobe_multi
uprobe_multi.refusal = lambda: errno.EINVAL
sys.exit(cli.main())
"""
# As on a kernel that has no BPF links for uprobes (before 6.6): through perf's PMU or, without CAP_SYS_ADMIN, tracefs.
WITHOUT_LINKS = (sys.executable, "-c", _REFUSE_LINKS)
SECONDS = 120.0  # far more than anything here takes, also on a machine that has much else to do

Json = dict[str, Any]
Done = subprocess.CompletedProcess[str]


def without(*capabilities: str) -> list[str]:
    """What to put before a command so that root runs it without these capabilities ("sys_admin")."""
    return ["setpriv", "--bounding-set=" + ",".join(f"-{name}" for name in capabilities)]


def as_nobody(*capabilities: str) -> list[str]:
    """What to put before a command so that a user without rights runs it, with these capabilities if any."""
    command = ["setpriv", "--reuid=65534", "--regid=65534", "--clear-groups"]
    if capabilities:
        kept = ",".join(f"+{name}" for name in capabilities)
        command += [f"--inh-caps={kept}", f"--ambient-caps={kept}"]
    return command


def environment(changes: Mapping[str, str | None]) -> dict[str, str]:
    """Our environment with some variables set, or, where None, taken out."""
    merged = {**os.environ, **changes}
    return {name: value for name, value in merged.items() if value is not None}


def run(
    *arguments: object,
    prefix: Sequence[str | Path] = (),
    command: Sequence[str] = COMMAND,
    env: Mapping[str, str | None] | None = None,
    seconds: float = SECONDS,
) -> Done:
    """``schedtrace ARGUMENTS`` to its end."""
    return subprocess.run(
        [*map(str, prefix), *command, *map(str, arguments)],
        capture_output=True,
        text=True,
        errors="surrogateescape",
        env=environment(env or {}),
        timeout=seconds,
        check=False,
        stdin=subprocess.DEVNULL,
    )


def one_line_error(done: Done, exit_code: int) -> str:
    """The message of a command that failed as it should: that exit code, one printable line, nothing else."""
    told = f"exit code {done.returncode}\nstdout: {done.stdout}\nstderr: {done.stderr}"
    assert done.returncode == exit_code, told
    assert done.stdout == "", told
    assert done.stderr.startswith("schedtrace: "), told
    assert done.stderr.endswith("\n"), told
    message = done.stderr.removeprefix("schedtrace: ").removesuffix("\n")
    assert message.isprintable(), told
    assert len(message) > 10, told
    return message


class Attach:
    """``schedtrace attach`` while it runs."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self.process = process
        self.pid = process.pid

    def await_probes(self, text: TargetText, count: int) -> None:
        """Wait until ``count`` breakpoints are in the target's memory and counting has begun."""
        deadline = time.monotonic() + SECONDS
        while len(text.differences()) < count:
            assert time.monotonic() < deadline, "no breakpoints in time"
            assert self.process.poll() is None, self.process.communicate()
            time.sleep(0.01)
        # Counting begins right after the last probe is in; what takes longer is to measure the cost of a hit.
        time.sleep(1)

    def await_line(self) -> str:
        """The next line of its output."""
        assert self.process.stdout
        return self.process.stdout.readline()

    def end(self, signal_number: int | None = None) -> Done:
        """Wait for its end, after sending that signal if any."""
        if signal_number is not None:
            self.process.send_signal(signal_number)
        stdout, stderr = self.process.communicate(timeout=SECONDS)
        return subprocess.CompletedProcess(self.process.args, self.process.returncode, stdout, stderr)

    def end_json(self, signal_number: int | None = signal.SIGINT) -> Json:
        """The object it prints at its end, which must be a good one."""
        done = self.end(signal_number)
        assert (done.returncode, done.stderr) == (0, ""), done
        return dict(json.loads(done.stdout))


@contextmanager
def attaching(
    pid: int,
    *arguments: object,
    prefix: Sequence[str | Path] = (),
    command: Sequence[str] = COMMAND,
    env: Mapping[str, str | None] | None = None,
) -> Iterator[Attach]:
    """``schedtrace attach PID ARGUMENTS``, started; it is killed if it still runs at the end of the block."""
    with subprocess.Popen(
        [*map(str, prefix), *command, "attach", str(pid), *map(str, arguments)],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=environment(env or {}),
    ) as process:
        try:
            yield Attach(process)
        finally:
            process.kill()


HIDE_HEADERS = """
for folder in /lib/modules /usr/src; do [ ! -d $folder ] || mount -t tmpfs none $folder; done
"""
UNMOUNT_TRACEFS = """
for folder in /sys/kernel/tracing /sys/kernel/debug; do umount -l $folder 2>/dev/null || true; done
! grep -qE ' - (tracefs|debugfs) ' /proc/self/mountinfo || exit 99
"""
TRACEFS_READ_ONLY = "mount -o remount,bind,ro /sys/kernel/tracing\n"


def elsewhere(*scripts: str) -> list[str]:
    """What to put before a command so that it runs in mounts of its own, changed by these shell scripts."""
    return ["unshare", "--mount", "sh", "-ec", "".join(scripts) + 'exec "$@"', "sh"]
