"""Real Go servers that nobody here wrote, each started on ports of its own with a load to put on it.

>>> with servers.started("etcd", folder) as server:
...     attach(server.pid)
...     server.load(seconds=2)
"""

import base64
import http.client
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, closing, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from tools import toolchains

ROOT = Path(__file__).parents[1]
_NET_HTTP = ROOT / "bench/golang/httpserver"
START_SECONDS = 30.0
CLIENTS = 6

Request = tuple[str, str, str]  # method, path, body


@dataclass(frozen=True)
class Server:
    """A server that answers at ``port``. ``load`` keeps it busy for so many seconds and returns how much it has
    answered; ``requests``: what it is asked by turns; none if it doesn't speak HTTP."""

    pid: int
    port: int
    load: Callable[[float], int]
    requests: Sequence[Request] = ()


def program(name: str) -> Path:
    """The executable of a server of :func:`started`."""
    return toolchains.build("1.27", _NET_HTTP) if name == "net/http" else toolchains.program(name)


@contextmanager
def started(name: str, folder: Path, executable: Path | None = None) -> Iterator[Server]:
    """The server ``name`` ("nats-server", "caddy", "prometheus", "etcd", or "net/http"), with all its files in
    ``folder``. ``executable``: a copy of its program."""
    with _STARTERS[name](folder, executable or program(name)) as server:
        yield server


@contextmanager
def _process(command: Sequence[str | Path], folder: Path) -> Iterator[subprocess.Popen[bytes]]:
    environment = {**os.environ, "HOME": str(folder)}
    log = folder / "server.log"
    with log.open("wb") as output:
        process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=output, stderr=output, env=environment)
    try:
        yield process
        if process.poll() is not None:
            raise RuntimeError(f"{command[0]} ended: {log.read_text()[-2000:]}")
    finally:
        process.send_signal(signal.SIGKILL)
        process.wait()


def _free_ports(number: int) -> list[int]:
    listeners = [socket.create_server(("127.0.0.1", 0)) for _ in range(number)]
    ports = [listener.getsockname()[1] for listener in listeners]
    for listener in listeners:
        listener.close()
    return ports


def _await(condition: Callable[[], bool], process: subprocess.Popen[bytes], what: str) -> None:
    deadline = time.monotonic() + START_SECONDS
    while not condition():
        if process.poll() is not None or time.monotonic() > deadline:
            raise RuntimeError(f"{what} does not answer")
        time.sleep(0.05)


def _answers(port: int, path: str) -> bool:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=5)
    with suppress(OSError, http.client.HTTPException), closing(connection):
        connection.request("GET", path)
        response = connection.getresponse()
        response.read()
        return response.status == 200
    return False


def _http_server(pid: int, port: int, requests: Sequence[Request]) -> Server:
    """Several clients send the requests by turns, each over one connection at a time and a new one now and then."""

    def client(until: float, answers: list[int], errors: list[str]) -> None:
        sent = 0
        while time.monotonic() < until:
            with closing(http.client.HTTPConnection("127.0.0.1", port, timeout=10)) as connection:
                for method, path, body in [*requests] * 8:
                    connection.request(method, path, body)
                    response = connection.getresponse()
                    content = response.read()
                    if response.status != 200:
                        errors.append(f"{method} {path}: {response.status} {content[:200]!r}")
                        return
                    sent += 1
        answers.append(sent)

    def load(seconds: float) -> int:
        answers: list[int] = []
        errors: list[str] = []
        until = time.monotonic() + seconds
        clients = [threading.Thread(target=client, args=(until, answers, errors)) for _ in range(CLIENTS)]
        for one in clients:
            one.start()
        for one in clients:
            one.join()
        if errors or len(answers) != CLIENTS:
            raise RuntimeError(f"a client failed: {errors}")
        return sum(answers)

    return Server(pid, port, load, requests)


