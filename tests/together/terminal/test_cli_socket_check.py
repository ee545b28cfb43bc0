from __future__ import annotations

import errno
import os
import socket
from contextlib import closing
from pathlib import Path

import pytest

from gpumem_exporter.cli.doctor import FAIL, PASS, WARN
from gpumem_exporter.cli.doctor.machine import check_socket, socket_path, socket_peer


def _listening(path: Path) -> socket.socket:
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    listener.bind(str(path))
    listener.listen()
    return listener


def test_a_listening_socket_passes_with_its_mode_and_listener(tmp_path: Path) -> None:
    path = tmp_path / "s"
    with closing(_listening(path)):
        path.chmod(0o660)
        (finding,) = check_socket(path, required=True)
        assert socket_peer(path) == (os.getpid(), os.geteuid(), os.getegid())
    assert finding.verdict == PASS
    assert "0660" in finding.detail
    assert f"pid {os.getpid()}" in finding.detail


@pytest.mark.parametrize(("required", "verdict"), [(True, FAIL), (False, WARN)])
def test_the_socket_of_a_killed_exporter_fails_if_it_is_the_only_address(
    tmp_path: Path, required: bool, verdict: str
) -> None:
    _listening(tmp_path / "s").close()
    (finding,) = check_socket(tmp_path / "s", required=required)
    assert finding.verdict == verdict
    assert os.strerror(errno.ECONNREFUSED).lower() in finding.detail
    assert str(tmp_path / "s") in finding.detail


def test_a_missing_socket_fails_only_if_it_is_the_only_address(tmp_path: Path) -> None:
    (required,) = check_socket(tmp_path / "s", required=True)
    (optional,) = check_socket(tmp_path / "s", required=False)
    assert (required.verdict, optional.verdict) == (FAIL, PASS)
    assert f"--web.listen-socket {tmp_path / 's'}" in required.fix


class _InaccessiblePath(type(Path())):  # type: ignore[misc]
    """A path in an inaccessible folder. Root can access any folder, so this fakes it."""

    def stat(self, *, follow_symlinks: bool = True) -> os.stat_result:
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(self))


def test_an_inaccessible_socket_fails_only_if_it_is_the_only_address() -> None:
    path = _InaccessiblePath("/run/gpumem/exporter.sock")
    (required,) = check_socket(path, required=True)
    (optional,) = check_socket(path, required=False)
    assert (required.verdict, optional.verdict) == (FAIL, PASS)
    assert str(path) in required.detail
    assert "--url http://" in required.fix


def test_a_directory_at_the_path_fails_with_a_fix(tmp_path: Path) -> None:
    (finding,) = check_socket(tmp_path, required=True)
    assert finding.verdict == FAIL
    assert str(tmp_path) in finding.detail
    assert "directory" in finding.fix


def test_the_first_socket_address_is_checked() -> None:
    assert socket_path(("http://a:1", "unix:///run/s", "unix:///t")) == Path("/run/s")
    assert socket_path(("http://a:1",)) is None
