"""The file of a history: restarts, gaps, damage, and versions."""

from __future__ import annotations

import logging
import sqlite3
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from pathlib import Path

import pytest

from gpumem_exporter.features.history.history_file import FILE_NAME, HistoryFile
from tests.support.builders.builders import UUIDS, node, reporting, sample
from tests.support.builders.history_bench import HistoryBench, used
from tests.support.waiting import patient, wait_for

READING = node(used(100, p7=50))
JOB = reporting(7, owner_uid=1000, devices=(sample(),))


@pytest.fixture
def bench(tmp_path: Path) -> HistoryBench:
    """Ten minutes and five seconds of a device and a job, saved."""
    bench = HistoryBench()
    bench.run(605, JOB, reading=READING)
    HistoryFile(bench.history, tmp_path / "new").save()
    return bench


def restarted(bench: HistoryBench, folder: Path) -> HistoryBench:
    bench.again()
    HistoryFile(bench.history, folder / "new").load()
    return bench


def test_a_restart_loses_nothing(bench: HistoryBench, tmp_path: Path) -> None:
    names = [(points, of) for points in (600, 60, 10) for of in (None, ())]
    before = [bench.document(600, points=points, uuids=of) for points, of in names]
    after = restarted(bench, tmp_path)
    assert [after.document(600, points=points, uuids=of) for points, of in names] == before
    assert [path.name for path in (tmp_path / "new").iterdir()] == [FILE_NAME]
    assert (tmp_path / "new" / FILE_NAME).stat().st_mode & 0o777 == 0o600


def test_a_file_in_the_order_of_steps_is_read(bench: HistoryBench, tmp_path: Path) -> None:
    """The first files of this version have another order."""
    before = bench.document(600)
    with sqlite3.connect(tmp_path / "new" / FILE_NAME) as file:
        (schema,) = file.execute("SELECT sql FROM sqlite_master WHERE name = 'points'").fetchone()
        file.execute("ALTER TABLE points RENAME TO other")
        file.execute(schema.replace("(subject, step, time)", "(step, time, subject)"))
        file.execute("INSERT INTO points SELECT * FROM other")
        file.execute("DROP TABLE other")
    file.close()
    assert restarted(bench, tmp_path).document(600) == before


def test_the_time_without_an_exporter_is_a_gap(bench: HistoryBench, tmp_path: Path) -> None:
    bench.seconds += 180
    bench.booted -= 3000  # with the machine
    bench.again()
    bench.run(3, JOB, reading=READING)  # before the file has been read
    HistoryFile(bench.history, tmp_path / "new").load()
    bench.run(7, JOB, reading=READING)
    shown = bench.values("used", seconds=300)
    assert {age for age, value in shown.items() if value is None} == {age for age in shown if 10 <= age < 190}
    assert set(shown.values()) == {100, None}
    minutes = bench.values("used", seconds=600, points=10)
    assert [value is None for value in minutes.values()].count(True) == 2
    assert len(bench.history.minima(JOB.part(UUIDS[0]))) == 11


