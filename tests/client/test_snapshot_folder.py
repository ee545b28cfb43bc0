"""The folder of snapshots is private: they are pickles, so a user who changes one could run code as another user."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import pytest

from gpumem_client.allocator import snapshot_file
from gpumem_client.wire.errors import CommandRefusedError
from gpumem_client.wire.protocol import SnapshotFile


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


def test_a_folder_open_to_others_is_rejected(folder: Path) -> None:
    folder.mkdir()
    folder.chmod(0o777)
    with pytest.raises(CommandRefusedError, match=rf"{folder}.*GPUMEM_SNAPSHOT_DIR"):
        write()


def test_a_link_is_rejected(folder: Path, tmp_path: Path) -> None:
    private = tmp_path / "private"
    private.mkdir(mode=0o700)
    folder.symlink_to(private)
    with pytest.raises(CommandRefusedError, match=rf"{folder}.*GPUMEM_SNAPSHOT_DIR"):
        write()
    assert list(private.iterdir()) == []


def test_only_the_newest_files_are_kept(folder: Path) -> None:
    folder.mkdir(mode=0o700)
    for number in range(70):
        (folder / f"gpumem-{number:03}.pickle").touch()
    newest = Path(write().path)
    assert len(list(folder.iterdir())) == 64
    assert newest.exists()


def test_a_failed_write_leaves_no_file(tmp_path: Path) -> None:
    with pytest.raises(Exception, match="local object"):
        snapshot_file.write_file(tmp_path / "x.pickle", {"unpicklable": lambda: None})
    assert list(tmp_path.iterdir()) == []
