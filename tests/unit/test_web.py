"""The HTTP server: against prometheus_client's negotiation, and against clients that are slow, rude or many."""

from __future__ import annotations

import gzip
import http.client
import io
import random
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING
from wsgiref.util import setup_testing_defaults

import pytest
from prometheus_client import CollectorRegistry, make_wsgi_app

from schedtrace import web
from schedtrace.errors import SchedtraceError
from schedtrace.exporter import Exporter
from schedtrace.logs import EventLog
from schedtrace.series import Labels, NodeView, Series, SeriesTotals
from schedtrace.web import Address, MetricsServer, parse_address
from tests.unit.served import VIEW, Agent, ended, eventually

if TYPE_CHECKING:
    from wsgiref.types import WSGIApplication, WSGIEnvironment

PROMETHEUS_ACCEPT = (
    "application/openmetrics-text;version=1.0.0,application/openmetrics-text;version=0.0.1;q=0.75,"
    "text/plain;version=0.0.4;q=0.5,*/*;q=0.1"
)


@pytest.fixture
def agent(capfd: pytest.CaptureFixture[str]) -> Iterator[Agent]:
    made = Agent()
    yield made
    made.server.close()
    assert capfd.readouterr() == ("", "")


@pytest.mark.parametrize(
    ("text", "host", "port"),
    [
        ("127.0.0.1:9755", "127.0.0.1", 9755),
        ("[::1]:80", "::1", 80),
        ("[fe80::1%eth0]:0", "fe80::1%eth0", 0),
        (":9755", "", 9755),
        ("node-1.example:65535", "node-1.example", 65535),
    ],
)
def test_addresses(text: str, host: str, port: int) -> None:
    address = parse_address(text)
    assert (address.host, address.port, str(address)) == (host, port, text)


@pytest.mark.parametrize(
    "text", ["", "9755", "host", "::1:80", "[::1]", "[::1]80", "h:65536", "h:-1", "h:", "h:٣", "h:1\n"]
)
def test_what_is_no_address(text: str) -> None:
    with pytest.raises(ValueError, match=r"is no address to listen on: give HOST:PORT, \[IPv6\]:PORT, or :PORT"):
        parse_address(text)


def test_addresses_that_cannot_be_had(agent: Agent) -> None:
    for address, reason in (
        (agent.server.address, "Address already in use"),
        (Address("192.0.2.1", 0), "Cannot assign requested address"),
        (Address("x" * 64, 0), "that is no host name"),
    ):
        with pytest.raises(SchedtraceError) as caught:
            MetricsServer(address, Exporter(lambda: VIEW), EventLog(io.StringIO()))
        assert str(caught.value) == f"can't listen on {address}: {reason}; give another address with --listen"


def test_all_addresses(capfd: pytest.CaptureFixture[str]) -> None:
    server = MetricsServer(Address("", 0), Exporter(lambda: VIEW), EventLog(io.StringIO()))
    server.start()
    hosts = ["127.0.0.1", "::1"] if socket.has_dualstack_ipv6() else ["127.0.0.1"]
    for host in hosts:
        connection = http.client.HTTPConnection(host, server.address.port, timeout=20)
        connection.request("GET", "/healthz")
        assert connection.getresponse().read() == b"ok\n"
        connection.close()
    server.close()
    assert capfd.readouterr() == ("", "")


def test_closing_a_server_that_never_started() -> None:
    server = MetricsServer(Address("127.0.0.1", 0), Exporter(lambda: VIEW), EventLog(io.StringIO()))
    port = server.address.port
    server.close()
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.1", port), timeout=5)


@pytest.mark.parametrize(
    "accept",
    [
        "",
        "*/*",
        "text/plain;version=0.0.4",
        "text/plain;version=1.0.0;escaping=allow-utf-8",
        "text/plain;version=1.0.0;escaping=dots",
        "application/openmetrics-text",
        "application/openmetrics-text;version=0.0.1",
        "application/openmetrics-text;version=1.0.0;escaping=dots",
        "application/openmetrics-text;version=2.0.0",
        PROMETHEUS_ACCEPT,
    ],
)
def test_negotiation_is_that_of_prometheus_client(accept: str, agent: Agent) -> None:
    """Status, type, encoding and, but for how numbers are written, the lines of its own application."""
    registry = CollectorRegistry()
    registry.register(Exporter(lambda: VIEW))
    queries = ("", "name[]=schedtrace_threads", "name[]=none&name[]=schedtrace_open_fds", "%zz&=&name")
    for query, encoding in product(queries, ("", "gzip", "deflate, gzip;q=0.5", "br")):
        environ: WSGIEnvironment = {"QUERY_STRING": query, "HTTP_ACCEPT": accept, "HTTP_ACCEPT_ENCODING": encoding}
        setup_testing_defaults(environ)
        status, headers, body = call(make_wsgi_app(registry), environ)
        response, ours = agent.get(f"/metrics?{query}", Accept=accept, Accept_Encoding=encoding)
        assert f"{response.status} {response.reason}" == status
        for name in ("Content-Type", "Content-Encoding"):
            assert response.headers.get(name) == headers.get(name)
        assert response.headers["Content-Length"] == str(len(ours))
        if "Content-Encoding" in response.headers:
            body, ours = gzip.decompress(body), gzip.decompress(ours)
        assert lines(ours) == lines(body)


