"""The folder of snapshots is private: they are pickles, so a user who changes one could run code as another user."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from gpumem_client.allocator import snapshot_file
from gpumem_client.wire.errors import CommandRefusedError
from gpumem_client.wire.protocol import SnapshotFile
from gpumem_client.wire.reason_codes import ReasonCode


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of this user among the temporary files, which does not exist yet."""
    monkeypatch.setattr(tempfile, "gettempdir", lambda: str(tmp_path))
    monkeypatch.setenv("GPUMEM_SNAPSHOT_DIR", " ")  # a blank value counts as not set
    return snapshot_file.snapshot_folder()


class Empty:
    """An allocator without memory."""

    def snapshot(self) -> dict[str, Any]:
        return {"segments": [], "device_traces": []}

    def uuid(self, index: int) -> str:
        return f"GPU-{index}"


def write() -> SnapshotFile:
    empty: Any = Empty()
    return snapshot_file.write_snapshot(empty)


def test_the_folder_is_private(folder: Path) -> None:
    assert Path(write().path).parent == folder
    assert folder.stat().st_mode & 0o777 == 0o700


@pytest.mark.parametrize("link", [False, True])
def test_a_folder_open_to_others_and_a_link_are_rejected(folder: Path, tmp_path: Path, *, link: bool) -> None:
    place = tmp_path / "private" if link else folder
    place.mkdir()
    place.chmod(0o700 if link else 0o777)
    if link:
        folder.symlink_to(place)
    with pytest.raises(CommandRefusedError, match=rf"{folder}.*GPUMEM_SNAPSHOT_DIR"):
        write()
    assert list(place.iterdir()) == []


def test_only_the_newest_files_are_kept(folder: Path) -> None:
    folder.mkdir(mode=0o700)
    for number in range(70):
        (folder / f"gpumem-{number:03}.pickle").touch()
    newest = Path(write().path)
    assert len(list(folder.iterdir())) == 64
    assert newest.exists()


def large_snapshots(folder: Path, count: int, mib: int) -> None:
    """Sparse files, the newest with the highest number."""
    folder.mkdir(mode=0o700, exist_ok=True)
    for number in range(count):
        file = folder / f"gpumem-{number:03}.pickle"
        file.touch()
        os.truncate(file, mib << 20)
        os.utime(file, (number, number))


def free_space(monkeypatch: pytest.MonkeyPatch, free_bytes: int) -> None:
    found = SimpleNamespace(f_bavail=free_bytes, f_frsize=1)
    monkeypatch.setattr(os, "statvfs", lambda _: found)


def test_all_files_together_take_at_most_two_gib(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    free_space(monkeypatch, 1 << 40)
    large_snapshots(folder, 20, mib=256)
    newest = write().path
    files = sorted(folder.iterdir(), key=lambda file: file.stat().st_mtime)
    assert sum(file.stat().st_size for file in files) <= 2 << 30
    assert [file.name for file in files] == [*(f"gpumem-{i:03}.pickle" for i in range(13, 20)), Path(newest).name]


def test_the_files_take_at_most_a_tenth_of_the_free_space(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    large_snapshots(folder, 4, mib=100)
    free_space(monkeypatch, 1600 << 20)  # and 400 of the files
    newest = write().path
    assert {file.name for file in folder.iterdir()} == {"gpumem-003.pickle", Path(newest).name}


def test_a_snapshot_that_is_too_large_is_refused(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder.mkdir(mode=0o700)
    free_space(monkeypatch, 100)
    with pytest.raises(CommandRefusedError, match="larger than 10 B") as refused:
        write()
    assert refused.value.reason_code is ReasonCode.SNAPSHOT_NOT_WRITTEN
    assert list(folder.iterdir()) == []


def test_a_failed_write_leaves_no_file(tmp_path: Path) -> None:
    with pytest.raises(Exception, match="local object"):
        snapshot_file.write_file(tmp_path / "x.pickle", {"unpicklable": lambda: None})
    assert list(tmp_path.iterdir()) == []
