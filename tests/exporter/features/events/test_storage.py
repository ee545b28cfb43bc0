"""The storage of events: queries, duplicates, limits, and errors of the disk."""

from __future__ import annotations

import contextlib
import json
import sqlite3
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest

from gpumem_client.wire.errors import StorageError
from gpumem_exporter.core.event import EVENT_TYPES, Event, Page, Query
from gpumem_exporter.features.events import event_storage
from gpumem_exporter.features.events.event_storage import FILE_NAME, MEMORY_BYTES, Storage
from tests.support.builders.builders import UUIDS
from tests.support.paths import REPOSITORY

DAY = 86400.0


class Bench:
    """A storage with a clock that only the test advances."""

    def __init__(self, folder: Path | None, **options: Any) -> None:
        self.now = 1.7e9
        self.jumped = 0.0
        """How far the wall clock has jumped ahead."""
        self.folder = folder
        self.options = {"retention_seconds": 7 * DAY, "max_bytes": 64 << 20, **options}
        self.again()

    def again(self) -> None:
        """Replace the storage by another one on the same folder."""
        self.storage = Storage(
            self.folder, wall_clock=lambda: self.now + self.jumped, clock=lambda: self.now - 1.6e9, **self.options
        )

    def put(self, *numbers: int, **changes: Any) -> None:
        self.storage.append([oom(number, **{"time_unix_seconds": self.now, **changes}) for number in numbers])

    def page(self, **conditions: Any) -> Page:
        return self.storage.read(Query(**conditions))

    def numbers(self, **conditions: Any) -> list[int]:
        return [event.detail["number"] for event in self.page(**conditions).events]


def oom(number: int, **changes: Any) -> Event:
    return Event(**{"type": "oom", "time_unix_seconds": 0.0, "detail": {"number": number}, **changes})


@pytest.fixture(params=["memory", "file"])
def bench(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Bench]:
    bench = Bench(None if request.param == "memory" else tmp_path / "not" / "yet")
    yield bench
    bench.storage.close()


@pytest.fixture
def on_disk(tmp_path: Path) -> Iterator[Bench]:
    bench = Bench(tmp_path)
    yield bench
    bench.storage.close()


def test_a_stored_event_is_read_unchanged(bench: Bench) -> None:
    event = Event(
        "oom", 1.5, gpu="0", uuid="GPU-1", pid=7, workload='a "b"', rank="", detail={"deep": [{"x": None}, 2**62]}
    )
    bench.storage.append([event, Event("action", 2.0), Event("oom", 3.0, pid="1@4026532007")])
    first, second, third = bench.page(since_unix_seconds=0).events
    assert first == Event(**{name: getattr(event, name) for name in Event.__slots__ if name != "id"}, id=first.id)
    assert (second.gpu, second.uuid, second.pid, second.workload, second.rank) == (None,) * 5
    assert third.pid == "1@4026532007"


def test_a_query_returns_the_events_that_meet_all_conditions(bench: Bench) -> None:
    results = [{"pid": 7, "uuid": "GPU-0"}, {"pid": "1@5", "uuid": "GPU-1"}]
    bench.put(0, pid=7)
    bench.now += 10
    bench.put(1, type="device_lost", pid=8, uuid="GPU-1")
    bench.put(2, type="action", detail={"number": 2, "results": results})
    bench.put(3, pid=7, uuid="GPU-0", detail={"number": 3, "slurm_job_id": "7"})
    bench.put(4, type="process_ended", detail={"number": 4, "devices": [{"uuid": "GPU-1"}], "slurm_job_id": "7"})
    bench.put(5, type="process_ended", detail={"number": 5, "ray_job_id": "7"})
    assert bench.numbers(pid="7") == [0, 2, 3]
    assert bench.numbers(pid="1@5") == [2]
    assert bench.numbers(pid="7", types=("oom",)) == [0, 3]
    assert bench.numbers(pid="7", types=("oom", "action"), since_unix_seconds=bench.now) == [2, 3]
    assert bench.numbers(pid="9") == []
    assert bench.numbers(device="GPU-1", after=0) == [1, 2, 4]
    assert bench.numbers(job_id="7", after=0) == [4, 5]


