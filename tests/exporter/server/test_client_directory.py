"""`--client.directory`: what the exporter writes, and which folders it refuses."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from gpumem_exporter.server import client_directory
from gpumem_exporter.server.client_directory import KEPT_SECONDS, ClientDirectoryError, put_client
from tests.support.paths import REPOSITORY

CLIENT = REPOSITORY / "client"
OTHER_UID = 1001

needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a folder to another user")


@pytest.fixture(autouse=True)
def _umask() -> Iterator[None]:
    before = os.umask(0o077)
    yield
    os.umask(before)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "client"


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


def test_a_second_start_changes_nothing(folder: Path) -> None:
    put_client(folder)
    before = {path: path.lstat().st_mtime_ns for path in folder.rglob("*")}
    put_client(folder)
    assert {path: path.lstat().st_mtime_ns for path in folder.rglob("*")} == before


def test_a_version_that_is_not_complete_is_written_again(folder: Path) -> None:
    put_client(folder)
    (version,) = versions(folder)
    (folder / version / "gpumem_client" / "api.py").unlink()
    (folder / version / "gpumem_client" / "run.py").write_text("changed")
    put_client(folder)
    for name in ("api.py", "run.py"):
        assert (folder / version / "gpumem_client" / name).read_text() == (CLIENT / "gpumem_client" / name).read_text()


def test_a_version_stays_for_a_while_after_it_was_replaced(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    old = put_version(folder, "1.0", monkeypatch)
    long_ago = time.time() - KEPT_SECONDS - 60
    os.utime(folder / old, (long_ago, long_ago))  # it was current for a long time
    new = put_version(folder, "1.1", monkeypatch)
    assert versions(folder) == [old, new]
    os.utime(folder / old, (long_ago, long_ago))
    os.utime(folder / new, (long_ago, long_ago))
    assert put_version(folder, "1.1", monkeypatch) == new
    assert versions(folder) == [new]
    assert put_version(folder, "1.0", monkeypatch) == old  # a downgrade


def test_old_folders_of_other_programs_stay(folder: Path) -> None:
    (folder / "model-0123456789ab").mkdir(parents=True)
    folder.chmod(0o755)
    long_ago = time.time() - KEPT_SECONDS - 60
    os.utime(folder / "model-0123456789ab", (long_ago, long_ago))
    put_client(folder)
    assert (folder / "model-0123456789ab").is_dir()


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


def _writable_by_others(folder: Path) -> Path:
    folder.mkdir()
    folder.chmod(0o775)
    return folder


def _in_a_folder_writable_by_others(folder: Path) -> Path:
    _writable_by_others(folder)
    return folder / "client"


def _a_link(folder: Path) -> Path:
    (folder.parent / "real").mkdir()
    folder.symlink_to("real")
    return folder


def _below_a_link(folder: Path) -> Path:
    return _a_link(folder) / "client"


def _of_another_user(folder: Path) -> Path:
    folder.mkdir()
    os.chown(folder, OTHER_UID, OTHER_UID)
    return folder


def _in_a_folder_of_another_user(folder: Path) -> Path:
    return _of_another_user(folder) / "client"


def _with_a_file_of_another_user(folder: Path) -> Path:
    folder.mkdir(0o755)
    os.chown(_touched(folder / "sitecustomize.abi3.so"), OTHER_UID, OTHER_UID)  # Python prefers it to a .py file
    return folder


def _with_bytecode_writable_by_others(folder: Path) -> Path:
    folder.mkdir(0o755)
    _writable_by_others(folder / "__pycache__")
    return folder


def _touched(file: Path) -> Path:
    file.touch()
    return file


def _with_another_sitecustomize(folder: Path) -> Path:
    folder.mkdir()
    (folder / "sitecustomize.py").write_text("")
    return folder


def _without_a_parent(folder: Path) -> Path:
    return folder / "a" / "b"


@pytest.mark.parametrize(
    "make",
    [
        _writable_by_others,
        _in_a_folder_writable_by_others,
        _a_link,
        _below_a_link,
        pytest.param(_of_another_user, marks=needs_root),
        pytest.param(_in_a_folder_of_another_user, marks=needs_root),
        pytest.param(_with_a_file_of_another_user, marks=needs_root),
        _with_bytecode_writable_by_others,
        _with_another_sitecustomize,
        _without_a_parent,
    ],
)
def test_a_folder_that_another_user_could_change_is_refused(folder: Path, make: Callable[[Path], Path]) -> None:
    refused = make(folder)
    with pytest.raises(ClientDirectoryError) as caught:
        put_client(refused)
    assert str(refused) in str(caught.value)
    assert "\n" not in str(caught.value)
    assert not any(refused.rglob("gpumem_client"))


def test_the_sticky_folder_of_temporary_files_is_accepted(folder: Path) -> None:
    folder.mkdir()
    folder.chmod(0o1777)
    put_client(folder / "client")
    assert versions(folder / "client")


@needs_root
def test_bytecode_of_a_job_of_root_is_not_writable_for_others(folder: Path) -> None:
    put_client(folder)
    (version,) = versions(folder)
    environment = {"PYTHONPATH": f"{folder}:{folder / version}"}
    program = "import gpumem_client.reporter.settings"
    subprocess.run(
        [sys.executable, "-S", "-c", f"import sitecustomize; {program}"], env=environment, check=True, umask=0
    )
    modes = {path: path.lstat().st_mode & 0o777 for path in folder.rglob("*") if not path.is_symlink()}
    assert any(path.suffix == ".pyc" for path in modes)
    assert {path: mode for path, mode in modes.items() if mode & 0o022} == {}


@needs_root
def test_another_user_reads_the_client_and_cannot_change_it(folder: Path) -> None:
    put_client(folder)
    for parent in folder.parents[:3]:  # pytest's folders are private
        parent.chmod(0o755)
    (version,) = versions(folder)
    child = os.fork()
    if child == 0:
        os.setgid(OTHER_UID)
        os.setuid(OTHER_UID)
        try:
            assert (folder / "sitecustomize.py").read_text()
            assert not any(os.access(path, os.W_OK) for path in (folder, *folder.rglob("*")))
            (folder / version).rename(folder / "mine")
        except PermissionError:
            os._exit(0)
        finally:
            os._exit(1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
