"""What one client can make the exporter store: a real exporter process, its memory as the kernel counts it."""

from __future__ import annotations

import contextlib
import json
import os
import socket
import stat
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from gpumem_client.wire.errors import ExporterUntrustedError
from gpumem_client.wire.http import Connection
from gpumem_client.wire.peer import user_name
from gpumem_exporter.cli.api_client import ExporterApi
from gpumem_exporter.edge.listeners import BindError, bind
from tests.support.processes.other_user import OTHER_UID, needs_root, rogue_server
from tests.support.servers.exporter_process import ExporterProcess
from tests.support.waiting import patient, wait_for

MIB = 1 << 20
MOST_BYTES = 160 * MIB
HEAD = b"POST /api/v1/reports HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"


@pytest.fixture(scope="module")
def exporter(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ExporterProcess]:
    started = ExporterProcess(tmp_path_factory.mktemp("floods"), fresh=True)
    yield started
    print(started.log())
    started.close()


def connections(exporter: ExporterProcess, count: int, stack: contextlib.ExitStack) -> list[socket.socket]:
    opened = [stack.enter_context(socket.socket(socket.AF_UNIX)) for _ in range(count)]
    for connection in opened:
        connection.settimeout(patient(30))
        connection.connect(str(exporter.socket))
        connection.setblocking(False)
    return opened


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


@pytest.mark.parametrize("size", [250 << 10, MIB - 1])
def test_half_sent_bodies_use_little_memory(exporter: ExporterProcess, size: int) -> None:
    with contextlib.ExitStack() as stack:
        opened = connections(exporter, 400, stack)
        flood(opened, HEAD + b"Content-Length: 1048576\r\n\r\n" + b" " * size)
        assert exporter.peak_bytes() < MOST_BYTES
    wait_for(lambda: exporter.request("POST", "/api/v1/reports", {}).status == 422, "an answer to another report")


@pytest.mark.parametrize(("mode", "accepted"), [(0o775, False), (0o757, False), (0o1777, True)])
def test_a_socket_needs_a_folder_that_others_cannot_write(tmp_path: Path, mode: int, accepted: bool) -> None:
    tmp_path.chmod(mode)
    path = tmp_path / "exporter.sock"
    if accepted:
        bind([], str(path)).close()
    else:
        with pytest.raises(BindError, match=f"chmod go-w {tmp_path}"):
            bind([], str(path))
    assert not path.exists()


@pytest.mark.parametrize("umask", [0, 0o077])
def test_a_socket_has_its_mode_from_the_start(tmp_path: Path, umask: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Path, "chmod", None)
    monkeypatch.setattr(os, "chmod", None)
    before = os.umask(umask)
    try:
        with bind([], str(tmp_path / "exporter.sock")):
            assert stat.S_IMODE((tmp_path / "exporter.sock").stat().st_mode) == 0o666
        assert os.umask(umask) == umask
    finally:
        os.umask(before)


def test_a_replaced_socket_degrades_the_health_and_is_kept(tmp_path: Path) -> None:
    with contextlib.closing(ExporterProcess(tmp_path)) as exporter:
        assert exporter.get("/health")["checks"]["socket"] == {"status": "ok", "detail": str(exporter.socket)}
        with contextlib.closing(Connection(exporter.tcp_url, timeout_seconds=patient(30))) as tcp:
            for change in ("removed", "replaced"):
                exporter.socket.unlink(missing_ok=True)
                if change == "replaced":
                    with socket.socket(socket.AF_UNIX) as other:
                        other.bind(str(exporter.socket))
                check = json.loads(tcp.request("GET", "/health").body)["checks"]["socket"]
                assert check["status"] == "degraded", change
        assert exporter.stop() == 0
        assert exporter.socket.exists(), "the file of another process"


@needs_root
def test_a_taken_address_names_the_user(tmp_path: Path) -> None:
    user = user_name(OTHER_UID)
    with tempfile.TemporaryDirectory(dir="/tmp") as made:
        os.chown(made, OTHER_UID, OTHER_UID)
        path = Path(made, "exporter.sock")
        with rogue_server(tmp_path, path), pytest.raises(BindError, match=f"pid [0-9]+ of {user}"):
            bind([], str(path))
    with rogue_server(tmp_path) as server:
        address = server.url.removeprefix("http://")
        for taken in (address, address.replace("127.0.0.1", "")):
            with pytest.raises(BindError, match=f"a process of {user}"):
                bind([taken])


@needs_root
def test_a_token_is_for_actions_at_a_trusted_exporter(tmp_path: Path) -> None:
    with rogue_server(tmp_path) as server, ExporterApi((server.url,), token="secret", token_for_reads=False) as api:
        api.get("/api/v1/devices")
        with pytest.raises(ExporterUntrustedError, match=f"uid {OTHER_UID}"):
            api.submit({"action": "empty_cache", "target": {"all": True}})
        assert b"/api/v1/devices" in server.received()
        assert b"secret" not in server.received()


def test_a_rebound_name_reads_nothing_on_loopback(exporter: ExporterProcess) -> None:
    with contextlib.closing(Connection(exporter.tcp_url, timeout_seconds=patient(30))) as tcp:
        for path in ("/", "/metrics", "/api/v1/processes", "/api/v1/live", "/health"):
            assert tcp.request("GET", path, headers={"Host": "evil.example"}).status == 403
            assert tcp.request("GET", path).status in (200, 503)
