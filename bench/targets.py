"""Programs to watch in a bench."""

import contextlib
import shutil
import socket
import subprocess
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from bench.measurement import BenchError
from tools import toolchains

SERVERS = ("nats-server", "caddy")
START_SECONDS = 30.0
BETWEEN_CONNECTIONS_SECONDS = 0.005


@contextmanager
def own_copy(program: Path) -> Iterator[Path]:
    """A copy of a program that nobody else runs or probes: uprobes belong to a file, whoever runs it."""
    with tempfile.TemporaryDirectory(prefix="schedtrace-bench-") as folder:
        yield Path(shutil.copy(program, folder))


@contextmanager
def running_server(command: Sequence[str | Path], port: int) -> Iterator[int]:
    """A process that listens at that port; its process id. Raises BenchError if it doesn't."""
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        deadline = time.monotonic() + START_SECONDS
        while not _listens(port):
            if process.poll() is not None or time.monotonic() > deadline:
                raise BenchError(f"{Path(command[0]).name} does not listen")
            time.sleep(0.05)
        yield process.pid
    finally:
        process.kill()
        process.wait()


@contextmanager
def real_server(name: str) -> Iterator[int]:
    """One of :data:`SERVERS` as a process that accepts a connection every few milliseconds; its process id."""
    port = free_port()
    with (
        own_copy(toolchains.program(name)) as program,
        running_server([program, *_arguments(name, port)], port) as pid,
        _connections(port),
    ):
        yield pid


def _arguments(name: str, port: int) -> Sequence[str]:
    if name == "caddy":
        return ("respond", "--listen", f"127.0.0.1:{port}", "ok")
    return ("-a", "127.0.0.1", "-p", str(port))


def free_port() -> int:
    """A TCP port that nobody listens at."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        return int(server.getsockname()[1])


def _listens(port: int) -> bool:
    with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), 1):
        return True
    return False


@contextmanager
def _connections(port: int) -> Iterator[None]:
    """Connect to a port again and again, so that there is something to see."""
    stop = threading.Event()

    def connect() -> None:
        while not stop.wait(BETWEEN_CONNECTIONS_SECONDS):
            with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), 1):
                pass

    thread = threading.Thread(target=connect)
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join()
