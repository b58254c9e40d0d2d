"""Asking an agent: what it answers, and what else may answer there."""

import json
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, HTTPServer
from threading import Thread

import pytest

from schedtrace.agent_client import AgentView, ask_agent
from schedtrace.errors import SchedtraceError
from schedtrace.report_json import processes_json
from schedtrace.series import SeriesTotals, WatchedProcess


@contextmanager
def answering(status: int, body: bytes) -> Iterator[str]:
    """A server that has one answer, and its address."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(status if self.path == "/processes" else 404)
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: object) -> None:
            pass

    with HTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = Thread(target=server.serve_forever)
        thread.start()
        try:
            yield f"127.0.0.1:{server.server_address[1]}"
        finally:
            server.shutdown()
            thread.join()


def test_what_an_agent_says() -> None:
    totals = SeriesTotals(
        seen_ns={"full": 2_000_000_000}, hits={"full": 7}, overhead_ns={"target": 5_000_000, "agent": 1_000_000}
    )
    watched = [WatchedProcess(7, "app", "full", totals, -3_000_000.0), WatchedProcess(8, "b", "passive", totals, None)]
    body = json.dumps(processes_json(watched)).encode()
    with answering(200, body) as address:
        for form in (address, f"http://{address}", f"http://{address}/"):
            found = ask_agent(form)
            assert found[7] == AgentView(
                7, "full", {"full": 2.0}, {"full": 7}, {"target": 0.005, "agent": 0.001}, -0.003
            )
            assert (found[8].level, found[8].budget_seconds) == ("passive", None)


@pytest.mark.parametrize(
    ("status", "body", "why"),
    [
        (404, b"", "no agent answers there, or an older one: 404"),
        (200, b"hello", "no agent answers there"),
        (200, b"[" * 100_000, "what answers there is no agent"),
        (200, b"[]", "what answers there is no agent"),
        (200, b'{"schema": "schedtrace.processes/9"}', "of another version"),
        (200, b'{"schema": "schedtrace.processes/1", "processes": [{"pid": []}]}', "no agent"),
        (200, b'{"schema": "schedtrace.processes/1", "processes": 7}', "no agent"),
        (200, b"\xff\xfe", "no agent"),
    ],
)
def test_what_is_no_agent(status: int, body: bytes, why: str) -> None:
    with answering(status, body) as address, pytest.raises(SchedtraceError, match=why) as caught:
        ask_agent(address)
    assert str(caught.value).isprintable()


def test_nobody_there() -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{free.getsockname()[1]}"
    with pytest.raises(SchedtraceError, match="Connection refused"):
        ask_agent(address)
    for wrong in ("file:///etc/passwd", "ftp://127.0.0.1", "::::", "a b"):
        with pytest.raises(SchedtraceError):
            ask_agent(wrong)
