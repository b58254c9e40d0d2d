"""A Go workload of tests/golang/ as a running process: see its protocol package for what is said when.

>>> with Workload(binary("pingpong", "1.27"), "-n", 1000) as target:
...     attach(target.pid)
...     target.go()
...     facts = target.done()  # {"parks": 2000, ...}; still running, idle, until the block ends
"""

import contextlib
import json
import os
import select
import signal
import subprocess
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from tools import toolchains
from tools.cgroup import CpuLimit

GOLANG = Path(__file__).parent / "golang"
READY_SECONDS = 20.0

Facts = dict[str, Any]


def binary(name: str, version: str = "1.27", **flags: Any) -> Path:
    """The workload ``tests/golang/NAME``, built by that Go version; flags as for ``toolchains.build``."""
    return toolchains.build(version, GOLANG / name, **flags)


class WorkloadError(Exception):
    """The workload said something unexpected or nothing in time, or ended; with its standard error."""


class Workload:
    """Starts a workload and waits until it is ready; on leaving, it is killed whatever happened.

    :param limit: start it inside this cgroup
    :param namespaces: start it in mount, PID and user namespaces of its own; ``pid`` is the one outside
    :param env: set over this process's environment
    """

    def __init__(
        self,
        program: Path,
        *arguments: object,
        limit: CpuLimit | None = None,
        namespaces: bool = False,
        env: Mapping[str, str] | None = None,
    ) -> None:
        self._command = [str(program), *map(str, arguments)]
        if namespaces:
            unshare = ["unshare", "--user", "--map-root-user", "--mount", "--pid", "--fork", "--kill-child"]
            self._command = [*unshare, "--mount-proc", *self._command]
        if limit:
            self._command = limit.enter(self._command)
        self._namespaces = namespaces
        self._env = {**os.environ, **(env or {})}
        self._errors = tempfile.TemporaryFile()  # noqa: SIM115 (closed in _end)
        self._pending = b""
        self.pid = 0  # as seen from here
        self.ready: Facts = {}

    def __enter__(self) -> Self:
        self._process = subprocess.Popen(
            self._command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._errors,
            env=self._env,
            start_new_session=True,
        )
        try:
            self.ready = self._expect("ready", READY_SECONDS)
            self.pid = self._only_child() if self._namespaces else self._process.pid
        except BaseException:
            self._end()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._end()

    def go(self) -> None:
        """Let the work begin."""
        self._send("go")

    def done(self, timeout_seconds: float = 120.0) -> Facts:
        """Wait for the end of the work and return the workload's facts about it. It goes on running, idle."""
        return self._expect("done", timeout_seconds)

    def run(self, timeout_seconds: float = 120.0) -> Facts:
        """:meth:`go`, then :meth:`done`."""
        self.go()
        return self.done(timeout_seconds)

    def exit(self, timeout_seconds: float = 20.0) -> int:
        """Let it end by itself; its exit status."""
        self._send("exit")
        return self.wait(timeout_seconds)

    def wait(self, timeout_seconds: float = 20.0) -> int:
        """Wait until it has ended; its exit status, negative for a signal (in namespaces: unshare's)."""
        return self._process.wait(timeout_seconds)

    def kill(self) -> None:
        """End it at once, as a crash would; :meth:`wait` tells when it is gone."""
        os.kill(self.pid, signal.SIGKILL)

    @property
    def alive(self) -> bool:
        """False once it has ended, for whatever reason."""
        return self._process.poll() is None

    def errors(self) -> str:
        """What it has written to its standard error so far."""
        self._errors.seek(0)
        return self._errors.read().decode(errors="replace")

    def _send(self, word: str) -> None:
        assert self._process.stdin
        try:
            self._process.stdin.write(f"{word}\n".encode())
            self._process.stdin.flush()
        except BrokenPipeError as error:
            raise WorkloadError(f"{self._command[0]} is gone: {self.errors()}") from error

    def _expect(self, event: str, timeout_seconds: float) -> Facts:
        line = self._line(time.monotonic() + timeout_seconds)
        facts = json.loads(line)
        if facts.get("event") != event:
            raise WorkloadError(f"{self._command[0]}: expected {event!r}, got {line!r} {self.errors()}")
        return dict(facts)

    def _line(self, deadline: float) -> str:
        assert self._process.stdout
        descriptor = self._process.stdout.fileno()
        poll = select.poll()
        poll.register(descriptor, select.POLLIN)
        while b"\n" not in self._pending:
            left = deadline - time.monotonic()
            if left <= 0 or not poll.poll(left * 1000):
                raise WorkloadError(f"{self._command[0]} says nothing in time: {self.errors()}")
            piece = os.read(descriptor, 65536)
            if not piece:
                status = self._process.wait()
                raise WorkloadError(f"{self._command[0]} ended with status {status}: {self.errors()}")
            self._pending += piece
        line, self._pending = self._pending.split(b"\n", 1)
        return line.decode()

    def _only_child(self) -> int:
        outer = self._process.pid
        (child,) = Path(f"/proc/{outer}/task/{outer}/children").read_text().split()
        return int(child)

    def _end(self) -> None:
        # The whole session that was started for it: with namespaces that is unshare and what it runs.
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        for stream in (self._process.stdin, self._process.stdout):
            if stream:
                with contextlib.suppress(BrokenPipeError):
                    stream.close()
        self._errors.close()
