"""Programs that work for as long as one likes, with their work counted where it can be read at any moment."""

import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from bench import load
from bench.counted import Counted, Reading, counted
from bench.load import Load
from bench.measurement import process_cpu_ns
from tests import servers

NET_HTTP, CHANNELS, ONE_CPU = "net/http, two bytes", "channels on all CPUs", "channels on one CPU"
WORKS = (NET_HTTP, CHANNELS, ONE_CPU, "nats-server", "etcd")
"""What a transition costs a program on all CPUs is more the less time there is between two: they want the same memory.
So whatever slows one down makes its own work cheaper, but not on one CPU."""


@dataclass(frozen=True)
class Working:
    """A process that works. ``now``: its CPU time and units of work so far."""

    pid: int
    program: Path
    now: Callable[[], Reading]


@dataclass(frozen=True)
class Served:
    """A server that answers, and the load on it. ``program`` is its own: no other process runs it."""

    pid: int
    program: Path
    load: Load


@contextmanager
def serving(name: str, folder: Path) -> Iterator[Served]:
    """A server of :mod:`tests.servers`. What it writes is in memory, so that no disk is measured; its program is
    ``folder``'s namesake in it."""
    program = Path(shutil.copy(servers.program(name), folder / folder.name))
    with (
        tempfile.TemporaryDirectory(prefix="schedtrace-bench-", dir="/dev/shm") as data,
        servers.started(name, Path(data), program) as server,
    ):
        yield Served(server.pid, program, Load(f"127.0.0.1:{server.port}", server.requests))


@contextmanager
def working(name: str, folder: Path) -> Iterator[Working]:
    """One of :data:`WORKS`, as busy as can be. Raises BenchError."""
    count = folder / "count"
    if name in (CHANNELS, ONE_CPU):
        with counted(Counted.program(folder), count, procs=1 if name == ONE_CPU else None) as process:
            yield Working(process.pid, folder / folder.name, process.now)
        return
    with serving("net/http" if name == NET_HTTP else name, folder) as server:
        requests = [("GET", "/", "")] if name == NET_HTTP else server.load.requests
        with Load(server.load.address, requests).running(count) as counter:
            yield Working(
                server.pid, server.program, lambda: Reading(process_cpu_ns(server.pid), load.counted(counter))
            )