def test_a_page_has_a_maximum_size_and_the_next_one_continues(bench: Bench) -> None:
    bench.storage.append(
        [oom(n, time_unix_seconds=bench.now, detail={"number": n, "x": "y" * 50_000}) for n in range(29)]
    )
    page = bench.page(after=0)
    assert page.more
    assert 1 <= len(page.events) < 29
    assert bench.numbers(after=page.next_after, limit=1) == [len(page.events)]


def test_the_newest_event_of_each_process_and_device_is_read_page_by_page(bench: Bench) -> None:
    bench.put(0, uuid="a", pid=9)
    bench.now += 100
    for number, (uuid, pid) in enumerate([("a", 1), ("b", 1), ("a", "1@5"), ("a", 1), ("a", 2)]):
        bench.put(number, uuid=uuid, pid=pid)
    bench.put(5, type="process_ended", uuid="a", pid=1)
    query = {"since_unix_seconds": bench.now, "types": ("oom",), "newest_of_each": True, "limit": 3}
    first = bench.page(**query)
    rest = bench.page(**query, after=first.next_after)
    assert (first.more, rest.more) == (True, False)
    assert [event.detail["number"] for event in (*first.events, *rest.events)] == [1, 2, 3, 4]


def test_a_duplicate_event_is_not_stored(bench: Bench) -> None:
    bench.put(1, subject="oom:a:1")
    bench.put(1, 2, subject="oom:a:1")
    assert bench.numbers() == [1]
    bench.put(3, subject="p", type="process_started")
    bench.put(4, subject="p", type="process_started")
    bench.put(5, subject="p", type="process_ended")
    bench.put(6, subject="p", type="process_started")
    assert bench.numbers() == [1, 3, 5, 6]


def test_an_event_with_only_after_is_stored_only_after_that_type(bench: Bench) -> None:
    returned = {"subject": "d", "type": "device_returned", "only_after": "device_lost"}
    bench.put(1, **returned)
    assert bench.numbers() == []
    bench.put(2, subject="d", type="device_lost")
    bench.put(3, **returned)
    bench.put(4, **returned)
    assert bench.numbers() == [2, 3]


def test_the_retention_time_is_the_running_time_whatever_the_wall_clock_shows(tmp_path: Path) -> None:
    bench = Bench(tmp_path)
    bench.put(1)
    bench.now += DAY
    bench.put(2)
    bench.jumped = 40 * DAY
    bench.put(3, time_unix_seconds=bench.now + bench.jumped)
    bench.storage.close()
    bench.now += 30 * DAY
    bench.again()
    bench.storage.append(())
    assert bench.numbers() == [1, 2, 3]
    bench.jumped = 0.0
    bench.put(4)
    bench.now += 6.5 * DAY
    bench.storage.append(())
    assert bench.numbers() == [2, 3, 4]
    bench.now += DAY
    bench.storage.append(())
    assert bench.numbers() == []
    bench.storage.close()


@pytest.mark.parametrize("damaged", ["{", "[" * 100_000])
def test_a_file_of_an_earlier_version_is_taken_over(tmp_path: Path, damaged: str) -> None:
    with contextlib.closing(sqlite3.connect(tmp_path / FILE_NAME)) as connection:
        connection.executescript((REPOSITORY / "tests" / "data" / "events_0_3.sql").read_text())
        connection.execute("UPDATE events SET detail = ? WHERE id = 1700000040001", (damaged,))
        connection.commit()
        before = connection.execute("SELECT id, type, detail, owner, job FROM events ORDER BY id").fetchall()
    bench = Bench(tmp_path)

    def found(types: tuple[str, ...] = EVENT_TYPES, **about: Any) -> list[int]:
        return [event.id - 1_700_000_000_000 for event in bench.page(after=0, types=types, **about).events]

    for _ in range(2):
        events = bench.page(after=0, types=(*EVENT_TYPES, "action_asked")).events
        kept = [(each.id, each.type, json.dumps(each.detail), each.owner, each.job) for each in events]
        assert kept == [(*row[:2], "{}" if row[2] == damaged else row[2], *row[3:]) for row in before]
        assert found(pid="7") == [0, 30000, 30001, 35001, 35003, 45000]
        assert found(pid="5@77:1003") == [3, 35002, 45003]
        assert found(device=UUIDS[1]) == [1, 2, 35001, 40000, 40001, 45001, 45002]
        assert found(job="llm") == found(job="llm~1") == [0, 1, 30000, 30001, 35001, 35003, 45000, 45001]
        assert found(job="4712~1") == [2, 35004, 45002]
        assert found(job_id="4711") == found(job_id="llm") == found(uid=1001) == [45000, 45001]
        assert (found(job_id="02000000"), found(job_id="4712")) == ([45002], [])
        bench.put(1, subject="process:s7", type="process_ended")
        assert found(subject="process:s7") == [0, 45000], "a duplicate"
        bench.storage.close()
        bench.again()
    bench.storage.append(())
    bench.now += 7 * DAY - 8
    bench.storage.append(())
    assert found() == [40000, 40001, 45000, 45001, 45002, 45003], "they expire as before"
    bench.now += DAY
    bench.storage.append(())
    bench.storage.close()
    with contextlib.closing(sqlite3.connect(tmp_path / FILE_NAME)) as connection:
        assert connection.execute("SELECT count(*) FROM about").fetchone() == (0,)


