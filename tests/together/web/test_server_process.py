"""The process of the exporter: its signals, its addresses and sockets, and the sockets of systemd."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import socket
import stat
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from pathlib import Path

import pytest

from gpumem_client.wire.http import Answer, Connection
from gpumem_client.wire.protocol import REPORTS_PATH, to_wire
from gpumem_exporter.edge.listeners import BindError, bind
from tests.conftest import StartExporter
from tests.support.builders.builders import report
from tests.support.processes.running_command import environment_without, run_command
from tests.support.servers.exporter_process import ExporterProcess
from tests.support.waiting import eventually, patient


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_stops_the_exporter_while_reports_wait(number: signal.Signals, tmp_path: Path) -> None:
    flags = ("--log.format", "json", "--report.interval", "60", "--report.expiry", "120")
    with closing(ExporterProcess(tmp_path, *flags, fresh=True, ready="/-/healthy")) as exporter:
        held = []
        for pid in range(1, 4):
            body = json.dumps(to_wire(report(pid, hold_seconds=60.0))).encode()
            sock = socket.socket(socket.AF_UNIX)
            sock.connect(str(exporter.socket))
            head = f"POST {REPORTS_PATH} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
            sock.sendall(head.encode() + b"Content-Length: %d\r\n\r\n" % len(body) + body)
            held.append(sock)
        eventually(lambda: exporter.get("/health")["processes"], lambda count: count == 3)
        assert exporter.stop(number) == 0
        for sock in held:
            assert sock.recv(4096).startswith(b"HTTP/1.1 200 ")
            sock.close()
        assert not exporter.socket.exists()
        said = [json.loads(line) for line in exporter.log().splitlines()]
        others = [line for line in said if not line["logger"].startswith("gpumem_exporter.node")]
        assert [line["msg"] for line in others] == ["listening"]


def test_the_log_names_settings_that_surprise(tmp_path: Path) -> None:
    flags = ("--web.listen-address", ":0", "--action.allow", "snapshot")
    with closing(ExporterProcess(tmp_path, *flags, ready="/-/healthy")) as exporter:
        eventually(exporter.log, lambda log: "listening on every address" in log)
        assert "turns empty_cache off" in exporter.log()


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


def test_the_socket_of_a_killed_exporter_is_replaced(tmp_path: Path) -> None:
    path = tmp_path / "exporter.sock"
    leave_a_socket_file(path)
    with bind([], str(path)) as listeners:
        assert listeners.names() == (f"unix://{path}",)
        assert path.stat().st_mode & 0o777 == 0o666
        with socket.socket(socket.AF_UNIX) as sock:
            sock.connect(str(path))
    assert not path.exists()


def test_only_the_last_folder_of_the_sockets_path_is_created_with_mode_0755(tmp_path: Path) -> None:
    own = tmp_path / "own"
    own.mkdir(mode=0o700)
    before = os.umask(0o077)
    try:
        with bind([], str(tmp_path / "made" / "exporter.sock")), bind([], str(own / "exporter.sock")):
            modes = [(tmp_path / name).stat().st_mode & 0o777 for name in ("made", "own")]
    finally:
        os.umask(before)
    assert modes == [0o755, 0o700]
    with pytest.raises(BindError, match=re.escape(str(tmp_path / "a" / "b"))):
        bind([], str(tmp_path / "a" / "b" / "exporter.sock"))


def test_the_socket_of_a_running_exporter_is_kept(tmp_path: Path) -> None:
    path = tmp_path / "exporter.sock"
    with bind([], str(path)):
        with pytest.raises(BindError, match=re.escape(str(path))):
            bind([], str(path))
        with socket.socket(socket.AF_UNIX) as sock:
            sock.connect(str(path))


@pytest.mark.parametrize("make", [Path.touch, Path.mkdir])
def test_a_file_that_is_not_a_socket_is_kept(tmp_path: Path, make: Callable[[Path], None]) -> None:
    path = tmp_path / "exporter.sock"
    make(path)
    with pytest.raises(BindError, match=re.escape(str(path))):
        bind([], str(path))
    assert path.exists()


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


def test_a_replaced_socket_degrades_the_health_and_is_kept(start_exporter: StartExporter) -> None:
    exporter = start_exporter()
    assert exporter.get("/health")["checks"]["socket"] == {"status": "ok", "detail": str(exporter.socket)}
    with closing(Connection(exporter.tcp_url, timeout_seconds=patient(30))) as tcp:
        for change in ("removed", "replaced"):
            exporter.socket.unlink(missing_ok=True)
            if change == "replaced":
                with socket.socket(socket.AF_UNIX) as other:
                    other.bind(str(exporter.socket))
            check = json.loads(tcp.request("GET", "/health").body)["checks"]["socket"]
            assert check["status"] == "degraded", change
    assert exporter.stop() == 0
    assert exporter.socket.exists(), "the file of another process"


def test_a_rebound_name_reads_nothing_on_loopback(start_exporter: StartExporter) -> None:
    exporter = start_exporter()
    with closing(Connection(exporter.tcp_url, timeout_seconds=patient(30))) as tcp:
        for path in ("/", "/metrics", "/api/v1/processes", "/api/v1/live", "/health"):
            assert tcp.request("GET", path, headers={"Host": "evil.example"}).status == 403
            assert tcp.request("GET", path).status in (200, 503)


SERVE = [sys.executable, "-m", "gpumem_exporter", "serve", "--web.systemd-socket"]


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
    with socket.create_server(("127.0.0.1", 0)) as tcp, unix_socket(path) as unix:
        with activated([tcp, unix]) as process:
            for pid, sock in enumerate((tcp, unix), start=1):
                assert b"gpumem_exporter_build_info" in request(url_of(sock), "/metrics").body
                assert request(url_of(sock), REPORTS_PATH, to_wire(report(pid))).status == 200
            health = json.loads(request(url_of(tcp), "/health").body)
            assert health["checks"]["socket"] == {"status": "ok", "detail": str(path)}
            assert health["processes"] == 2
            for number in (3, 4):
                flags = re.search(r"flags:\s*(\d+)", Path(f"/proc/{process.pid}/fdinfo/{number}").read_text())
                assert flags is not None
                assert int(flags[1], 8) & os.O_CLOEXEC, "a child would keep the port open"
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


@pytest.mark.parametrize(
    ("make", "named"),
    [
        (lambda: socket.socket(socket.AF_INET, socket.SOCK_DGRAM), r"\b3\b.*ListenStream="),
        (lambda: socket.socket(socket.AF_UNIX), r"\b3\b.*Accept=no"),
        (lambda: unix_socket(f"\0gpumem-test-{os.getpid()}"), "path"),
    ],
    ids=["datagrams", "does not listen", "abstract"],
)
def test_a_socket_that_the_exporter_cannot_use_is_an_error(make: Callable[[], socket.socket], named: str) -> None:
    with make() as sock:
        _, log = start_activated([sock], SERVE).communicate(timeout=patient(60))
    assert re.search(rf"--web\.systemd-socket: .*{named}", log)


@pytest.mark.parametrize(
    ("variables", "named"),
    [({}, "LISTEN_FDS"), ({"LISTEN_FDS": "1", "LISTEN_PID": "1"}, "LISTEN_PID is '1'")],
)
def test_without_sockets_for_this_process_the_start_fails_in_one_line(variables: dict[str, str], named: str) -> None:
    ended = run_command("serve", "--web.systemd-socket", **variables)
    assert (ended.returncode, ended.stdout) == (1, "")
    (line,) = ended.stderr.splitlines()
    assert re.search(rf"--web\.systemd-socket: .*{named}", line)
