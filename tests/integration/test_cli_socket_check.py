from __future__ import annotations

import errno
import os
import socket
from contextlib import closing
from pathlib import Path

import pytest

from gpumem_exporter.cli.doctor.finding import FAIL, PASS, WARN
from gpumem_exporter.cli.doctor.socket import Peer, check_socket, socket_path, socket_peer


def _listening(path: Path) -> socket.socket:
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    listener.bind(str(path))
    listener.listen()
    return listener


def test_a_socket_that_somebody_listens_at_passes_with_its_mode_and_the_listener(tmp_path: Path) -> None:
    path = tmp_path / "s"
    with closing(_listening(path)):
        path.chmod(0o660)
        (finding,) = check_socket(path, required=True)
        assert socket_peer(path) == Peer(os.getpid(), os.geteuid())
    assert finding.verdict == PASS
    assert "0660" in finding.detail
    assert f"pid {os.getpid()}" in finding.detail


@pytest.mark.parametrize(("required", "verdict"), [(True, FAIL), (False, WARN)])
def test_a_socket_that_a_killed_exporter_left_behind_fails_where_it_is_the_only_way(
    tmp_path: Path, required: bool, verdict: str
) -> None:
    _listening(tmp_path / "s").close()
    (finding,) = check_socket(tmp_path / "s", required=required)
    assert finding.verdict == verdict
    assert os.strerror(errno.ECONNREFUSED).lower() in finding.detail
    assert str(tmp_path / "s") in finding.detail


def test_a_missing_socket_fails_only_where_it_is_the_only_way(tmp_path: Path) -> None:
    (required,) = check_socket(tmp_path / "s", required=True)
    (optional,) = check_socket(tmp_path / "s", required=False)
    assert (required.verdict, optional.verdict) == (FAIL, PASS)
    assert f"--web.listen-socket {tmp_path / 's'}" in required.fix


class _ClosedPath(type(Path())):  # type: ignore[misc]
    """A path in a folder that is closed to whoever looks, which none is to root."""

    def stat(self, *, follow_symlinks: bool = True) -> os.stat_result:
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(self))


def test_a_socket_in_a_folder_that_is_closed_to_the_user_fails_only_where_it_is_the_only_way() -> None:
    path = _ClosedPath("/run/gpumem/exporter.sock")
    (required,) = check_socket(path, required=True)
    (optional,) = check_socket(path, required=False)
    assert (required.verdict, optional.verdict) == (FAIL, PASS)
    assert str(path) in required.detail
    assert "--url http://" in required.fix


def test_a_directory_in_the_sockets_place_fails_with_the_mend(tmp_path: Path) -> None:
    (finding,) = check_socket(tmp_path, required=True)
    assert finding.verdict == FAIL
    assert str(tmp_path) in finding.detail
    assert "directory" in finding.fix


def test_the_first_address_that_is_a_socket_is_looked_at() -> None:
    assert socket_path(("http://a:1", "unix:///run/s", "unix:///t")) == Path("/run/s")
    assert socket_path(("http://a:1",)) is None
