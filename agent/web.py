"""Serves /metrics, /processes, /healthz and /readyz over HTTP or HTTPS.

prometheus_client's own server answers every path with metrics, starts a thread for whoever connects, and with TLS
accepts nobody while it waits for one client's handshake. An agent that runs on every node for months needs bounds: few
connections at once, each for a limited time and for one request, and one scrape at a time. What the library negotiates
(formats, compression, name[]) is negotiated with its functions.
"""

from __future__ import annotations

import errno
import json
import os
import re
import socket
import socketserver
import threading
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass, replace
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler
from itertools import count
from urllib.parse import parse_qs

from isal import isal_zlib
from prometheus_client import CollectorRegistry
from prometheus_client.exposition import choose_encoder, gzip_accepted

from schedtrace.errors import PermissionDenied, SchedtraceError
from schedtrace.exporter import Exporter
from schedtrace.logs import EventLog
from schedtrace.malloc import give_back_memory
from schedtrace.tls import ServerTls, TlsFiles

MOST_CONNECTIONS = 8
"""Prometheus uses one, for a moment; two servers, the kubelet's probes and a person make five."""
DEADLINE_SECONDS = 30.0
"""After that a connection is cut, whatever it is doing."""
GRACE_SECONDS = 5.0
"""When there are too many connections, the oldest makes room if it is older than this."""
TURN_SECONDS = 10.0
"""How long a scrape waits for the one before it."""

_ADDRESS = re.compile(r"(?:\[(?P<ipv6>[^][]+)\]|(?P<host>[^][:]*)):(?P<port>[0-9]{1,5})")
_POLL_SECONDS = 0.25
_GZIP_LEVEL, _GZIP_FORMAT = 1, 31  # level 2 makes it no smaller; 31: with gzip's header, as in zlib
_INDEX = """schedtrace

/metrics    for Prometheus
/processes  what is done with each process, as JSON
/healthz    whether the agent works
/readyz     whether it watches"""


