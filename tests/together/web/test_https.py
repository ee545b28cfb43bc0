"""`serve --web.config.file`: TLS and passwords at the TCP addresses, for scrapers, browsers, commands and reporters."""

from __future__ import annotations

import base64
import contextlib
import http.client
import json
import re
import signal
import socket
import ssl
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.request import urlopen

import bcrypt
import pytest
import trustme

from gpumem_client.wire.errors import ExporterUntrustedError
from gpumem_client.wire.http import Answer, Connection
from gpumem_exporter.features.fleet.prometheus import Prometheus
from tests.conftest import StartExporter
from tests.emulation.fixtures import StartTorch
from tests.emulation.node import EmulatedNode
from tests.support.builders.certificates import authority, client_context, folder, handshake, issue, trust
from tests.support.processes.running_command import run_command
from tests.support.servers.exporter_process import QUICK, ExporterProcess
from tests.support.servers.running_exporter import running_exporter
from tests.support.servers.running_prometheus import RunningPrometheus
from tests.support.waiting import eventually, patient, wait_for

__all__ = ["authority", "folder"]

TLS = {"cert_file": "tls.crt", "key_file": "tls.key"}
USERS = {"ada": bcrypt.hashpw(b"s:ecr@t", bcrypt.gensalt(4)).decode()}
PASSWORD = "ada:s:ecr@t"
IN_URL = "ada:s%3Aecr%40t@"
REPORT = "/api/v1/reports"


