from __future__ import annotations

import errno
import os
import socket
from pathlib import Path

from gpumem_exporter.cli.doctor import FAIL, PASS, WARN
from gpumem_exporter.cli.doctor.machine import check_socket


class _InaccessiblePath(type(Path())):  # type: ignore[misc]
    """A path in an inaccessible folder. Root can access any folder, so this fakes it."""

    def stat(self, *, follow_symlinks: bool = True) -> os.stat_result:
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(self))


def test_a_listening_socket_passes_and_any_other_file_fails_if_it_is_the_only_address(tmp_path: Path) -> None:
    path = tmp_path / "s"
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as listener:
        listener.bind(str(path))
        listener.listen()
        path.chmod(0o660)
        (finding,) = check_socket(path, required=True)
    assert finding.verdict == PASS
    assert "0660" in finding.detail
    assert f"pid {os.getpid()}" in finding.detail
    for other, optional, detail, fix in (
        (path, WARN, os.strerror(errno.ECONNREFUSED).lower(), "start the exporter again"),
        (tmp_path, WARN, "is not a socket", "directory"),
        (tmp_path / "missing", PASS, "none at", f"--web.listen-socket {tmp_path / 'missing'}"),
        (_InaccessiblePath("/run/s"), PASS, "may not access /run/s", "--url http://"),
    ):
        (required,), (not_required,) = (check_socket(other, required=required) for required in (True, False))
        assert (required.verdict, not_required.verdict) == (FAIL, optional)
        assert str(other) in required.detail
        assert detail in required.detail
        assert fix in required.fix
