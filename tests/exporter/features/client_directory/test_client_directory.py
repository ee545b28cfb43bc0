"""`--client.directory`: what the exporter writes, which folders it refuses, and which processes lack the client."""

from __future__ import annotations

import dataclasses
import os
import struct
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from gpumem_exporter.core.readings import ProcessFacts
from gpumem_exporter.core.samples import Snapshot
from gpumem_exporter.edge.listeners import umask
from gpumem_exporter.features.client_directory import client_directory
from gpumem_exporter.features.client_directory.client_directory import ClientDirectoryError, put_client
from gpumem_exporter.features.client_directory.unreported import INJECTION_LABEL, unreported
from gpumem_exporter.page.jobs import jobs_of
from tests.support.builders.builders import MIB, device, node, reporting
from tests.support.paths import REPOSITORY
from tests.support.processes.other_user import OTHER_UID, needs_root
from tests.support.servers.running_exporter import running_exporter

CLIENT = REPOSITORY / "client"


@pytest.fixture(autouse=True)
def _umask() -> Iterator[None]:
    with umask(0o077):
        yield


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "client"


def test_the_folder_is_complete_when_the_exporter_answers(folder: Path) -> None:
    with running_exporter(client_directory=str(folder)) as exporter:
        assert (folder / "sitecustomize.py").is_file()
        assert exporter.document("/api/v1/live")["node"]["client_directory"] == str(folder)


def versions(folder: Path) -> list[str]:
    return sorted(entry.name for entry in folder.iterdir() if entry.is_dir() and entry.name != "__pycache__")


