"""TLS, client certificates and their renewal, with certificates that openssl makes."""

from __future__ import annotations

import http.client
import io
import ssl
import subprocess
from pathlib import Path

import pytest

from schedtrace.errors import SchedtraceError
from schedtrace.exporter import Exporter
from schedtrace.logs import EventLog
from schedtrace.tls import TlsFiles
from schedtrace.web import Address, MetricsServer
from tests.unit.served import VIEW, Agent, eventually


def openssl(folder: Path, *arguments: str) -> None:
    subprocess.run(["openssl", *arguments], cwd=folder, check=True, capture_output=True, timeout=60)


@pytest.fixture(scope="module")
def certificates(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two authorities, and a server's and a client's certificate of each."""
    folder = tmp_path_factory.mktemp("certificates")
    new_key = ("-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes")
    for ca in ("a", "b"):
        openssl(folder, "req", "-x509", *new_key, "-keyout", f"{ca}.key", "-out", f"{ca}.pem", "-subj", f"/CN={ca}")
        for who in ("server", "client"):
            name = f"{ca}-{who}"
            openssl(
                folder,
                *("req", "-x509", *new_key, "-keyout", f"{name}.key", "-out", f"{name}.pem", "-subj", f"/CN={name}"),
                *("-CA", f"{ca}.pem", "-CAkey", f"{ca}.key", "-addext", "subjectAltName=IP:127.0.0.1"),
            )
    return folder


class TlsAgent(Agent):
    def __init__(self, certificates: Path, folder: Path, client_ca: str = "") -> None:
        self.certificates = certificates
        self.folder = folder
        self.install("a")
        super().__init__(
            TlsFiles(str(folder / "tls.crt"), str(folder / "tls.key"), client_ca and str(certificates / client_ca))
        )

    def install(self, ca: str) -> None:
        for name, end in (("tls.crt", "pem"), ("tls.key", "key")):
            (self.folder / name).write_bytes((self.certificates / f"{ca}-server.{end}").read_bytes())

    def secure(self, ca: str = "a", client: str = "", path: str = "/healthz") -> tuple[int, bytes]:
        context = ssl.create_default_context(cafile=str(self.certificates / f"{ca}.pem"))
        if client:
            context.load_cert_chain(self.certificates / f"{client}.pem", self.certificates / f"{client}.key")
        connection = http.client.HTTPSConnection(*self.address, timeout=20, context=context)
        try:
            connection.request("GET", path)
            response = connection.getresponse()
            return response.status, response.read()
        finally:
            connection.close()


def test_tls(certificates: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    agent = TlsAgent(certificates, tmp_path)
    silent = [agent.raw() for _ in range(3)]  # never begin their handshake
    status, body = agent.secure(path="/metrics")
    assert status == 200
    assert b"schedtrace_threads" in body
    with pytest.raises(ssl.SSLCertVerificationError):
        agent.secure("b")
    plain = agent.raw(b"GET /healthz HTTP/1.1\r\n\r\n")
    assert b"HTTP/1.1" not in plain.recv(100)
    assert eventually(lambda: len(agent.events) == 2)
    assert {event["event"] for event in agent.events} == {"tls_refused"}
    assert {event["client"] for event in agent.events} == {"127.0.0.1"}
    assert sorted(str(event["message"]) for event in agent.events) == [
        "no TLS with a client: HTTP_REQUEST",
        "no TLS with a client: TLSV1_ALERT_UNKNOWN_CA",
    ]
    agent.server.close()
    for connection in (*silent, plain):
        connection.close()
    assert capfd.readouterr() == ("", "")


def test_client_certificates(certificates: Path, tmp_path: Path) -> None:
    agent = TlsAgent(certificates, tmp_path, client_ca="b.pem")
    assert agent.secure(client="b-client") == (200, b"ok\n")
    for client in ("", "a-client"):
        with pytest.raises((ssl.SSLError, OSError, http.client.RemoteDisconnected)):
            agent.secure(client=client)
    assert {event["event"] for event in agent.events} == {"tls_refused"}
    agent.server.close()


def test_renewed_certificates_are_taken_up_and_bad_ones_are_not(certificates: Path, tmp_path: Path) -> None:
    agent = TlsAgent(certificates, tmp_path)
    assert agent.secure("a") == (200, b"ok\n")
    (tmp_path / "tls.crt").write_bytes((certificates / "b-server.pem").read_bytes())
    assert agent.secure("a") == (200, b"ok\n")  # the key isn't there yet
    assert [event["event"] for event in agent.events] == ["tls_not_renewed"]
    assert "KEY_VALUES_MISMATCH" in str(agent.events[0]["message"])
    agent.install("b")
    assert agent.secure("b") == (200, b"ok\n")
    (tmp_path / "tls.key").unlink()
    assert agent.secure("b") == (200, b"ok\n")
    assert [event["event"] for event in agent.events] == ["tls_not_renewed", "tls_renewed", "tls_not_renewed"]
    agent.server.close()


@pytest.mark.parametrize(
    ("files", "message"),
    [
        (("none.pem", "a-server.key"), "none.pem can't be read: No such file or directory"),
        (("a-server.pem", "b-server.key"), "certificate a-server.pem with key b-server.key can't be used (KEY_VALUES_"),
        (("a-server.pem", "locked.key"), "certificate a-server.pem with key locked.key can't be used ("),
        (
            ("a-server.pem", "a-server.key", "a-server.key"),
            "client authority a-server.key can't be used (NO_CERTIFICATE_",
        ),
    ],
)
def test_tls_files_that_cannot_be_used(
    files: tuple[str, ...], message: str, certificates: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(certificates)
    openssl(certificates, "ec", "-in", "a-server.key", "-aes256", "-passout", "pass:secret", "-out", "locked.key")
    with pytest.raises(SchedtraceError) as caught:
        MetricsServer(Address("127.0.0.1", 0), Exporter(lambda: VIEW), EventLog(io.StringIO()), tls=TlsFiles(*files))
    assert str(caught.value).startswith(f"TLS: {message}")
