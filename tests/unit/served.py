"""A server of metrics on a free port, for tests to be slow, rude or many at."""

from __future__ import annotations

import http.client
import io
import json
import socket
import time
from collections.abc import Callable

from schedtrace.exporter import Exporter
from schedtrace.logs import EventLog
from schedtrace.series import Labels, NodeView, Series, SeriesTotals
from schedtrace.tls import TlsFiles
from schedtrace.web import Address, MetricsServer

VIEW = NodeView(
    tuple(Series(Labels("n", f"p{i}", "c", "x"), SeriesTotals(), (), i, 7, 0.5, None) for i in range(3)), {}, {}
)


class Agent:
    """A server on a free port over a look that a test can change."""

    def __init__(self, tls: TlsFiles | None = None) -> None:
        self.look: Callable[[], NodeView] = lambda: VIEW
        self.problem = ""
        self.log = io.StringIO()
        self.server = MetricsServer(
            Address("127.0.0.1", 0),
            Exporter(self._look),
            EventLog(self.log, as_json=True),
            ready=lambda: self.problem,
            tls=tls,
        )
        self.address = ("127.0.0.1", self.server.address.port)
        self.server.start()

    def _look(self) -> NodeView:
        return self.look()

    def get(self, path: str, method: str = "GET", **headers: str) -> tuple[http.client.HTTPResponse, bytes]:
        connection = http.client.HTTPConnection(*self.address, timeout=20)
        connection.request(method, path, headers={name.replace("_", "-"): value for name, value in headers.items()})
        response = connection.getresponse()
        body = response.read()
        connection.close()
        return response, body

    def raw(self, request: bytes = b"") -> socket.socket:
        connection = socket.create_connection(self.address, timeout=20)
        connection.sendall(request)
        return connection

    @property
    def events(self) -> list[dict[str, object]]:
        return [json.loads(line) for line in self.log.getvalue().splitlines()]


def ended(connection: socket.socket) -> bool:
    """Has the other side closed the connection, without an answer?"""
    try:
        return connection.recv(100) == b""
    except ConnectionResetError:
        return True


def eventually(true: Callable[[], bool], seconds: float = 10.0) -> bool:
    end = time.monotonic() + seconds
    while not true():
        if time.monotonic() > end:
            return False
        time.sleep(0.02)
    return True
