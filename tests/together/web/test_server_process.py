from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from gpumem_client.wire.http import Connection
from gpumem_client.wire.protocol import REPORTS_PATH, to_wire
from gpumem_exporter.edge.listeners import BindError, bind
from tests.support.builders import report
from tests.support.running_command import clean_environment
from tests.support.waiting import eventually, patient

SERVE = [sys.executable, "-m", "gpumem_exporter", "serve"]


@dataclass
class Exporter:
    process: subprocess.Popen[str]
    url: str

    def get(self, path: str) -> int:
        with contextlib.closing(Connection(self.url, timeout_seconds=patient(30))) as connection:
            return connection.request("GET", path).status


@contextlib.contextmanager
def started(command: list[str]) -> Iterator[Exporter]:
    """Start an exporter that logs JSON and wait until it listens."""
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=clean_environment())
    try:
        assert process.stderr is not None
        # Lines about the driver may come first.
        for line in iter(process.stderr.readline, ""):
            document = json.loads(line)
            if document["msg"] == "listening":
                yield Exporter(process, document["addresses"].split(",")[0])
                break
            assert document["logger"].startswith("gpumem_exporter.node"), line
        else:
            raise AssertionError("it exited without listening")
    finally:
        process.kill()
        process.wait(patient(30))
        if process.stderr is not None:
            process.stderr.close()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_stops_the_exporter_while_reports_wait(number: signal.Signals, tmp_path: Path) -> None:
    path = tmp_path / "exporter.sock"
    flags = ["--web.listen-address", "127.0.0.1:0", "--web.listen-socket", str(path), "--log.format", "json"]
    flags += ["--report.interval", "60", "--report.expiry", "120"]
    with started([*SERVE, *flags]) as exporter:
        assert exporter.get("/-/healthy") == 200
        held = []
        for pid in range(1, 4):
            body = json.dumps(to_wire(report(pid, hold_seconds=60.0))).encode()
            sock = socket.socket(socket.AF_UNIX)
            sock.connect(str(path))
            head = f"POST {REPORTS_PATH} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
            sock.sendall(head.encode() + b"Content-Length: %d\r\n\r\n" % len(body) + body)
            held.append(sock)
        with contextlib.closing(Connection(exporter.url, timeout_seconds=patient(30))) as connection:
            eventually(lambda: json.loads(connection.request("GET", "/health").body)["processes"], lambda n: n == 3)
        exporter.process.send_signal(number)
        assert exporter.process.wait(patient(30)) == 0
        for sock in held:
            assert sock.recv(4096).startswith(b"HTTP/1.1 200 ")
            sock.close()
        assert not path.exists()
        assert exporter.process.stderr is not None
        said = [json.loads(line) for line in exporter.process.stderr]
        assert [line for line in said if not line["logger"].startswith("gpumem_exporter.node")] == []


def test_every_address_of_the_machine_is_ipv4_and_ipv6() -> None:
    with bind([":0"]) as listeners:
        port = listeners.sockets[0].getsockname()[1]
        for host in ("127.0.0.1", *(["::1"] if _has_ipv6() else [])):
            socket.create_connection((host, port), timeout=patient(30)).close()


def _has_ipv6() -> bool:
    try:
        with socket.socket(socket.AF_INET6) as sock:
            sock.bind(("::1", 0))
    except OSError:
        return False
    return True


def leave_a_socket_file(path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as sock:
        sock.bind(str(path))


def write_a_file(path: Path) -> None:
    path.write_text("precious")


def test_the_socket_of_a_killed_exporter_is_replaced(tmp_path: Path) -> None:
    path = tmp_path / "exporter.sock"
    leave_a_socket_file(path)
    with bind([], str(path)) as listeners:
        assert listeners.names() == (f"unix://{path}",)
        assert path.stat().st_mode & 0o777 == 0o666
        with socket.socket(socket.AF_UNIX) as sock:
            sock.connect(str(path))
    assert not path.exists()


def test_a_new_folder_of_a_socket_has_mode_0755_and_an_existing_one_keeps_its_mode(
    tmp_path: Path,
) -> None:
    own = tmp_path / "own"
    own.mkdir(mode=0o700)
    before = os.umask(0o077)
    try:
        with bind([], str(tmp_path / "made" / "exporter.sock")), bind([], str(own / "exporter.sock")):
            modes = [(tmp_path / name).stat().st_mode & 0o777 for name in ("made", "own")]
    finally:
        os.umask(before)
    assert modes == [0o755, 0o700]


def test_the_socket_of_a_running_exporter_is_kept(tmp_path: Path) -> None:
    path = tmp_path / "exporter.sock"
    with bind([], str(path)):
        with pytest.raises(BindError, match=re.escape(str(path))):
            bind([], str(path))
        with socket.socket(socket.AF_UNIX) as sock:
            sock.connect(str(path))


@pytest.mark.parametrize("make", [write_a_file, Path.mkdir])
def test_a_file_that_is_not_a_socket_is_kept(tmp_path: Path, make: Callable[[Path], None]) -> None:
    path = tmp_path / "exporter.sock"
    make(path)
    with pytest.raises(BindError, match=re.escape(str(path))):
        bind([], str(path))
    assert path.exists()


def test_only_the_last_folder_of_the_sockets_path_is_created(tmp_path: Path) -> None:
    with bind([], str(tmp_path / "gpumem" / "exporter.sock")) as listeners:
        assert Path(listeners.unix_path).exists()
    with pytest.raises(BindError, match=re.escape(str(tmp_path / "a" / "b"))):
        bind([], str(tmp_path / "a" / "b" / "exporter.sock"))
