"""Load on a server by a client of ours, golang/load: at a fixed rate, or as much as is answered."""

import json
import mmap
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from bench.measurement import BenchError
from tools import toolchains

SOURCE = Path(__file__).parent / "golang/load"
END_SECONDS = 60.0

Request = tuple[str, str, str]
"""Method, path, body."""


@dataclass(frozen=True)
class Done:
    """What was answered, in how many seconds, and the latency that 99 % of the requests had at most."""

    answers: int
    seconds: float
    p99_seconds: float


@dataclass(frozen=True)
class Load:
    """Requests to a server at ``address`` (HOST:PORT): those of HTTP by turns; if none, messages of NATS."""

    address: str
    requests: Sequence[Request] = ()

    def run(self, seconds: float, rate: float = 0) -> Done:
        """``rate``: requests a second; 0: as many as are answered. Raises BenchError if one fails."""
        done = subprocess.run(
            self._command(seconds, rate), capture_output=True, text=True, timeout=seconds + END_SECONDS, check=False
        )
        if done.returncode:
            raise BenchError(f"load on {self.address}: {done.stderr}")
        said = json.loads(done.stdout)
        return Done(said["answers"], said["seconds"], said["p99"])

    @contextmanager
    def running(self, count: Path) -> Iterator[mmap.mmap]:
        """As much as is answered, for as long as the block; the first eight bytes count answers, in the file ``count``.
        Raises BenchError if one failed."""
        count.write_bytes(bytes(8))
        with count.open("r+b") as file:
            counter = mmap.mmap(file.fileno(), 8)
        process = subprocess.Popen([*self._command(86_400, 0), "-count", count], stdout=subprocess.DEVNULL)
        try:
            yield counter
            if process.poll() is not None:
                raise BenchError(f"load on {self.address} has ended")
        finally:
            process.kill()
            process.wait()

    def _command(self, seconds: float, rate: float) -> list[str | Path]:
        command: list[str | Path] = [toolchains.build("1.27", SOURCE), "-address", self.address]
        command += ["-duration", f"{seconds}s", "-rate", str(rate)]
        return [*command, *(["-requests", json.dumps(self.requests)] if self.requests else ["-nats"])]


def counted(counter: mmap.mmap) -> int:
    """What stands in such a counter."""
    return int.from_bytes(counter[:8], sys.byteorder)