def call(application: WSGIApplication, environ: WSGIEnvironment) -> tuple[str, dict[str, str], bytes]:
    """Status, headers and body that an application gives."""
    started: list[tuple[str, dict[str, str]]] = []

    def start(status: str, headers: list[tuple[str, str]], *_: object) -> Callable[[bytes], object]:
        started.append((status, dict(headers)))
        return bytes

    body = b"".join(application(environ, start))
    ((status, headers),) = started
    return status, headers, body


def lines(body: bytes) -> list[tuple[str, ...]]:
    """Lines with labels in one order and numbers in one form; sum and count may change places."""
    found: list[tuple[str, ...]] = []
    for line in body.decode().rstrip("\n").split("\n"):
        if line.startswith("#"):
            found.append((line,))
        else:
            name, _, value = line.rpartition(" ")
            name, _, labels = name.rstrip("}").partition("{")
            found.append((name, *sorted(filter(None, labels.split(","))), str(float(value))))
    return sorted(found)


@pytest.mark.parametrize(
    "accept", ["application/openmetrics-text;version=a.b", "text/plain;version=,;=", ";;,,=;version"]
)
def test_accept_headers_that_make_no_sense(accept: str, agent: Agent) -> None:
    response, body = agent.get("/metrics", Accept=accept)
    assert response.status == 200
    assert b'schedtrace_threads{namespace="n",pod="p2",container="c",process="x"} 2\n' in body


def test_a_folded_header_does_not_come_back_as_one(agent: Agent) -> None:
    connection = agent.raw(
        b"GET /metrics HTTP/1.1\r\nAccept: application/openmetrics-text; version=2.x\r\n Set-Cookie: forged=1\r\n\r\n"
    )
    head = connection.makefile("rb").read().partition(b"\r\n\r\n")[0]
    assert b"\nSet-Cookie" not in head
    assert b"\n Set-Cookie" not in head
    connection.close()


def test_pages(agent: Agent) -> None:
    assert agent.get("/healthz")[1] == agent.get("/readyz?verbose")[1] == b"ok\n"
    agent.problem = "probes are not in place yet: 3 of 7"
    response, body = agent.get("/readyz")
    assert (response.status, body) == (503, b"probes are not in place yet: 3 of 7\n")
    assert agent.get("/healthz")[0].status == 200
    response, body = agent.get("/")
    assert response.headers["Content-Type"] == "text/plain; charset=utf-8"
    assert b"/metrics" in body
    assert response.headers["Server"] == "schedtrace"
    assert response.headers["Connection"] == "close"
    for path in ("/metrics/", "/Metrics", "/../etc/passwd", "http://x/metrics", "*"):
        assert agent.get(path)[0].status == 404


def test_head_is_get_without_the_body(agent: Agent) -> None:
    for path in ("/metrics", "/healthz", "/none"):
        full, body = agent.get(path)
        head, nothing = agent.get(path, "HEAD")
        assert (head.status, nothing) == (full.status, b"")
        for name in ("Content-Type", "Content-Length"):
            assert head.headers[name] == full.headers[name]
        assert full.headers["Content-Length"] == str(len(body))


@pytest.mark.parametrize("method", ["POST", "PUT", "DELETE", "OPTIONS", "FOO", "get"])
def test_other_methods_are_refused(method: str, agent: Agent) -> None:
    response, body = agent.get("/metrics", method)
    assert (response.status, response.headers["Allow"], body) == (
        405,
        "GET, HEAD",
        b"only GET and HEAD are allowed\n",
    )


def test_scrapes_never_overlap(agent: Agent) -> None:
    inside, most = 0, 0

    def look() -> NodeView:
        nonlocal inside, most
        inside += 1
        most = max(most, inside)
        time.sleep(0.03)
        inside -= 1
        return VIEW

    agent.look = look
    statuses: list[int] = []
    paths = ["/metrics", "/metrics?name[]=schedtrace_threads"] * 3
    threads = [threading.Thread(target=lambda p=p: statuses.append(agent.get(p)[0].status)) for p in paths]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert statuses == [200] * 6
    assert most == 1


