from __future__ import annotations

import errno
import os
import socket
from pathlib import Path

import pytest

from gpumem_exporter.cli.doctor import FAIL, PASS, WARN
from gpumem_exporter.cli.doctor.machine import check_socket, socket_path, socket_peer


@pytest.fixture
def listener(tmp_path: Path) -> socket.socket:
    """A socket that listens at `s`."""
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    listener.bind(str(tmp_path / "s"))
    listener.listen()
    return listener


class _InaccessiblePath(type(Path())):  # type: ignore[misc]
    """A path in an inaccessible folder. Root can access any folder, so this fakes it."""

    def stat(self, *, follow_symlinks: bool = True) -> os.stat_result:
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(self))


def test_a_listening_socket_passes_with_its_mode_and_listener(listener: socket.socket, tmp_path: Path) -> None:
    path = tmp_path / "s"
    with listener:
        path.chmod(0o660)
        (finding,) = check_socket(path, required=True)
        assert socket_peer(path) == (os.getpid(), os.geteuid(), os.getegid())
    assert finding.verdict == PASS
    assert "0660" in finding.detail
    assert f"pid {os.getpid()}" in finding.detail


def test_any_other_file_fails_if_it_is_the_only_address(listener: socket.socket, tmp_path: Path) -> None:
    listener.close()
    for path, optional, detail, fix in (
        (tmp_path / "s", WARN, os.strerror(errno.ECONNREFUSED).lower(), "start the exporter again"),
        (tmp_path, WARN, "is not a socket", "directory"),
        (tmp_path / "missing", PASS, "none at", f"--web.listen-socket {tmp_path / 'missing'}"),
        (_InaccessiblePath("/run/s"), PASS, "may not access /run/s", "--url http://"),
    ):
        (required,), (not_required,) = (check_socket(path, required=required) for required in (True, False))
        assert (required.verdict, not_required.verdict) == (FAIL, optional)
        assert str(path) in required.detail
        assert detail in required.detail
        assert fix in required.fix


def test_the_first_socket_address_is_checked() -> None:
    assert socket_path(("http://a:1", "unix:///run/s", "unix:///t")) == Path("/run/s")
    assert socket_path(("http://a:1",)) is None