@dataclass(frozen=True)
class Address:
    """Where to listen. An empty host stands for all addresses of the machine."""

    host: str
    port: int

    def __str__(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


def parse_address(text: str) -> Address:
    """HOST:PORT, [IPv6]:PORT, or :PORT for all addresses. Raises ValueError with a message for the user."""
    match = _ADDRESS.fullmatch(text)
    if match is None or int(match["port"]) > 65535:
        raise ValueError(
            f"{text!r} is no address to listen on: give HOST:PORT, [IPv6]:PORT, or :PORT for all addresses"
        )
    return Address(match["ipv6"] or match["host"], int(match["port"]))


class MetricsServer:
    """Binds at once, answers from :meth:`start` to :meth:`close`.

    ``ready`` and ``healthy`` give the reason why the agent isn't, or an empty string. Raises SchedtraceError if the
    address can't be had or the TLS files can't be used.
    """

    def __init__(
        self,
        address: Address,
        exporter: Exporter,
        events: EventLog,
        *,
        ready: Callable[[], str] = str,
        healthy: Callable[[], str] = str,
        processes: Callable[[], object] = list,
        tls: TlsFiles | None = None,
    ) -> None:
        """``processes``: what /processes answers with, to be made JSON of."""
        server_tls = ServerTls(tls, events) if tls else None
        self._server = _Server(address, exporter, events, ready, healthy, processes, server_tls)
        self._thread: threading.Thread | None = None

    @property
    def address(self) -> Address:
        """The address in use, with the port that was given if 0 was asked for."""
        host, port = self._server.socket.getsockname()[:2]
        return Address(host, port)

    def start(self) -> None:
        """Answer from now on, in threads that don't keep the process alive."""
        self._thread = threading.Thread(
            target=self._server.serve_forever, args=(_POLL_SECONDS,), name="http", daemon=True
        )
        self._thread.start()

    def close(self) -> None:
        """Stop listening and cut all connections."""
        if self._thread is not None:
            self._server.shutdown()
            self._thread.join()
        self._server.server_close()
        self._server.cut(older_than_seconds=-1)


@dataclass
class _Connection:
    socket: socket.socket
    since: float


class _Server(socketserver.TCPServer):
    allow_reuse_address = True
    request_queue_size = 64

    def __init__(
        self,
        address: Address,
        exporter: Exporter,
        events: EventLog,
        ready: Callable[[], str],
        healthy: Callable[[], str],
        processes: Callable[[], object],
        tls: ServerTls | None,
    ) -> None:
        self.exporter = exporter
        self.events = events
        self.ready = ready
        self.healthy = healthy
        self.processes = processes
        self.registry = CollectorRegistry()
        self.registry.register(exporter)
        self.scraping = threading.Lock()
        self._tls = tls
        self._lock = threading.Lock()
        self._numbers = count()
        self._connections: dict[int, _Connection] = {}
        super().__init__(("", 0), _Handler, bind_and_activate=False)
        self.socket.close()
        self.socket = _listen(address, self.request_queue_size)

    def get_request(self) -> tuple[socket.socket, object]:
        try:
            return super().get_request()
        except OSError as error:
            if error.errno in (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM):
                time.sleep(_POLL_SECONDS)  # the connection stays in the queue, and would be tried again at once
            raise

    def process_request(self, request: socket.socket | tuple[bytes, socket.socket], client_address: object) -> None:
        assert isinstance(request, socket.socket)
        number = self._admit(request)
        if number is None:
            self.shutdown_request(request)
            return
        thread = threading.Thread(target=self._serve, args=(number, client_address), name=f"http-{number}", daemon=True)
        try:
            thread.start()
        except RuntimeError:  # no more threads to be had
            self._forget(number)
            self.shutdown_request(request)

    def service_actions(self) -> None:
        self.cut(older_than_seconds=DEADLINE_SECONDS)

    def handle_error(self, request: object, client_address: object) -> None:
        """Nothing is printed: what fails in a connection is handled where it is served."""

    def cut(self, older_than_seconds: float) -> None:
        """End connections that are older than that."""
        now = time.monotonic()
        with self._lock:
            old = [each.socket for each in self._connections.values() if now - each.since > older_than_seconds]
        for connection in old:
            _cut(connection)

    def _admit(self, request: socket.socket) -> int | None:
        """The number of the new connection; None if there is no room for it."""
        now = time.monotonic()
        with self._lock:
            if len(self._connections) >= MOST_CONNECTIONS:
                oldest = min(self._connections)
                if now - self._connections[oldest].since < GRACE_SECONDS:
                    return None
                _cut(self._connections.pop(oldest).socket)
            number = next(self._numbers)
            self._connections[number] = _Connection(request, now)
        return number

    def _forget(self, number: int) -> None:
        with self._lock:
            self._connections.pop(number, None)

    def _serve(self, number: int, client_address: tuple[str, int]) -> None:
        with self._lock:
            connection = self._connections.get(number)
        if connection is None:
            return  # had to make room already
        try:
            connection.socket.settimeout(DEADLINE_SECONDS)
            if self._tls is not None:
                connection.socket = self._tls.wrap(connection.socket)
                self._tls.shake_hands(connection.socket, client_address[0])
            _Handler(connection.socket, client_address, self)
        except (OSError, ValueError):  # the client hung up, or was cut
            pass
        finally:
            self._forget(number)
            self.shutdown_request(connection.socket)
            give_back_memory()  # an answer can have megabytes


@dataclass(frozen=True)
class _Response:
    status: int
    content_type: str
    body: bytes
    headers: tuple[tuple[str, str], ...] = ()


class _Handler(BaseHTTPRequestHandler):
    """Answers one request and closes the connection."""

    server: _Server
    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        try:
            response = self._response()
        except Exception as error:  # noqa: BLE001 (whatever it is, the agent goes on and the scraper is told)
            self.server.events.error("scrape_failed", f"{self.path} failed: {type(error).__name__}: {error}")
            response = _plain(500, "that failed: the agent's log says why")
        self._send(response)

    def do_HEAD(self) -> None:
        self.do_GET()

    def _response(self) -> _Response:
        path, _, query = self.path.partition("?")
        if path == "/metrics":
            return self._metrics(query)
        if path == "/processes":
            return _Response(200, "application/json", json.dumps(self.server.processes()).encode())
        if path in ("/healthz", "/readyz"):
            problem = self.server.healthy() if path == "/healthz" else self.server.ready()
            return _plain(503 if problem else 200, problem or "ok")
        if path == "/":
            return _plain(200, _INDEX)
        return _plain(404, "there is /metrics, /processes, /healthz and /readyz")

    def _metrics(self, query: str) -> _Response:
        if not self.server.scraping.acquire(timeout=TURN_SECONDS):
            return _plain(503, "another scrape takes too long")
        try:
            content_type, pieces = self._scrape(query)
            if not gzip_accepted(self.headers.get("Accept-Encoding", "")):
                return _Response(200, content_type, b"".join(pieces))
            return _Response(200, content_type, _gzipped(pieces), (("Content-Encoding", "gzip"),))
        finally:
            self.server.scraping.release()

    def _scrape(self, query: str) -> tuple[str, Iterable[bytes]]:
        """Content type and pieces of the body in the format that the client asks for."""
        accept = " ".join(
            self.headers.get("Accept", "").split()
        )  # some of it is given back in a header: no folded lines
        try:
            encoder, content_type = choose_encoder(accept)
        except (TypeError, ValueError):  # a version that isn't one
            encoder, content_type = choose_encoder("")
        names = parse_qs(query, errors="replace").get("name[]")
        openmetrics = content_type.startswith("application/openmetrics-text; version=1.0.0")
        if names or not (openmetrics or content_type.startswith("text/plain")) or "escaping=dots" in content_type:
            registry = self.server.registry
            return content_type, [encoder(registry.restricted_registry(names) if names else registry)]
        return content_type, self.server.exporter.text(openmetrics=openmetrics)

    def _send(self, response: _Response) -> None:
        self.send_response(response.status)
        length = ("Content-Length", str(len(response.body)))
        for header in (("Content-Type", response.content_type), length, *response.headers, ("Connection", "close")):
            self.send_header(*header)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(response.body)

    def send_error(self, code: int, message: str | None = None, explain: str | None = None) -> None:
        """What the library says of a request that it can't read or that has no ``do_`` method, in one plain line."""
        if code == HTTPStatus.NOT_IMPLEMENTED:
            refusal = _plain(405, "only GET and HEAD are allowed")
            self._send(replace(refusal, headers=(("Allow", "GET, HEAD"),)))
        else:
            self._send(_plain(code, message or explain or HTTPStatus(code).phrase))

    def version_string(self) -> str:
        return "schedtrace"

    def log_message(self, format: str, *args: object) -> None:  # noqa: A002 (the library's name)
        """Requests are not logged."""


def _gzipped(pieces: Iterable[bytes]) -> bytes:
    """With ISA-L: an eighth of what zlib takes at the level that gives as many bytes, and that was half of a scrape."""
    compressor = isal_zlib.compressobj(_GZIP_LEVEL, wbits=_GZIP_FORMAT)
    return b"".join([*map(compressor.compress, pieces), compressor.flush()])


def _plain(status: int, text: str) -> _Response:
    return _Response(status, "text/plain; charset=utf-8", f"{text}\n".encode("utf-8", "backslashreplace"))


def _listen(address: Address, queue: int) -> socket.socket:
    try:
        if not address.host and socket.has_dualstack_ipv6():
            return socket.create_server(("", address.port), family=socket.AF_INET6, backlog=queue, dualstack_ipv6=True)
        family, _, _, _, where = socket.getaddrinfo(
            address.host or "0.0.0.0",
            address.port,
            type=socket.SOCK_STREAM,
            flags=socket.AI_PASSIVE,
        )[0]
        return socket.create_server(where, family=family, backlog=queue)
    except PermissionError:
        raise PermissionDenied(
            f"can't listen on {address}: ports below 1024 need CAP_NET_BIND_SERVICE; give another with --listen"
        ) from None
    except UnicodeError:
        reason = "that is no host name"
    except socket.gaierror as error:
        reason = error.strerror or "there is no such host"
    except OSError as error:
        reason = os.strerror(error.errno or errno.EINVAL)  # Python's own text says where as well
    raise SchedtraceError(f"can't listen on {address}: {reason}; give another address with --listen")


def _cut(connection: socket.socket) -> None:
    """End a connection that another thread is using. With TLS only below the encryption, which is that thread's."""
    with suppress(OSError):  # it may have ended by itself
        socket.socket.shutdown(connection, socket.SHUT_RDWR)