def test_a_file_that_is_ahead_of_the_clock_waits_for_an_hour(
    bench: HistoryBench, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = bench.values("used", seconds=600)
    bench.jumped = -300.0
    bench.again()
    file = HistoryFile(bench.history, tmp_path / "new")
    with pytest.raises(OSError, match="clock"):
        file.load()
    bench.jumped = 0.0
    file.load()
    assert bench.values("used", seconds=600) == before
    bench.jumped = -300.0
    bench.again()
    file = HistoryFile(bench.history, tmp_path / "new")
    late = time.monotonic() + 3600.0
    monkeypatch.setattr(time, "monotonic", lambda: late)
    file.load()
    bench.run(10, reading=READING)
    shown = bench.values("used", seconds=600)
    assert {age for age, value in shown.items() if value is not None and age > 0} == set(range(1, 315))
    assert len(bench.document(86400, points=2000)["series"]) == 1


def test_a_shorter_retention_drops_older_rows(tmp_path: Path) -> None:
    bench = HistoryBench()
    bench.run(7200, step=30)
    HistoryFile(bench.history, tmp_path / "new").save()
    bench.retention_seconds = 600
    restarted(bench, tmp_path)
    assert bench.document(7200, points=2000)["from_unix_seconds"] >= bench.unix_seconds - 660
    assert bench.history.size_bytes < 40_000


@pytest.mark.parametrize(
    "spoil",
    [
        lambda content: content[: len(content) // 2],
        lambda content: content[:4096] + bytes(len(content) - 4096),
        lambda content: content[:60] + b"\0\0\0\3" + content[64:],  # of a later version
        lambda _: 9999 * b"x",
    ],
)
def test_a_file_that_cannot_be_read_is_a_warning(
    bench: HistoryBench, tmp_path: Path, spoil: Callable[[bytes], bytes], caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "new" / FILE_NAME
    changed = spoil(path.read_bytes())
    path.write_bytes(changed)
    restarted(bench, tmp_path)
    bench.run(5, reading=READING)
    values = list(bench.values("used", seconds=600).values())
    assert values[-5:] == [100] * 5
    assert set(values[:-5]) == {None}, "no row of a damaged file"
    assert [record.levelno for record in caplog.records] == [logging.WARNING]
    assert path.with_name(FILE_NAME + ".unreadable").read_bytes() == changed
    HistoryFile(bench.history, tmp_path / "new").save()
    assert restarted(bench, tmp_path).document(5)["series"]


def test_a_damaged_text_does_not_stop_the_file(bench: HistoryBench, tmp_path: Path) -> None:
    with sqlite3.connect(tmp_path / "new" / FILE_NAME) as file:
        file.execute("UPDATE subjects SET command = CAST(x'ff' AS TEXT)")
    file.close()
    after = restarted(bench, tmp_path)
    assert after.document(600)["series"][0]["used"]["max"][-1] is not None


def test_a_failed_save_keeps_the_file(bench: HistoryBench, tmp_path: Path) -> None:
    folder = tmp_path / "new"
    before = (folder / FILE_NAME).read_bytes()
    (folder / f"{FILE_NAME}.new").mkdir()
    with pytest.raises(OSError, match="directory"):
        HistoryFile(bench.history, folder).save()
    assert (folder / FILE_NAME).read_bytes() == before
    (tmp_path / "file").touch()
    with pytest.raises(OSError, match="exists"):
        HistoryFile(bench.history, tmp_path / "file").save()


@contextmanager
def failed_load(bench: HistoryBench, path: Path, caplog: pytest.LogCaptureFixture) -> Iterator[HistoryFile]:
    """Yield a started file that another connection has locked, after its first load has failed; then unlock it."""
    bench.again()
    file = HistoryFile(bench.history, path.parent)
    with closing(sqlite3.connect(path, isolation_level=None)) as other:
        other.execute("BEGIN EXCLUSIVE")
        file.start()
        wait_for(lambda: "cannot be read" in caplog.text, "the load to fail")
        yield file


def test_a_locked_file_is_kept(bench: HistoryBench, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    before = bench.values("used", seconds=600)
    with failed_load(bench, tmp_path / "new" / FILE_NAME, caplog) as file:
        file.stop(patient(5.0))
    assert restarted(bench, tmp_path).values("used", seconds=600) == before


def test_an_exit_saves_after_a_late_load(bench: HistoryBench, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with failed_load(bench, tmp_path / "new" / FILE_NAME, caplog) as file:
        pass
    bench.run(5, JOB, reading=READING)
    file.stop(patient(5.0))
    assert set(restarted(bench, tmp_path).values("used", seconds=600).values()) == {100}


def test_a_disk_that_hangs_at_the_end_delays_it_by_the_timeout_only(
    bench: HistoryBench, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    released = threading.Event()
    file = HistoryFile(bench.history, tmp_path / "hanging")
    monkeypatch.setattr(Path, "touch", lambda *_, **__: released.wait(10))
    file.start()
    file.stop(0.1)
    bench.run(2, JOB, reading=READING)
    assert bench.values("used", seconds=2) == {1.0: 100, 0.0: 100}
    released.set()
