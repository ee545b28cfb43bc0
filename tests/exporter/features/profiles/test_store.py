"""What stays of the profiles: in memory, in files, after a restart, and on a disk that fails."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from gpumem_exporter.core.container import HERE
from gpumem_exporter.features.profiles.profile_document import OUT_OF_MEMORY
from gpumem_exporter.features.profiles.profile_store import FOLDER_NAME, MAX_IN_MEMORY, Profiles
from gpumem_exporter.features.profiles.stored_profile import ProfileFacts
from gpumem_exporter.settings import PROFILES_SHARE
from tests.support.builders.builders import identity
from tests.support.builders.profile_documents import body, facts, profile

ADA, EVE = 1001, 1002
BODY = body(identity(7), profile())


def named(number: int, uid: int = ADA, **changes: Any) -> ProfileFacts:
    values = {"owner_uid": uid, "place": HERE, "time_unix_seconds": 1e9 + number, "size_bytes": len(BODY), **changes}
    return facts(f"{number:032x}", **values)


def numbers(profiles: Profiles) -> list[int]:
    return sorted(int(each.id, 16) for each in profiles.newest_first())


def limit(count: int) -> int:
    """Return a `--storage.max-bytes` with room for this number of profiles."""
    return PROFILES_SHARE * (count * len(BODY) + 10)


@pytest.mark.parametrize("in_files", [False, True], ids=["memory", "files"])
def test_the_share_with_the_most_loses_its_oldest(tmp_path: Path, in_files: bool) -> None:
    profiles = Profiles(tmp_path if in_files else None, max_bytes=limit(MAX_IN_MEMORY))
    profiles.put(named(1, EVE), BODY)
    for number in range(2, 9):
        profiles.put(named(number), BODY)
    assert numbers(profiles) == [1, 2, 3, 4, 5, 6, 7, 8]
    for number in range(9, 31):
        profiles.put(named(number), BODY)
    assert numbers(profiles) == [1, *range(24, 31)]
    for number in range(31, 51):
        profiles.put(named(number, EVE), BODY)
    assert numbers(profiles) == [*range(27, 31), *range(47, 51)]
    found = profiles.read(f"{50:032x}")
    assert found is not None
    assert (found.facts.owner_uid, found.profile) == (EVE, profile())
    assert profiles.read(f"{1:032x}") is None
    stored = list((tmp_path / FOLDER_NAME).iterdir()) if in_files else []
    assert len(stored) == (8 if in_files else 0)


def test_repeated_errors_of_a_process_do_not_push_out_other_profiles() -> None:
    profiles = Profiles(None, max_bytes=limit(1))
    profiles.put(named(1, session="c" * 16, cause=OUT_OF_MEMORY, oom_number=1), BODY)
    profiles.put(named(2), BODY)
    for number in range(3, 20):
        profiles.put(named(number, session="d" * 16, cause=OUT_OF_MEMORY, oom_number=number), BODY)
    assert numbers(profiles) == [1, 2, *range(14, 20)]
    for number in range(20, 27):
        profiles.put(named(number), BODY)
    assert numbers(profiles) == [19, *range(20, 27)]


def test_files_survive_a_restart_and_other_files_are_left_alone(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    first = Profiles(tmp_path, max_bytes=limit(8))
    first.put(named(1, cause=OUT_OF_MEMORY, oom_number=4), BODY)
    first.put(named(2, EVE), BODY)
    first.put(named(3), BODY)
    folder = tmp_path / FOLDER_NAME
    assert folder.stat().st_mode & 0o777 == 0o700
    assert {path.stat().st_mode & 0o777 for path in folder.iterdir()} == {0o600}
    cut_off = folder / f"{3:032x}.profile"
    cut_off.write_bytes(cut_off.read_bytes()[:-1])
    (folder / "notes.txt").write_text("not a profile")
    (folder / f"{4:032x}.profile").write_bytes(b"\x80\x04}\n" * 100)
    (folder / f"{5:032x}.profile").write_bytes((folder / f"{1:032x}.profile").read_bytes())
    (folder / f"{6:032x}.profile.new").write_bytes(b"half")
    second = Profiles(tmp_path, max_bytes=limit(8))
    second.load()
    assert numbers(second) == [1, 2]
    found = second.read(f"{1:032x}")
    assert found is not None
    assert found.facts == named(1, cause=OUT_OF_MEMORY, oom_number=4)
    of_error = second.of_error(f"uid:{ADA}", "first", 4)
    assert of_error is not None
    assert of_error.id == f"{1:032x}"
    assert second.of_error(f"uid:{EVE}", "first", 4) is None
    assert not (folder / f"{6:032x}.profile.new").exists()
    assert (folder / "notes.txt").exists()
    assert sum(record.message == "a file is not a profile" for record in caplog.records) == 4
    third = Profiles(tmp_path, max_bytes=limit(1))
    third.load()
    assert numbers(third) == [1]  # of equal shares, the one with the latest profile loses
    third.forget(f"{1:032x}")
    third.forget(f"{3:032x}")
    assert numbers(third) == []
    assert not (folder / f"{1:032x}.profile").exists()


def test_a_profile_whose_file_is_lost_is_unknown(tmp_path: Path) -> None:
    profiles = Profiles(tmp_path, max_bytes=limit(8))
    for number in (1, 2):
        profiles.put(named(number), BODY)
    (tmp_path / FOLDER_NAME / f"{1:032x}.profile").unlink()
    (tmp_path / FOLDER_NAME / f"{2:032x}.profile").write_bytes(b"{}\nanything")
    assert [profiles.read(f"{number:032x}") for number in (1, 2, 3)] == [None, None, None]
    assert numbers(profiles) == []


def test_a_short_failure_of_a_read_loses_no_profile(tmp_path: Path) -> None:
    profiles = Profiles(tmp_path, max_bytes=limit(8))
    profiles.put(named(1), BODY)
    folder = tmp_path / FOLDER_NAME
    folder.rename(tmp_path / "moved")
    folder.write_text("")  # reads fail with ENOTDIR
    assert profiles.read(f"{1:032x}") is None
    folder.unlink()
    (tmp_path / "moved").rename(folder)
    assert profiles.read(f"{1:032x}") is not None


def test_a_disk_that_fails_leaves_the_profiles_in_memory(tmp_path: Path) -> None:
    (tmp_path / FOLDER_NAME).write_text("in the way")
    profiles = Profiles(tmp_path, max_bytes=limit(100))
    profiles.load()
    for number in range(1, 11):
        profiles.put(named(number), BODY)
    assert numbers(profiles) == list(range(3, 11))
    assert profiles.read(f"{10:032x}") is not None
    (tmp_path / FOLDER_NAME).unlink()
    profiles.put(named(11), BODY)
    assert len(list((tmp_path / FOLDER_NAME).iterdir())) == 1