@contextmanager
def _nats_server(folder: Path, executable: Path) -> Iterator[Server]:
    command: list[str | Path] = [executable, "-a", "127.0.0.1", "-p", "-1"]
    command += ["--ports_file_dir", folder]
    with _process(command, folder) as process:
        _await(lambda: any(file.stat().st_size for file in folder.glob("*.ports")), process, "nats-server")
        (file,) = folder.glob("*.ports")
        host, port = json.loads(file.read_text())["nats"][0].removeprefix("nats://").rsplit(":", 1)

        def load(seconds: float) -> int:
            client = [sys.executable, "-m", "tools.nats_load", host, port]
            with subprocess.Popen(client, stdout=subprocess.PIPE, cwd=ROOT) as clients:
                time.sleep(seconds)
                clients.terminate()
                assert clients.stdout
                done = json.loads(clients.stdout.read())
            return int(seconds * (done["messages_per_second"] + done["requests_per_second"]))

        yield Server(process.pid, int(port), load)


@contextmanager
def _caddy(folder: Path, executable: Path) -> Iterator[Server]:
    (port,) = _free_ports(1)
    (folder / "index.html").write_text("<p>static</p>" * 1000)
    command: list[str | Path] = [executable, "file-server", "--root", folder]
    with _process([*command, "--listen", f"127.0.0.1:{port}"], folder) as process:
        _await(lambda: _answers(port, "/"), process, "caddy")
        yield _http_server(process.pid, port, [("GET", "/", ""), ("HEAD", "/index.html", "")])


@contextmanager
def _prometheus(folder: Path, executable: Path) -> Iterator[Server]:
    (port,) = _free_ports(1)
    configuration = folder / "prometheus.yml"
    configuration.write_text(
        "global: {scrape_interval: 200ms}\n"
        f"scrape_configs: [{{job_name: itself, static_configs: [{{targets: ['127.0.0.1:{port}']}}]}}]\n"
    )
    command: list[str | Path] = [executable, f"--config.file={configuration}"]
    command += [f"--storage.tsdb.path={folder / 'data'}", f"--web.listen-address=127.0.0.1:{port}"]
    with _process(command, folder) as process:
        _await(lambda: _answers(port, "/-/ready"), process, "prometheus")
        query = "/api/v1/query?query=sum(rate(prometheus_http_requests_total[1m]))by(handler)"
        yield _http_server(process.pid, port, [("GET", query, ""), ("GET", "/metrics", "")])


@contextmanager
def _etcd(folder: Path, executable: Path) -> Iterator[Server]:
    client, peer = (f"http://127.0.0.1:{port}" for port in _free_ports(2))
    command: list[str | Path] = [executable, f"--data-dir={folder / 'data'}"]
    command += [f"--listen-client-urls={client}", f"--advertise-client-urls={client}"]
    command += [f"--listen-peer-urls={peer}", f"--initial-advertise-peer-urls={peer}"]
    command += [f"--initial-cluster=default={peer}"]
    port = int(client.rsplit(":", 1)[1])
    with _process(command, folder) as process:
        _await(lambda: _answers(port, "/health"), process, "etcd")
        key, value = (base64.b64encode(text).decode() for text in (b"key", b"value"))
        put = ("POST", "/v3/kv/put", json.dumps({"key": key, "value": value}))
        get = ("POST", "/v3/kv/range", json.dumps({"key": key}))
        yield _http_server(process.pid, port, [put, get, get])


@contextmanager
def _net_http(_folder: Path, executable: Path) -> Iterator[Server]:
    """A server of ours, with nothing in it but net/http; it ends with its standard input."""
    with subprocess.Popen([executable], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout
            port = int(process.stdout.readline().rsplit(":", 1)[1])
            yield _http_server(process.pid, port, [("GET", "/", ""), ("GET", "/order?id=41", "")])
        finally:
            process.kill()


_STARTERS: Mapping[str, Callable[[Path, Path], AbstractContextManager[Server]]] = {
    "nats-server": _nats_server,
    "caddy": _caddy,
    "prometheus": _prometheus,
    "etcd": _etcd,
    "net/http": _net_http,
}
