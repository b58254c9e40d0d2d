"""TLS for the agent's HTTP server, from files that may be renewed while it runs.

Certificates that a cluster issues live for days or hours and are replaced under the same names: the files are looked at
for each connection, and read again when they have changed.
"""

from __future__ import annotations

import os
import socket
import ssl
import threading
from dataclasses import dataclass
from stat import S_ISREG

from schedtrace.errors import SchedtraceError
from schedtrace.logs import EventLog


@dataclass(frozen=True)
class TlsFiles:
    """PEM files. With ``client_ca`` only clients with a certificate of that authority are served."""

    certificate: str
    key: str
    client_ca: str = ""


_Stamp = tuple[tuple[int, int], ...]


class ServerTls:
    """The server's side of TLS 1.2 and later; for use by several threads at once. Raises SchedtraceError if the files
    can't be used at first; later the ones before stay in use, and that is logged."""

    def __init__(self, files: TlsFiles, events: EventLog) -> None:
        self._files = files
        self._events = events
        self._lock = threading.Lock()
        self._stamp: _Stamp = self._look()
        self._context = self._load()

    def wrap(self, connection: socket.socket) -> ssl.SSLSocket:
        """The connection with TLS, before the handshake. The one given is of no use afterwards."""
        return self._current().wrap_socket(connection, server_side=True, do_handshake_on_connect=False)

    def shake_hands(self, connection: ssl.SSLSocket, client: str) -> None:
        """Raises OSError, which is logged, if the client doesn't do its part."""
        try:
            connection.do_handshake()
        except ssl.SSLError as error:
            self._events.warning("tls_refused", f"no TLS with a client: {error.reason or error}", client=client)
            raise

    def _current(self) -> ssl.SSLContext:
        with self._lock:
            try:
                stamp = self._look()
                if stamp != self._stamp:
                    self._stamp = stamp
                    self._context = self._load()
                    self._events.info("tls_renewed", "the TLS files have changed and are in use")
            except SchedtraceError as error:
                self._events.error("tls_not_renewed", f"{error}; the ones before stay in use")
            return self._context

    def _look(self) -> _Stamp:
        names = filter(None, (self._files.certificate, self._files.key, self._files.client_ca))
        try:
            stats = [os.stat(name) for name in names]  # noqa: PTH116
        except OSError as error:
            raise SchedtraceError(f"TLS: {error.filename} can't be read: {error.strerror}") from None
        if not all(S_ISREG(one.st_mode) for one in stats):
            raise SchedtraceError("TLS: certificate, key and client authority must be files")
        return tuple((one.st_ino, one.st_mtime_ns) for one in stats)

    def _load(self) -> ssl.SSLContext:
        files = self._files
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        try:
            context.load_cert_chain(files.certificate, files.key, password="")  # else OpenSSL asks the terminal for one
        except (OSError, ValueError) as error:
            raise SchedtraceError(
                f"TLS: certificate {files.certificate} with key {files.key} can't be used ({_reason(error)}): give a"
                " PEM certificate and its unencrypted key"
            ) from None
        if files.client_ca:
            context.verify_mode = ssl.CERT_REQUIRED
            try:
                context.load_verify_locations(files.client_ca)
            except (OSError, ValueError) as error:
                raise SchedtraceError(
                    f"TLS: client authority {files.client_ca} can't be used ({_reason(error)}): give a PEM file"
                ) from None
        return context


def _reason(error: Exception) -> str:
    return str(getattr(error, "reason", None) or getattr(error, "strerror", None) or error)