def test_what_an_earlier_version_has_changed_meanwhile_is_found(tmp_path: Path) -> None:
    bench = Bench(tmp_path)
    for number in (1, 2):
        bench.put(number, pid=number)
    bench.storage.close()
    with contextlib.closing(sqlite3.connect(tmp_path / FILE_NAME)) as connection:
        connection.executescript("""
            CREATE TABLE places (event INTEGER);
            CREATE TRIGGER event_stored AFTER INSERT ON events BEGIN INSERT INTO places VALUES (new.id); END;
            DELETE FROM events WHERE pid = '1';
            INSERT INTO events (id, type, time, pid, detail) SELECT id + 1, type, time, '3', detail FROM events;
        """)
    bench.again()
    assert [len(bench.page(after=0, pid=pid).events) for pid in ("1", "2", "3")] == [0, 1, 1]
    bench.put(4, pid=4)
    bench.storage.close()


def test_a_full_file_of_an_earlier_version_stays_within_its_limit(tmp_path: Path) -> None:
    bench = Bench(tmp_path, max_bytes=4 << 20)
    parts = [{"pid": pid, "uuid": f"GPU-{pid}"} for pid in range(20)]
    bench.put(0, owner="uid:1", pid=1)
    bench.put(1, owner="uid:2", pid=2, job="llm~1", detail={"number": 1, "devices": parts})
    bench.storage.close()
    with contextlib.closing(sqlite3.connect(tmp_path / FILE_NAME)) as connection:
        connection.executescript("""
            DROP TABLE about;
            WITH RECURSIVE numbers (n) AS (SELECT 1 UNION ALL SELECT n + 1 FROM numbers WHERE n < 2450)
            INSERT INTO events SELECT id + n, type, time, gpu, uuid, pid, workload, rank, detail, subject, owner,
                stored, job FROM events, numbers WHERE owner = 'uid:2';
        """)
        (pages,) = connection.execute("PRAGMA page_count").fetchone()
        assert 1.5 < pages * 4096 / (1 << 20) < 2, "full"
    bench.again()
    assert bench.numbers(owner="uid:1") == [0], "the owner with the most makes room"
    assert len(bench.page(after=0, limit=10, pid="19").events) == 10
    assert sum(path.stat().st_size for path in tmp_path.iterdir()) <= 4 << 20
    bench.storage.close()


