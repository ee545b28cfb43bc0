"""What one user's connections cost the others: sockets of two users at a real exporter."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import resource
import socket
import ssl
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import trustme

from tests.support.builders.builders import UUIDS, report, sample
from tests.support.builders.certificates import issue, trust
from tests.support.processes.other_user import OTHER_UID, acting_as, needs_root
from tests.support.servers.exporter_process import ExporterProcess
from tests.support.waiting import patient, wait_for

MIB = 1 << 20
MOST_BYTES = 160 * MIB
PROCESSES = 64
CONNECTIONS = 2 * PROCESSES + 256
"""The limit of an exporter with `--report.max-processes`; half of them may be of one user."""
GET = b"GET /metrics HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n"
POST = b"POST /api/v1/reports HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nConnection: close\r\n"


@pytest.fixture(scope="module", autouse=True)
def many_files() -> Iterator[None]:
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (before[1], before[1]))
    yield
    resource.setrlimit(resource.RLIMIT_NOFILE, before)


@pytest.fixture(scope="module")
def exporter(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ExporterProcess]:
    flags = ("--report.max-processes", str(PROCESSES))
    with contextlib.closing(ExporterProcess(tmp_path_factory.mktemp("clients"), *flags)) as started:
        yield started
        print(started.log())


def port_of(exporter: ExporterProcess) -> int:
    return int(exporter.tcp_url.rpartition(":")[2])


def connected(port: int, stack: contextlib.ExitStack, count: int, sent: bytes = b"") -> list[socket.socket]:
    """Open connections of the other user; the exporter may close any of them."""
    opened = []
    with acting_as(OTHER_UID):
        for _ in range(count):
            sock = stack.enter_context(socket.socket())
            sock.settimeout(patient(30))
            sock.connect(("127.0.0.1", port))
            with contextlib.suppress(OSError):
                sock.sendall(sent)
            opened.append(sock)
    return opened


def everything(sock: socket.socket) -> bytes:
    received = b""
    while piece := sock.recv(MIB):
        received += piece
    return received


def status_of_scrape(port: int) -> int:
    """Scrape as root, on a new connection."""
    with socket.create_connection(("127.0.0.1", port), timeout=patient(30)) as sock:
        sock.sendall(GET)
        return int(everything(sock).split()[1])


def open_files(exporter: ExporterProcess) -> int:
    return len([*Path(f"/proc/{exporter.pid}/fd").iterdir()])


@needs_root
@pytest.mark.parametrize("sent", [b"", b"G", GET[:-2]], ids=["silent", "one byte", "unfinished headers"])
def test_unfinished_requests_of_one_user_do_not_keep_another_out(exporter: ExporterProcess, sent: bytes) -> None:
    port = port_of(exporter)
    with contextlib.ExitStack() as stack:
        connected(port, stack, CONNECTIONS + 100, sent)
        assert [status_of_scrape(port) for _ in range(20)] == [200] * 20
        assert exporter.request("GET", "/metrics").status == 200
        assert open_files(exporter) < CONNECTIONS


@needs_root
def test_a_low_limit_of_files_is_raised(tmp_path: Path) -> None:
    with contextlib.closing(ExporterProcess(tmp_path, launcher=("prlimit", "--nofile=64:4096"))) as exporter:
        assert resource.prlimit(exporter.pid, resource.RLIMIT_NOFILE)[0] == 4096
        port = port_of(exporter)
        with contextlib.ExitStack() as stack:
            connected(port, stack, 200)
            assert [status_of_scrape(port) for _ in range(10)] == [200] * 10


@needs_root
def test_unread_pages_take_the_memory_of_few(exporter: ExporterProcess) -> None:
    for pid in range(PROCESSES - 1):
        names = {f"phase {number} {'x' * 100}": 1 for number in range(16)}
        devices = tuple(dataclasses.replace(sample(uuid, 1), phase_peak_bytes=names) for uuid in UUIDS)
        exporter.report(report(100_000 + pid, devices=devices))
    page = exporter.request("GET", "/metrics").body
    assert len(page) > MIB
    before = exporter.peak_bytes()
    with contextlib.ExitStack() as stack:
        connected(port_of(exporter), stack, 100, GET.replace(b"Connection: close\r\n", b"") * 4)
        assert [status_of_scrape(port_of(exporter)) for _ in range(5)] == [200] * 5
        assert exporter.peak_bytes() - before < 30 * len(page)


@pytest.mark.parametrize("status", [413, 415])
@pytest.mark.parametrize("transport", ["tcp", "unix"])
def test_a_refused_client_can_send_the_rest_and_gets_the_reply(
    exporter: ExporterProcess, transport: str, status: int
) -> None:
    """The exporter closes the connection while its client still sends the request."""
    rest = b"x" * (3 * MIB)
    request = {
        413: POST + b"Content-Length: %d\r\n\r\n" % len(rest) + rest,
        415: POST.replace(b"/json", b"/text") + b"Content-Length: %d\r\n\r\n" % len(rest) + rest,
    }[status]
    for _ in range(20):
        with connection_to(exporter, transport) as sock:
            sock.sendall(request)
            assert everything(sock).startswith(b"HTTP/1.1 %d " % status)


def connection_to(exporter: ExporterProcess, transport: str) -> socket.socket:
    if transport == "tcp":
        return socket.create_connection(("127.0.0.1", port_of(exporter)), timeout=patient(30))
    sock = socket.socket(socket.AF_UNIX)
    sock.settimeout(patient(30))
    sock.connect(str(exporter.socket))
    return sock


@needs_root
def test_unfinished_handshakes_are_connections(tmp_path: Path) -> None:
    authority = trustme.CA()
    issue(authority, tmp_path)
    context = ssl.create_default_context(cafile=str(trust(authority, tmp_path)))
    config = tmp_path / "web.yml"
    config.write_text(json.dumps({"tls_server_config": {"cert_file": "tls.crt", "key_file": "tls.key"}}))
    flags = ("--web.config.file", str(config), "--report.max-processes", str(PROCESSES))
    with contextlib.closing(ExporterProcess(tmp_path, *flags)) as exporter, contextlib.ExitStack() as stack:
        port = port_of(exporter)
        before = open_files(exporter)
        opened = connected(port, stack, 2 * CONNECTIONS, b"\x16\x03\x01\x02")
        for _ in range(10):
            sock = socket.create_connection(("127.0.0.1", port), timeout=patient(30))
            with context.wrap_socket(sock, server_hostname="localhost") as encrypted:
                encrypted.sendall(GET)
                assert b" 200 " in encrypted.recv(4096)[:20]
        assert open_files(exporter) < before + CONNECTIONS
        wait_for(lambda: open_files(exporter) < before + 20, "the end of the handshakes")
        assert all(map(is_closed, opened))


def is_closed(sock: socket.socket) -> bool:
    try:
        return sock.recv(1, socket.MSG_DONTWAIT) == b""
    except BlockingIOError:
        return False
    except OSError:
        return True


def flood(opened: list[socket.socket], sent: bytes) -> None:
    """Send to every connection as much as the exporter reads."""
    left = {connection: memoryview(sent) for connection in opened}
    quiet_since = time.monotonic()
    while left and time.monotonic() - quiet_since < 0.5:
        for connection in tuple(left):
            try:
                part = connection.send(left[connection])
            except BlockingIOError:
                continue
            except (BrokenPipeError, ConnectionResetError):
                part = len(left[connection])
            quiet_since = time.monotonic()
            left[connection] = left[connection][part:]
            if not left[connection]:
                del left[connection]


def test_half_sent_bodies_use_little_memory(tmp_path: Path) -> None:
    with contextlib.closing(ExporterProcess(tmp_path, fresh=True)) as exporter:
        for size in (250 << 10, MIB - 1):
            with contextlib.ExitStack() as stack:
                opened = [stack.enter_context(socket.socket(socket.AF_UNIX)) for _ in range(400)]
                for connection in opened:
                    connection.settimeout(patient(30))
                    connection.connect(str(exporter.socket))
                    connection.setblocking(False)
                flood(opened, POST + b"Content-Length: 1048576\r\n\r\n" + b" " * size)
                assert exporter.peak_bytes() < MOST_BYTES
            wait_for(lambda: exporter.request("POST", "/api/v1/reports", {}).status == 422, "an answer to another one")
