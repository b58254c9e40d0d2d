"""``schedtrace agent`` as a process to measure."""

import gzip
import os
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from bench.measurement import BenchError
from bench.targets import free_port

READY_SECONDS = 120.0
END_SECONDS = 60.0
SETTLE_SECONDS = 13.0
"""Until the children that read executables have ended, and probes that nobody needs are out."""


@dataclass
class MeasuredAgent:
    """A running agent. ``ready_seconds``: from its start until it said that it is."""

    process: subprocess.Popen[bytes]
    port: int
    log: Path
    ready_seconds: float = 0.0

    @property
    def pid(self) -> int:
        return self.process.pid

    def children(self) -> list[int]:
        """Its own: the one that holds the probes, and those that read executables while there are any."""
        return [int(pid) for pid in Path(f"/proc/{self.pid}/task/{self.pid}/children").read_text().split()]

    def keeper(self) -> int:
        """The one that holds the probes."""
        return next(pid for pid in self.children() if b"probe_keeper" in Path(f"/proc/{pid}/cmdline").read_bytes())

    def get(self, path: str) -> str:
        """The body of an answer, asked for as Prometheus does: compressed. Raises OSError."""
        url = f"http://127.0.0.1:{self.port}{path}"
        request = urllib.request.Request(url, headers={"Accept-Encoding": "gzip"})
        with urllib.request.urlopen(request, timeout=30) as answer:
            body = answer.read()
            return (gzip.decompress(body) if answer.headers["Content-Encoding"] else body).decode()

    def stop(self) -> float:
        """SIGTERM; seconds until it has ended. Raises BenchError if it ends otherwise than it should."""
        began = time.monotonic()
        self.process.send_signal(signal.SIGTERM)
        status = self.process.wait(END_SECONDS)
        if status:
            raise BenchError(f"the agent ended with {status}")
        return time.monotonic() - began


@contextmanager
def agent(
    folder: Path, arguments: Sequence[str | Path], *, first: Sequence[str] = (), max_overhead: str = "none"
) -> Iterator[MeasuredAgent]:
    """An agent that is ready, for as long as the block. ``arguments`` must say what it may watch; ``first``: what runs
    it. It sees everything unless ``max_overhead`` says otherwise. Its log is in ``folder``."""
    port, log = free_port(), folder / "agent.log"
    command = [*first, sys.executable, "-m", "schedtrace", "agent", "--listen", f"127.0.0.1:{port}"]
    command += ["--max-overhead", max_overhead, *map(str, arguments)]
    with log.open("wb") as file:
        start = time.monotonic()
        process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stderr=file, start_new_session=True)
    one = MeasuredAgent(process, port, log)
    try:
        while not _ready(one):
            if process.poll() is not None or time.monotonic() - start > READY_SECONDS:
                raise BenchError(f"the agent doesn't get ready: {log.read_text(errors='replace')[-500:]}")
            time.sleep(0.02)
        one.ready_seconds = time.monotonic() - start
        yield one
    finally:
        if process.poll() is None:
            process.kill()
            process.wait()


def _ready(one: MeasuredAgent) -> bool:
    try:
        one.get("/readyz")
    except (urllib.error.URLError, ConnectionError):
        return False
    return True


def anonymous_mb(pid: int) -> float:
    """Memory of a process that no file holds, as /proc/PID/status says. Pages shared since a fork count in full."""
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith("RssAnon"):
            return int(line.split()[1]) / 1024
    raise BenchError(f"process {pid} has ended")


def open_files(pid: int) -> int:
    """File descriptors of a process."""
    return len(os.listdir(f"/proc/{pid}/fd"))  # noqa: PTH208