def test_an_unexpected_error_while_the_file_is_opened_deletes_no_event(
    on_disk: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    on_disk.put(*range(5))
    on_disk.storage.close()
    with sqlite3.connect(on_disk.folder / FILE_NAME) as connection:  # type: ignore[operator]
        connection.execute("DELETE FROM about")
    connection.close()
    on_disk.now += 8 * DAY  # while no exporter ran
    on_disk.again()
    with monkeypatch.context() as patched:
        patched.setattr(event_storage, "_names", Mock(side_effect=MemoryError))
        for _ in range(2):
            with pytest.raises(MemoryError):
                on_disk.put(5)
    on_disk.put(6)
    assert on_disk.numbers() == [*range(5), 6]


def test_a_damaged_text_is_read_as_far_as_possible(bench: Bench) -> None:
    bench.put(1, 2)
    assert bench.storage._connection is not None
    bench.storage._connection.execute("UPDATE events SET workload = CAST(x'61ff' AS TEXT) WHERE id % 2")
    assert bench.numbers() == [1, 2]
    assert {event.workload for event in bench.page().events} == {"a\ufffd", None}


def test_sqlite_creates_no_temporary_file(bench: Bench) -> None:
    bench.storage.append(())
    assert bench.storage._connection is not None
    (place,) = bench.storage._connection.execute("PRAGMA temp_store").fetchone()
    assert place == 2, "in memory: a container with a read-only root has no folder for temporary files"


def test_the_owner_with_the_most_events_loses_its_oldest_first_also_after_a_restart(tmp_path: Path) -> None:
    bench = Bench(tmp_path, max_bytes=8 << 20)
    for number in range(20):
        bench.put(number, type="action_asked", owner="uid:0", detail={"number": number, "x": "y" * 1000})
    bench.put(100, owner="uid:1001")
    bench.storage.close()
    bench.again()
    for batch in range(80):
        flood = {"owner": "uid:1002", "detail": {"number": 1000 + batch, "x": "y" * 20_000}}
        bench.put(*range(5), **flood)
        bench.put(*range(5), type="action", **flood)
    assert bench.numbers(types=("action_asked",), after=0) == list(range(20))
    kept = bench.numbers(types=("oom",), after=0, limit=1000)
    assert kept[0] == 100
    assert 1000 not in kept
    assert bench.numbers(types=("oom",))[-1] == 1079
    assert sum(path.stat().st_size for path in tmp_path.iterdir()) <= 8 << 20
    bench.storage.close()


def test_an_event_has_at_most_64_kib_and_names_the_number_of_items_that_are_left_out(bench: Bench) -> None:
    rows = [{"pid": number, "reason": "x" * 400} for number in range(512)]
    bench.storage.append([Event("action", bench.now, detail={"results": rows, "results_left_out": 7, "few": [1]})])
    (event,) = bench.page().events
    kept = event.detail["results"]
    assert kept == rows[: len(kept)]
    assert 32 << 10 < len(str(kept)) < 64 << 10
    assert event.detail["results_left_out"] == 7 + len(rows) - len(kept)
    assert event.detail["few"] == [1]
    assert bench.storage.append([Event("action", bench.now, detail={"x": "y" * (64 << 10)})]) == [None]


def test_an_invalid_name_is_stored_as_far_as_possible(bench: Bench) -> None:
    bench.put(1, workload="caf\udce9", subject="\udce9")
    (event,) = bench.page().events
    assert event.workload == "caf?"


@pytest.mark.parametrize(("kept", "flood"), [("action", "oom"), ("oom", "action_asked")])
def test_a_flood_of_one_kind_deletes_its_own_oldest_events_and_not_the_other(kept: str, flood: str) -> None:
    bench = Bench(None)
    bench.put(1, type=kept)
    for batch in range(120):
        bench.put(*range(10), type=flood, detail={"number": batch, "x": "y" * 20_000})
    assert bench.numbers(types=(kept,)) == [1]
    assert 0 < bench.numbers(types=(flood,), after=0)[0] < bench.numbers(types=(flood,))[-1] == 119
    assert bench.storage._connection is not None
    (pages,) = bench.storage._connection.execute("PRAGMA page_count").fetchone()
    assert 4 << 20 < pages * 4096 <= MEMORY_BYTES
    bench.storage.close()


def test_many_large_events_in_one_commit_push_out_no_other_owner() -> None:
    bench = Bench(None)
    for number in range(50):
        bench.put(number, owner=f"uid:{number}")
        bench.put(number, owner=f"uid:{number}", type="action")
    results = [{"pid": pid, "uuid": UUIDS[0]} for pid in range(400)]
    bench.put(*range(100, 356), owner="uid:1001", detail={"number": 1000, "results": results})
    assert bench.numbers(types=("action",)) == [*range(50)]
    kept = bench.numbers(types=("oom",), after=0, limit=1000)
    assert kept[:50] == [*range(50)]
    assert 50 < len(kept) < 306
    assert bench.storage._connection is not None
    (pages,) = bench.storage._connection.execute("PRAGMA page_count").fetchone()
    assert pages * 4096 <= MEMORY_BYTES
    bench.storage.close()


def test_the_files_are_readable_for_their_owner_alone(tmp_path: Path) -> None:
    (tmp_path / FILE_NAME).touch(0o644)
    for folder in (tmp_path / "new", tmp_path):
        bench = Bench(folder)
        bench.put(1)
        assert {path.stat().st_mode & 0o777 for path in folder.iterdir() if path.is_file()} == {0o600}
        assert folder == tmp_path or folder.stat().st_mode & 0o777 == 0o700
        bench.storage.close()


def test_ids_increase_over_a_restart_with_and_without_a_file(tmp_path: Path) -> None:
    for folder in (None, tmp_path):
        bench = Bench(folder)
        bench.put(*range(100))
        (last,) = bench.page(limit=1).events
        bench.storage.close()
        bench.now += 1
        bench.again()
        bench.put(100)
        bench.now -= 3600  # the clock is set back
        bench.put(101)
        assert bench.numbers(after=last.id) == [100, 101]
        bench.storage.close()


@pytest.mark.parametrize("damage", [b"this is no database" * 500, None], ids=["overwritten", "one page overwritten"])
def test_a_damaged_file_is_not_changed_and_can_be_moved_away(
    on_disk: Bench, tmp_path: Path, damage: bytes | None
) -> None:
    bench = on_disk
    bench.put(*range(200))
    bench.storage.close()
    file = tmp_path / FILE_NAME
    content = bytearray(file.read_bytes())
    content[4096:8192] = b"\xff" * 4096
    file.write_bytes(damage or content)
    bench.again()
    with pytest.raises(StorageError, match="damaged"):
        bench.put(1000)
    assert file.read_bytes() == (damage or content)
    file.rename(tmp_path / "moved")
    bench.put(1000)
    assert bench.numbers() == [1000]


@pytest.mark.parametrize("statement", ["PRAGMA user_version = 99", "CREATE TABLE events (id INTEGER PRIMARY KEY)"])
def test_a_file_of_another_version_is_not_changed(on_disk: Bench, tmp_path: Path, statement: str) -> None:
    with sqlite3.connect(tmp_path / FILE_NAME) as connection:
        connection.execute(statement)
    connection.close()
    with pytest.raises(StorageError, match=r"\bversion\b"):
        on_disk.put(1)
    assert sorted(path.name for path in tmp_path.iterdir()) == [FILE_NAME]


def test_events_about_a_job_are_found_by_its_id_and_by_its_workload(bench: Bench) -> None:
    ada, eve = {"job": "llm~aa", "workload": "llm"}, {"job": "llm~ee", "workload": "llm"}
    bench.put(1, type="process_started", pid=7, **ada)
    bench.put(2, type="process_started", pid=8, **eve)
    bench.put(3, type="process_started", pid=9, job="pid~9", workload="")
    for number, pids in ((4, [7]), (5, [8]), (6, [9])):
        results = [{"pid": pid, "workload": "" if pid == 9 else "llm"} for pid in pids]
        bench.put(number, type="action", workload=None, detail={"number": number, "results": results})
    bench.put(7, type="policy_stopped", pid=8, workload=None)
    assert bench.numbers(job="llm~aa", after=0) == [1, 4]
    assert bench.numbers(job="llm~ee", after=0) == [2, 5, 7]
    assert bench.numbers(job="pid~9", after=0) == [3, 6]
    assert bench.numbers(job="llm", after=0) == [1, 2, 4, 5]


def test_no_owner_hides_the_processes_of_a_job(bench: Bench) -> None:
    """A page has the caller's own first, then one of each other owner in turn."""

    def ended(number: int, owner: str, uid: int) -> Event:
        detail = {"slurm_job_id": "4711", "ray_job_id": None, "uid": uid, "number": number}
        return Event("process_ended", bench.now, pid=number, owner=owner, detail=detail)

    claims = [ended(number, "uid:1001", 1001) for number in range(600)]
    bench.storage.append([*claims, ended(600, "uid:1002", 1002), ended(601, "uid:0", 0), ended(602, "uid:1002", 1002)])
    job: dict[str, Any] = {"after": 0, "types": ("process_ended",), "job_id": "4711", "limit": 4}
    assert bench.numbers(**job, first_owner="uid:1002") == [600, 602, 0, 601]
    assert bench.numbers(**job, first_owner="uid:1002", skip=4) == [1, 2, 3, 4]
    assert bench.numbers(**job, first_owner="uid:7", uid=1002) == [600, 602]
    assert bench.numbers(**job, first_owner="uid:7", uid=0) == [601]
    assert bench.numbers(**job, first_owner="uid:7", owner="uid:0") == [601]
