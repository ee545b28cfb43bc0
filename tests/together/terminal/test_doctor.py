"""`doctor`: the driver of an exporter on another machine, and the socket of one on this machine."""

from __future__ import annotations

import errno
import json
import os
import socket
from pathlib import Path

import pytest

from gpumem_exporter.cli.commands import doctor
from gpumem_exporter.cli.commands.doctor import FAIL, PASS, WARN, check_socket
from gpumem_exporter.main import main
from gpumem_exporter.node.pynvml_provider import PynvmlProvider
from tests.support.servers.running_exporter import ScriptedProvider, running_exporter
from tests.support.waiting import eventually


def test_the_exporters_driver_error_is_shown_and_the_local_driver_is_not_opened(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def opened(_: PynvmlProvider) -> None:
        raise AssertionError("opened-here")

    monkeypatch.setattr(doctor, "is_on_this_machine", lambda url: False)
    monkeypatch.setattr(PynvmlProvider, "open", opened)
    provider = ScriptedProvider()
    provider.error = "driver-not-loaded"
    with running_exporter(provider=provider) as exporter:
        eventually(lambda: exporter.document("/health")["nvml"]["error"], lambda error: "driver-not-loaded" in error)
        assert main(["doctor", "--json", "--url", exporter.url]) == 1
    found = {finding["check"]: finding for finding in json.loads(capsys.readouterr().out)["findings"]}
    assert found["driver"]["verdict"] == FAIL
    assert "driver-not-loaded" in found["driver"]["detail"]
    assert "opened-here" not in found["driver"]["detail"]
    assert "devices" not in found


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
        (_InaccessiblePath("/run/s"), PASS, "may not access /run/s", "--url"),
    ):
        (required,), (not_required,) = (check_socket(other, required=required) for required in (True, False))
        assert (required.verdict, not_required.verdict) == (FAIL, optional)
        assert str(other) in required.detail
        assert detail in required.detail
        assert fix in required.fix