def put_version(folder: Path, version: str, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setattr(client_directory, "__version__", version)
    put_client(folder)
    return (folder / "sitecustomize.py").readlink().parts[0]


def test_the_folder_has_the_whole_client_for_every_reader(folder: Path) -> None:
    put_client(folder)
    (version,) = versions(folder)
    written = {path.relative_to(folder / version): path.read_text() for path in (folder / version).rglob("*.py")}
    assert written == {path.relative_to(CLIENT): path.read_text() for path in CLIENT.rglob("*.py")}
    assert (folder / "sitecustomize.py").resolve() == folder / version / "gpumem_client/bootstrap/sitecustomize.py"
    modes = {path: path.stat().st_mode & 0o777 for path in (folder, *folder.rglob("*"))}
    assert {path: mode for path, mode in modes.items() if mode != (0o755 if path.is_dir() else 0o644)} == {}
    before = {path: path.lstat().st_mtime_ns for path in folder.rglob("*")}
    put_client(folder)
    assert {path: path.lstat().st_mtime_ns for path in folder.rglob("*")} == before, "a second start changes nothing"


@pytest.mark.parametrize("permissions", [0, 7], ids=["nobody", "everybody"])
def test_a_default_acl_of_the_parent_changes_no_mode(permissions: int, folder: Path) -> None:
    user, group, other = ((tag, mode, 0xFFFFFFFF) for tag, mode in ((1, 7), (4, permissions), (32, permissions)))
    acl = struct.pack("<I", 2) + b"".join(struct.pack("<HHI", *entry) for entry in (user, group, other))
    try:
        os.setxattr(folder.parent, "system.posix_acl_default", acl)
    except OSError:
        pytest.skip("the file system has no ACLs")
    put_client(folder)
    for path in (folder, *folder.rglob("*")):
        assert path.stat().st_mode & 0o777 == (0o755 if path.is_dir() else 0o644), path


def test_a_version_that_is_not_complete_is_written_again(folder: Path) -> None:
    put_client(folder)
    (version,) = versions(folder)
    (folder / version / "gpumem_client" / "api.py").unlink()
    (folder / version / "gpumem_client" / "run.py").write_text("changed")
    put_client(folder)
    for name in ("api.py", "run.py"):
        assert (folder / version / "gpumem_client" / name).read_text() == (CLIENT / "gpumem_client" / name).read_text()


def test_a_version_stays_after_it_was_replaced(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    old = put_version(folder, "1.0", monkeypatch)
    new = put_version(folder, "1.1", monkeypatch)
    assert versions(folder) == [old, new]
    assert put_version(folder, "1.0", monkeypatch) == old  # a downgrade


def test_a_write_that_fails_leaves_the_version_before_it(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    old = put_version(folder, "1.0", monkeypatch)

    def full(self: Path, data: bytes) -> int:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patched:
        patched.setattr(Path, "write_bytes", full)
        with pytest.raises(ClientDirectoryError):
            put_version(folder, "1.1", monkeypatch)
    assert (folder / "sitecustomize.py").readlink().parts[0] == old
    assert versions(folder) == [old]


@pytest.mark.parametrize(
    ("commands", "refused"),
    [
        ("mkdir client && chmod 775 client", "client/below"),
        ("mkdir real && ln -s real client", "client/below"),
        pytest.param("mkdir client && chown 1001 client", "client/below", marks=needs_root),
        pytest.param(
            # Python prefers it to a .py file.
            "mkdir -m 755 client && touch client/sitecustomize.abi3.so && chown 1001 client/sitecustomize.abi3.so",
            "client",
            marks=needs_root,
        ),
        ("mkdir -m 755 client && mkdir client/__pycache__ && chmod 775 client/__pycache__", "client"),
        ("mkdir client && touch client/sitecustomize.py", "client"),
        ("true", "client/no/parent"),
    ],
)
def test_a_folder_that_another_user_could_change_is_refused(tmp_path: Path, commands: str, refused: str) -> None:
    subprocess.run(["sh", "-ec", commands], cwd=tmp_path, check=True)
    with pytest.raises(ClientDirectoryError) as caught:
        put_client(tmp_path / refused)
    assert str(tmp_path / refused) in str(caught.value)
    assert "\n" not in str(caught.value)
    assert not any(tmp_path.rglob("gpumem_client"))


@needs_root
def test_a_folder_that_another_user_makes_first_is_refused(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder.mkdir()
    folder.chmod(0o1777)
    client = folder / "client"
    lstat, mkdir = Path.lstat, Path.mkdir

    def attack() -> None:
        if not os.path.lexists(client):
            os.mkdir(client)  # noqa: PTH102 - not the patched one
            os.chown(client, OTHER_UID, OTHER_UID)

    def lstat_then_attack(path: Path) -> os.stat_result:
        try:
            return lstat(path)
        finally:
            if path == client:
                attack()

    def attack_then_mkdir(path: Path, *args: Any, **options: Any) -> None:
        if path == client:
            attack()
        mkdir(path, *args, **options)

    monkeypatch.setattr(Path, "lstat", lstat_then_attack)
    monkeypatch.setattr(Path, "mkdir", attack_then_mkdir)
    with pytest.raises(ClientDirectoryError, match="belongs to"):
        put_client(client)
    assert list(client.iterdir()) == []


@needs_root
def test_bytecode_of_a_job_of_root_is_not_writable_for_others(folder: Path) -> None:
    put_client(folder)
    (version,) = versions(folder)
    environment = {"PYTHONPATH": f"{folder}:{folder / version}"}
    program = "import gpumem_client.reporter.reporter_settings"
    subprocess.run(
        [sys.executable, "-S", "-c", f"import sitecustomize; {program}"], env=environment, check=True, umask=0
    )
    modes = {path: path.lstat().st_mode & 0o777 for path in folder.rglob("*") if not path.is_symlink()}
    assert any(path.suffix == ".pyc" for path in modes)
    assert {path: mode for path, mode in modes.items() if mode & 0o022} == {}


@pytest.mark.parametrize(
    ("folder", "pods", "told"),
    [
        ("", False, "--client.directory"),
        ("/run/gpumem/client", False, "PYTHONPATH=/run/gpumem/client"),
        ("/run/gpumem/client", True, INJECTION_LABEL),
    ],
)
def test_processes_that_do_not_report_are_counted_with_what_to_do_on_this_node(
    folder: str, pods: bool, told: str
) -> None:
    listed = node(device(processes={1: MIB, 99: 39 * MIB}))
    if pods:
        listed = dataclasses.replace(listed, facts={99: ProcessFacts(99, 1, k8s_pod="other-0")})
    shown = Snapshot(1000.0, listed, (reporting(1),))
    (found,) = unreported(shown, jobs_of(shown), {}, client_directory=folder)
    assert found.severity == "info"
    assert found.sentence.startswith("1 of 2 processes does not report (39.0 MiB).")
    assert told in found.sentence


def test_nothing_is_found_if_every_process_reports() -> None:
    shown = Snapshot(1000.0, node(device(processes={1: MIB})), (reporting(1),))
    assert list(unreported(shown, jobs_of(shown), {}, client_directory="")) == []