@pytest.fixture
def trusted(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of the certificate, whose authority this process trusts."""
    monkeypatch.setenv("SSL_CERT_FILE", str(folder / "authority.crt"))
    return folder


@dataclass(frozen=True)
class Https:
    """An exporter behind https."""

    process: ExporterProcess
    port: int
    config: Path

    def url(self, user: str = "") -> str:
        return f"https://{user}127.0.0.1:{self.port}"

    def request(self, path: str, method: str = "GET", user: str = "", body: bytes | None = None, **more: str) -> Answer:
        sent = {"Content-Type": "application/json", **more} if body is not None else more
        with closing(Connection(self.url(user), timeout_seconds=patient(30))) as connection:
            return connection.request(method, path, body, sent)

    def reload(self) -> str:
        """Send SIGHUP and return the log line of the reload."""
        before = self.process.log().count("web configuration")
        self.process.signal(signal.SIGHUP)
        wait_for(lambda: self.process.log().count("web configuration") > before, "the reload")
        return [line for line in self.process.log().splitlines() if "web configuration" in line][-1]


StartHttps = Callable[..., Https]


@pytest.fixture
def start_https(trusted: Path, start_exporter: StartExporter) -> StartHttps:
    def start(
        *flags: str,
        tls: Mapping[str, str] | None = TLS,
        users: Mapping[str, str] | None = None,
        on: EmulatedNode | None = None,
    ) -> Https:
        parts = {"tls_server_config": tls, "basic_auth_users": users}
        config = trusted / "web.yml"
        config.write_text(json.dumps({key: value for key, value in parts.items() if value}))
        process = start_exporter(on, *QUICK, "--web.config.file", str(config), *flags)
        return Https(process, int(process.tcp_url.rpartition(":")[2]), config)

    return start


def basic(credentials: str) -> dict[str, Any]:
    return {"Authorization": "Basic " + base64.b64encode(credentials.encode()).decode()}


def test_tcp_requires_tls_and_the_unix_socket_does_not(start_https: StartHttps, folder: Path) -> None:
    exporter = start_https("--demo")
    assert f"addresses={exporter.url()},unix://" in exporter.process.log()
    context = client_context(folder)
    for name in ("127.0.0.1", "localhost"):
        with urlopen(f"https://{name}:{exporter.port}/metrics", timeout=patient(30), context=context) as answer:
            assert b"gpumem_exporter_build_info" in answer.read()
    with closing(http.client.HTTPConnection("127.0.0.1", exporter.port, timeout=patient(30))) as plain:
        plain.request("GET", "/metrics")
        with pytest.raises((http.client.BadStatusLine, ConnectionError)):
            plain.getresponse()
    wait_for(lambda: len(exporter.process.processes()) >= 12, "the demo's processes, which come by the socket")
    with closing(Connection(exporter.url(), timeout_seconds=patient(30))) as connection:
        assert connection.request("GET", "/health").status == 200
        assert exporter.process.stop() == 0  # with a connection that is open


def test_prometheus_scrapes_it_with_a_password(start_https: StartHttps, folder: Path, tmp_path: Path) -> None:
    exporter = start_https("--demo", users=USERS)
    name, _, password = PASSWORD.partition(":")
    scrape = {
        "scheme": "https",
        "tls_config": {"ca_file": str(folder / "authority.crt")},
        "basic_auth": {"username": name, "password": password},
    }
    with RunningPrometheus(tmp_path / "tsdb", {"node": f"127.0.0.1:{exporter.port}"}, scrape=scrape) as prometheus:
        client = Prometheus(prometheus.url)
        wait_for(lambda: client.query('up{instance="node"} == 1')[0], "a scrape", 60.0)


def test_every_route_over_tcp_requires_the_password_and_the_unix_socket_does_not(start_https: StartHttps) -> None:
    exporter = start_https(users=USERS)
    details: set[str] = set()
    for path in ("/", "/metrics", "/health", "/-/healthy", "/-/ready", "/api/v1/devices", "/openapi.json", "/nothing"):
        refused = exporter.request(path)
        assert refused.status == 401, path
        assert refused.headers["www-authenticate"] == 'Basic realm="gpumem-exporter", charset="UTF-8"'
        details.add(json.loads(refused.body)["detail"])
        assert exporter.request(path, user=IN_URL).status == (404 if path == "/nothing" else 200)
        assert exporter.process.request("GET", path).status == (404 if path == "/nothing" else 200)
    for wrong in (basic("ada:other"), basic("eve:s:ecr@t"), {"Authorization": "Basic !"}, {"Authorization": "Basic"}):
        refused = exporter.request("/metrics", **wrong)
        assert refused.status == 401
        details.add(json.loads(refused.body)["detail"])
    assert len(details) == 2, "credentials that are missing, and credentials that are wrong"
    assert exporter.request(REPORT, "POST", body=b"{}").status == 401
    reports = 'gpumem_reports_total{outcome="unauthorized"} 1.0'
    assert reports in exporter.request("/metrics", user=IN_URL).body.decode()


def test_sighup_loads_users_and_certificate_and_refuses_other_changes(
    start_https: StartHttps, folder: Path, authority: trustme.CA
) -> None:
    exporter = start_https(users=USERS)
    before = handshake(exporter.port, client_context(folder))
    issue(authority, folder)
    assert "level=info" in exporter.reload()
    renewed = handshake(exporter.port, client_context(folder))
    assert renewed != before
    (folder / "tls.key").write_text("half a ke")
    line = exporter.reload()
    assert "level=error" in line
    assert f"{folder}/tls.key" in line
    assert handshake(exporter.port, client_context(folder)) == renewed

    def is_degraded() -> bool:
        return b"the new certificate is invalid" in exporter.request("/health", user=IN_URL).body

    wait_for(is_degraded, "the check")
    issue(authority, folder)
    wait_for(lambda: not is_degraded(), "the new certificate")
    assert exporter.request("/metrics", user=IN_URL).status == 200
    other = {"bob": bcrypt.hashpw(b"x", bcrypt.gensalt(4)).decode()}
    headers = {"http_server_config": {"headers": {"X-Frame-Options": "sameorigin"}}, "tls_server_config": TLS}
    for changed in ({"basic_auth_users": other}, headers):
        exporter.config.write_text(json.dumps(changed))
        assert re.search(r"\bTLS\b.*\bheaders\b.*\brestart", exporter.reload())
        assert exporter.request("/metrics", user=IN_URL).status == 200
    newer = {**TLS, "min_version": "TLS13"}
    exporter.config.write_text(json.dumps({"tls_server_config": newer, "basic_auth_users": other}))
    assert "users=1" in exporter.reload()
    old = client_context(folder)
    old.maximum_version = ssl.TLSVersion.TLSv1_2
    with pytest.raises(OSError, match=r"(?i)version|reset|EOF"):
        handshake(exporter.port, old)
    assert [exporter.request("/metrics", user=user).status for user in (IN_URL, "bob:x@")] == [401, 200]
    exporter.config.write_text(json.dumps({"tls_server_config": TLS}))
    exporter.reload()
    assert exporter.request("/metrics").status == 200


def test_commands_over_https_show_no_password(start_https: StartHttps) -> None:
    exporter = start_https("--demo", users=USERS)
    wait_for(lambda: len(exporter.process.processes()) >= 12, "the demo's processes")
    url = exporter.url(IN_URL)
    doctor = run_command("doctor", "--url", url)
    assert exporter.url() in doctor.stdout
    assert "secr" not in doctor.stdout + doctor.stderr
    assert "s%3A" not in doctor.stdout + doctor.stderr
    cleared = run_command("clear", "--all", "--dry-run", "--json", "--url", url)
    assert (cleared.returncode, cleared.stderr) == (0, "")
    assert len(json.loads(cleared.stdout)["results"]) >= 12
    refused = run_command("info", "--url", exporter.url())
    assert (refused.returncode, refused.stdout) == (1, "")


def test_an_untrusted_certificate_is_an_error(
    start_https: StartHttps, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    exporter = start_https(users=USERS)
    monkeypatch.setenv("SSL_CERT_FILE", str(trust(trustme.CA(), folder, "another.crt")))
    with pytest.raises(ExporterUntrustedError, match=r"unable to get local issuer certificate.*SSL_CERT_FILE"):
        exporter.request("/metrics", user=IN_URL)
    info = run_command("info", "--url", exporter.url(IN_URL))
    assert (info.returncode, info.stdout) == (1, "")
    (line,) = info.stderr.splitlines()
    assert "certificate" in line
    assert exporter.url() in line
    assert "gpumem-exporter serve" not in line


def test_a_training_process_reports_over_https_and_clears(
    node: EmulatedNode, start_https: StartHttps, start_torch: StartTorch
) -> None:
    exporter = start_https(users=USERS, on=node)
    launcher = (sys.executable, "-m", "gpumem_exporter", "run", "--")
    process = start_torch(launcher=launcher, GPUMEM_EXPORTER_URL=exporter.url(IN_URL))
    process.exec("import torch; x = torch.empty(64 << 20, dtype=torch.uint8, device='cuda'); del x")
    exporter.process.wait_for_processes(process.pid)
    (result,) = exporter.process.act("empty_cache", target={"all": True}, wait_seconds=60)["results"]
    assert (result["outcome"], result["freed_bytes"]) == ("done", 64 << 20)
    assert process.finish() == 0
    wait_for(lambda: not exporter.process.processes(), "its last report")


def test_a_training_process_logs_an_untrusted_certificate_once_and_continues(
    node: EmulatedNode, start_https: StartHttps, start_torch: StartTorch, folder: Path
) -> None:
    exporter = start_https(on=node)
    stranger = str(trust(trustme.CA(), folder, "another.crt"))
    launcher = (sys.executable, "-m", "gpumem_exporter", "run", "--")
    process = start_torch(launcher=launcher, GPUMEM_EXPORTER_URL=exporter.url(), SSL_CERT_FILE=stranger)
    process.exec("import torch; x = torch.empty(1, device='cuda')")
    complaint = "unable to get local issuer certificate"  # OpenSSL's text
    wait_for(lambda: complaint in process.stderr(), "its complaint")
    process.exec("import time; time.sleep(1)")  # later reports log nothing
    assert process.stderr().count(complaint) == 1
    assert process.exec("result = x.numel()") == 1
    assert exporter.process.processes() == {}


VERIFIED = {**TLS, "client_auth_type": "RequireAndVerifyClientCert", "client_ca_file": "authority.crt"}

REFUSED = (OSError, http.client.HTTPException)
"""The possible errors of a refused client: they depend on when it reads the refusal."""


def get(port: int, context: ssl.SSLContext, path: str = "/-/healthy") -> tuple[int, list[tuple[str, str]]]:
    """Return status and headers of a reply."""
    with closing(http.client.HTTPSConnection("127.0.0.1", port, timeout=patient(30), context=context)) as connection:
        connection.request("GET", path)
        reply = connection.getresponse()
        reply.read()
        return reply.status, reply.getheaders()


@contextlib.contextmanager
def serving(folder: Path, tls: Mapping[str, Any], **sections: Any) -> Iterator[int]:
    """Run an exporter with this web configuration, and yield its port."""
    config = folder / "web.yml"
    config.write_text(json.dumps({"tls_server_config": tls, **sections}))
    with running_exporter(web_config_file=str(config), ready=False) as exporter:
        yield exporter.port


def test_configured_headers_replace_those_of_the_exporter_on_every_reply(folder: Path) -> None:
    headers = {
        "Content-Security-Policy": "default-src 'self'",
        "Strict-Transport-Security": "max-age=600",
        "X-Content-Type-Options": "nosniff",
        "X-Frame-Options": "sameorigin",
        "X-XSS-Protection": "0",
    }
    with serving(folder, TLS, http_server_config={"http2": False, "headers": headers}) as port:
        for path, status in (("/", 200), ("/metrics", 200), ("/nothing", 404)):
            answered, received = get(port, client_context(folder), path)
            assert answered == status
            for name, value in headers.items():
                assert [v for n, v in received if n.lower() == name.lower()] == [value], (path, name)
            assert ("referrer-policy", "no-referrer") in [(n.lower(), v) for n, v in received]
    with serving(folder, TLS) as port:
        _, received = get(port, client_context(folder), "/")
        assert ("x-frame-options", "DENY") in [(n.lower(), v) for n, v in received]


@pytest.mark.parametrize("version", [ssl.TLSVersion.TLSv1_2, ssl.TLSVersion.TLSv1_3])
def test_a_client_of_a_removed_authority_cannot_resume_its_session(
    version: ssl.TLSVersion, folder: Path, authority: trustme.CA
) -> None:
    (folder / "clients.crt").write_bytes((folder / "authority.crt").read_bytes())
    renewed = trustme.CA()
    with serving(folder, {**VERIFIED, "client_ca_file": "clients.crt"}) as port:
        client = client_context(folder, authority.issue_cert("client.example"))
        client.maximum_version = version
        session = resumed(port, client, None)
        trust(renewed, folder, "clients.crt")
        accepted = client_context(folder, renewed.issue_cert("client.example"))
        eventually(lambda: is_admitted(port, accepted), bool)
        with pytest.raises(REFUSED):
            resumed(port, client, session)


def is_admitted(port: int, context: ssl.SSLContext) -> bool:
    try:
        return get(port, context)[0] == 200
    except REFUSED:
        return False


def resumed(port: int, context: ssl.SSLContext, session: ssl.SSLSession | None) -> ssl.SSLSession | None:
    """Send a request in this session, and return its session."""
    with (
        socket.create_connection(("127.0.0.1", port), patient(30)) as plain,
        context.wrap_socket(plain, server_hostname="localhost", session=session) as connection,
    ):
        connection.sendall(b"GET /-/healthy HTTP/1.1\r\nHost: localhost\r\n\r\n")
        if not connection.recv(4096).startswith(b"HTTP/1.1 200 "):
            raise ConnectionResetError
        return connection.session
