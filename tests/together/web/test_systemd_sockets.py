"""`serve --web.systemd-socket`: the exporter takes over the sockets of a systemd socket unit."""

from __future__ import annotations

import contextlib
import json
import os
import re
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from pathlib import Path

import pytest

from gpumem_client.wire.http import Answer, Connection
from gpumem_client.wire.protocol import REPORTS_PATH, to_wire
from tests.support.builders import report
from tests.support.running_command import environment_without, run_command
from tests.support.waiting import patient

SERVE = [sys.executable, "-m", "gpumem_exporter", "serve", "--web.systemd-socket", "--log.format", "json"]
TAKE = [
    sys.executable,
    "-c",
    """
import json, os
from gpumem_client.wire.errors import GpumemError
from gpumem_exporter.edge.listeners import take_systemd_sockets
try:
    with take_systemd_sockets() as listeners:
        inheritable = [sock.get_inheritable() for sock in listeners.sockets]
        left = [name for name in os.environ if name.startswith("LISTEN_")]
        print(json.dumps({"names": listeners.names(), "inheritable": inheritable, "left": left}))
except GpumemError as error:
    print(json.dumps({"error": str(error)}))
""",
]


def tcp_socket() -> socket.socket:
    return socket.create_server(("127.0.0.1", 0))


def unix_socket(path: Path | str) -> socket.socket:
    sock = socket.socket(socket.AF_UNIX)
    sock.bind(str(path))
    sock.listen()
    return sock


def url_of(sock: socket.socket) -> str:
    address = sock.getsockname()
    return f"unix://{address}" if sock.family == socket.AF_UNIX else f"http://127.0.0.1:{address[1]}"


LAUNCHER = """
import fcntl, os, sys
sockets, command = sys.argv[1].split(","), sys.argv[2:]
copies = [fcntl.fcntl(int(number), fcntl.F_DUPFD, 64) for number in sockets]
for position, copy in enumerate(copies):
    os.dup2(copy, 3 + position)
    os.close(copy)
os.environ.update(LISTEN_FDS=str(len(sockets)), LISTEN_PID=str(os.getpid()), LISTEN_FDNAMES="a:b")
os.execv(command[0], command)
"""


def start_activated(sockets: Sequence[socket.socket], command: Sequence[str]) -> subprocess.Popen[str]:
    """Start a command with these sockets from file descriptor 3 on, as systemd does: sd_listen_fds(3)."""
    numbers = [sock.fileno() for sock in sockets]
    return subprocess.Popen(
        [sys.executable, "-c", LAUNCHER, ",".join(map(str, numbers)), *command],
        pass_fds=numbers,
        env=environment_without("GPUMEM_", "LISTEN_"),
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )


@contextlib.contextmanager
def activated(sockets: Sequence[socket.socket]) -> Iterator[subprocess.Popen[str]]:
    """Run an exporter with these sockets. It must end by itself or on a signal of the test."""
    process = start_activated(sockets, SERVE)
    try:
        yield process
    finally:
        process.kill()
        process.communicate(timeout=patient(30))


def request(url: str, path: str, document: object = None) -> Answer:
    with closing(Connection(url, timeout_seconds=patient(30))) as connection:
        if document is None:
            return connection.request("GET", path)
        return connection.request("POST", path, json.dumps(document).encode(), {"Content-Type": "application/json"})


def test_a_passed_tcp_and_a_passed_unix_socket_serve_scrapes_and_reports(tmp_path: Path) -> None:
    path = tmp_path / "exporter.sock"
    with tcp_socket() as tcp, unix_socket(path) as unix:
        with activated([tcp, unix]) as process:
            for pid, sock in enumerate((tcp, unix), start=1):
                assert b"gpumem_exporter_build_info" in request(url_of(sock), "/metrics").body
                assert request(url_of(sock), REPORTS_PATH, to_wire(report(pid))).status == 200
            health = json.loads(request(url_of(tcp), "/health").body)
            assert health["checks"]["socket"] == {"status": "ok", "detail": str(path)}
            assert health["processes"] == 2
            process.terminate()
            _, log = process.communicate(timeout=patient(30))
            assert process.returncode == 0
            assert url_of(tcp) in log
            assert url_of(unix) in log
        assert path.exists(), "systemd keeps the socket"
        # A connection that is made between two exporters is answered by the second.
        with socket.create_connection(tcp.getsockname(), patient(30)) as waiting:
            waiting.sendall(b"GET /-/healthy HTTP/1.1\r\nHost: localhost\r\n\r\n")
            with activated([tcp]):
                assert waiting.recv(4096).startswith(b"HTTP/1.1 200 ")


def taken(process: subprocess.Popen[str]) -> dict[str, object]:
    output, errors = process.communicate(timeout=patient(60))
    assert errors == ""
    return dict(json.loads(output))


def test_the_processes_children_inherit_neither_the_sockets_nor_the_variables(tmp_path: Path) -> None:
    with tcp_socket() as tcp, unix_socket(tmp_path / "exporter.sock") as unix:
        assert taken(start_activated([tcp, unix], TAKE)) == {
            "names": [url_of(tcp), url_of(unix)],
            "inheritable": [False, False],
            "left": [],
        }


def datagram_socket() -> socket.socket:
    return socket.socket(socket.AF_INET, socket.SOCK_DGRAM)


def socket_that_does_not_listen() -> socket.socket:
    return socket.socket(socket.AF_UNIX)


def abstract_socket() -> socket.socket:
    return unix_socket(f"\0gpumem-test-{os.getpid()}")


@pytest.mark.parametrize(
    ("make", "named"),
    [
        (datagram_socket, r"\b3\b.*ListenStream="),
        (socket_that_does_not_listen, r"\b3\b.*Accept=no"),
        (abstract_socket, "path"),
    ],
)
def test_a_socket_that_the_exporter_cannot_use_is_an_error(make: Callable[[], socket.socket], named: str) -> None:
    with make() as sock:
        error = taken(start_activated([sock], TAKE))["error"]
    assert re.search(rf"^--web\.systemd-socket: .*{named}", str(error))


@pytest.mark.parametrize(
    ("variables", "named"),
    [({}, "LISTEN_FDS"), ({"LISTEN_FDS": "1", "LISTEN_PID": "1"}, "LISTEN_PID is '1'")],
)
def test_without_sockets_for_this_process_the_start_fails_in_one_line(variables: dict[str, str], named: str) -> None:
    ended = run_command("serve", "--web.systemd-socket", **variables)
    assert (ended.returncode, ended.stdout) == (1, "")
    (line,) = ended.stderr.splitlines()
    assert re.search(rf"--web\.systemd-socket: .*{named}", line)
