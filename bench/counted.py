"""A program that counts its work where others can read it while it runs: see golang/counted."""

import mmap
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from bench.measurement import process_cpu_ns
from tools import toolchains

SOURCE = Path(__file__).parent / "golang/counted"


@dataclass(frozen=True)
class Reading:
    """CPU time and units of work until now."""

    cpu_ns: int
    units: int


@dataclass(frozen=True)
class Counted:
    """One that runs."""

    process: subprocess.Popen[str]
    counter: mmap.mmap

    @staticmethod
    def program(folder: Path) -> Path:
        """A copy of its executable, for probes of its own."""
        return Path(shutil.copy(toolchains.build("1.27", SOURCE), folder / folder.name))

    @property
    def pid(self) -> int:
        return self.process.pid

    def now(self) -> Reading:
        return Reading(process_cpu_ns(self.pid), int.from_bytes(self.counter[:8], sys.byteorder))

    def go(self) -> None:
        """Have one that waits begin."""
        assert self.process.stdin
        self.process.stdin.write("go\n")
        self.process.stdin.flush()


@contextmanager
def counted(program: Path, count: Path, *arguments: str, procs: int | None = None) -> Iterator[Counted]:
    """Starts it, counting in the file ``count``, and kills it at the end. ``procs``: GOMAXPROCS."""
    count.write_bytes(bytes(8))
    with count.open("r+b") as file:
        counter = mmap.mmap(file.fileno(), 8)
    command: list[str | Path] = [program, "-count", count, *arguments]
    environment = {**os.environ, **({"GOMAXPROCS": str(procs)} if procs else {})}
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment)
    try:
        assert process.stdout
        process.stdout.readline()
        yield Counted(process, counter)
    finally:
        process.kill()
        process.communicate()