def test_a_scrape_that_hangs_keeps_only_scrapes_waiting(agent: Agent, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(web, "TURN_SECONDS", 0.05)
    looking, go_on = threading.Event(), threading.Event()

    def look() -> NodeView:
        looking.set()
        go_on.wait(20)
        return VIEW

    agent.look = look
    first = threading.Thread(target=agent.get, args=("/metrics",))
    first.start()
    assert looking.wait(20)
    response, body = agent.get("/metrics")
    assert (response.status, body) == (503, b"another scrape takes too long\n")
    assert agent.get("/healthz")[0].status == 200
    go_on.set()
    first.join()
    assert agent.get("/metrics")[0].status == 200


def test_a_scrape_that_fails_is_logged_and_the_next_one_works(agent: Agent) -> None:
    def fails() -> NodeView:
        raise OSError(9, "Bad file descriptor")

    agent.look = fails
    response, body = agent.get("/metrics")
    assert (response.status, body) == (500, b"that failed: the agent's log says why\n")
    (event,) = agent.events
    assert (event["level"], event["event"]) == ("error", "scrape_failed")
    assert event["message"] == "/metrics failed: OSError: [Errno 9] Bad file descriptor"
    agent.look = lambda: VIEW
    assert agent.get("/metrics")[0].status == 200


def test_clients_that_say_nothing_do_not_keep_others_waiting(agent: Agent) -> None:
    silent = [agent.raw(b"GET /met") for _ in range(web.MOST_CONNECTIONS - 1)]
    assert agent.get("/healthz")[0].status == 200
    for connection in silent:
        connection.close()


def test_when_there_are_too_many_the_oldest_makes_room(agent: Agent, monkeypatch: pytest.MonkeyPatch) -> None:
    silent = [agent.raw() for _ in range(web.MOST_CONNECTIONS)]
    assert eventually(lambda: len(agent.server._server._connections) == web.MOST_CONNECTIONS)
    refused = agent.raw(b"GET /healthz HTTP/1.1\r\n\r\n")
    assert ended(refused)
    monkeypatch.setattr(web, "GRACE_SECONDS", 0.0)
    for _ in range(3):
        assert agent.get("/healthz")[0].status == 200
    assert ended(silent[0])
    for connection in (*silent, refused):
        connection.close()


def test_nobody_stays_longer_than_the_deadline(agent: Agent, monkeypatch: pytest.MonkeyPatch) -> None:
    """One says nothing, one a byte at a time, one asks and does not read."""
    monkeypatch.setattr(web, "DEADLINE_SECONDS", 0.3)
    many = tuple(Series(Labels("n", f"p{i}", "c", "x"), SeriesTotals(), (), 1, 1, None, None) for i in range(3000))
    agent.look = lambda: NodeView(many, {}, {})
    silent, slow = agent.raw(), agent.raw()
    deaf = socket.socket()
    deaf.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    deaf.connect(agent.address)
    deaf.sendall(b"GET /metrics HTTP/1.1\r\n\r\n")

    def one_more_byte() -> bool:
        try:
            slow.sendall(b"G")
        except OSError:
            return True
        return False

    assert eventually(one_more_byte)
    assert ended(silent)
    assert eventually(lambda: not agent.server._server._connections)
    for connection in (silent, slow, deaf):
        connection.close()


def test_clients_that_hang_up(agent: Agent) -> None:
    agent.look = lambda: NodeView(VIEW.series * 1, {f"reason {i}": i for i in range(20_000)}, {})
    for request in (b"", b"GET", b"GET /metrics HTTP/1.1\r\n", b"GET /metrics HTTP/1.1\r\n\r\n"):
        for reset in (False, True):
            connection = agent.raw(request)
            if reset:
                connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            connection.close()
    assert eventually(lambda: not agent.server._server._connections)
    assert agent.get("/healthz")[0].status == 200
    assert agent.events == []


def test_noise(agent: Agent) -> None:
    generator = random.Random(7)
    words = [
        b"GET",
        b" ",
        b"/metrics",
        b"HTTP/1.1",
        b"\r\n",
        b"\n",
        b":",
        b"Accept",
        b"\0",
        b"\xff",
        b"HTTP/9.9",
        b"A" * 70000,
    ]
    for _ in range(80):
        noise = b"".join(generator.choices(words, k=generator.randrange(1, 12)))
        connection = agent.raw()
        try:
            connection.sendall(noise)
            connection.shutdown(socket.SHUT_WR)
            while connection.recv(65536):
                pass
        except OSError:
            pass
        connection.close()
    assert agent.get("/metrics")[0].status == 200
    assert agent.events == []


def test_descriptors_and_threads_are_given_back(agent: Agent) -> None:
    agent.get("/metrics")
    assert eventually(lambda: not [t for t in threading.enumerate() if t.name.startswith("http-")])
    before = len(list(Path("/proc/self/fd").iterdir()))
    for _ in range(5):
        agent.get("/metrics")
    assert eventually(lambda: len(list(Path("/proc/self/fd").iterdir())) == before)
