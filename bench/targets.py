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
def real_server(name: str) -> Iterator[int]:
    """One of :data:`SERVERS` as a process that accepts a connection every few milliseconds; its process id."""
    port = _free_port()
    with own_copy(toolchains.program(name)) as program:
        process = subprocess.Popen(
            [program, *_arguments(name, port)], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        )
        try:
            _wait_until_listening(name, process, port)
            with _connections(port):
                yield process.pid
        finally:
            process.kill()
            process.wait()


def _arguments(name: str, port: int) -> Sequence[str]:
    if name == "caddy":
        return ("respond", "--listen", f"127.0.0.1:{port}", "ok")
    return ("-a", "127.0.0.1", "-p", str(port))


def _free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return int(server.getsockname()[1])


def _wait_until_listening(name: str, process: subprocess.Popen[bytes], port: int) -> None:
    deadline = time.monotonic() + START_SECONDS
    while process.poll() is None and time.monotonic() < deadline:
        with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), 1):
            return
        time.sleep(0.05)
    raise BenchError(f"{name} does not listen")


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
