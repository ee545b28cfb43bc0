"""The file of a history: restarts, gaps, damage, and versions."""

from __future__ import annotations

import gzip
import json
import logging
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from gpumem_exporter.core.samples import ReportingProcess
from gpumem_exporter.features.history.history_file import FILE_NAME, HistoryFile
from tests.support.builders import MIB, UUIDS, node, reporting, sample
from tests.support.history_bench import HistoryBench, used

READING = node(used(100, p7=50))
JOB = reporting(7, owner_uid=1000, devices=(sample(),))


@pytest.fixture(scope="module")
def of_ten_minutes() -> HistoryBench:
    """Ten minutes and five seconds of a device and a job."""
    bench = HistoryBench()
    bench.run(605, JOB, reading=READING)
    return bench


@pytest.fixture
def bench(of_ten_minutes: HistoryBench, tmp_path: Path) -> HistoryBench:
    """The same, saved."""
    bench = HistoryBench(seconds=of_ten_minutes.seconds)
    bench.history.restore(of_ten_minutes.history.saved())
    bench.history.restore_minima(of_ten_minutes.history.saved_minima())
    HistoryFile(tmp_path / "new").save(bench.history)
    return bench


def restarted(bench: HistoryBench, folder: Path, *, after_seconds: float = 0.0) -> HistoryBench:
    bench.seconds += after_seconds
    bench.again()
    HistoryFile(folder / "new").load(bench.history)
    return bench


def test_a_restart_loses_nothing(of_ten_minutes: HistoryBench, bench: HistoryBench, tmp_path: Path) -> None:
    names = [(points, of) for points in (600, 60, 10) for of in (None, ())]
    before = [of_ten_minutes.document(605 - 5, points=points, uuids=of) for points, of in names]
    after = restarted(bench, tmp_path)
    assert [after.document(605 - 5, points=points, uuids=of) for points, of in names] == before
    assert (tmp_path / "new" / FILE_NAME).stat().st_mode & 0o777 == 0o600


def test_the_peak_of_a_cache_survives_a_restart_and_the_time_without_an_exporter_is_not_known(tmp_path: Path) -> None:
    bench = HistoryBench()

    def serving(used: int) -> ReportingProcess:
        taken = replace(sample(UUIDS[0], 3 * MIB), kv_cache_bytes={"used": used * MIB})
        return reporting(7, owner_uid=1000, devices=(taken,))

    bench.run(600, serving(3))
    HistoryFile(tmp_path / "new").save(bench.history)
    restarted(bench, tmp_path, after_seconds=1200)
    bench.run(60, serving(1))
    (peaks,) = bench.history.kv_cache_peaks.values()
    assert peaks["24h"].used_bytes == 3 * MIB
    assert 600 <= peaks["24h"].observed_seconds <= 720


def test_a_clock_that_is_behind_at_the_start_loses_no_history(bench: HistoryBench, tmp_path: Path) -> None:
    before = bench.values("used", seconds=300)
    bench.jumped = -300.0
    bench.again()
    file = HistoryFile(tmp_path / "new")
    bench.run(2, JOB, reading=READING)
    assert not file.load(bench.history)
    bench.jumped = 0.0
    bench.run(2, JOB, reading=READING)
    assert file.load(bench.history)
    after = bench.values("used", seconds=300)
    assert {age: value for age, value in after.items() if age > 8} == {
        age: value for age, value in before.items() if age > 8
    }


@pytest.mark.parametrize("booted", [5000.0, 3.0])
def test_the_time_without_an_exporter_is_a_gap(bench: HistoryBench, tmp_path: Path, booted: float) -> None:
    bench.seconds += 180
    bench.booted = booted - bench.seconds if booted == 3.0 else booted
    bench.again()
    bench.run(3, JOB, reading=READING)  # before the file has been read
    HistoryFile(tmp_path / "new").load(bench.history)
    bench.run(7, JOB, reading=READING)
    shown = bench.values("used", seconds=300)
    assert {age for age, value in shown.items() if value is None} == {age for age in shown if 10 <= age < 190}
    assert set(shown.values()) == {100, None}
    minutes = bench.values("used", seconds=600, points=10)
    assert [value is None for value in minutes.values()].count(True) == 2
    assert len(bench.history.minima(JOB.part(UUIDS[0]))) == 11


def test_rows_of_a_clock_that_was_ahead_are_dropped_in_the_end(bench: HistoryBench, tmp_path: Path) -> None:
    bench.jumped = -300.0
    bench.again()
    assert HistoryFile(tmp_path / "new").load(bench.history, wait_for_clock=False)
    bench.run(10, reading=READING)
    ends = bench.document(600)["unix_seconds"]
    assert ends == sorted(set(ends))
    assert list(bench.values("used", seconds=600).values()).count(None) < 300
    assert len(bench.document(86400, points=2000)["series"]) == 1


def test_a_clock_step_before_the_restart_does_not_move_rows(bench: HistoryBench, tmp_path: Path) -> None:
    bench.jumped = 7200.0
    bench.run(20, JOB, reading=READING)
    HistoryFile(tmp_path / "new").save(bench.history)
    before = bench.values("used", seconds=120)
    assert restarted(bench, tmp_path).values("used", seconds=120) == before


def test_a_shorter_retention_drops_older_rows(tmp_path: Path) -> None:
    bench = HistoryBench()
    bench.run(7200, step=5)
    HistoryFile(tmp_path / "new").save(bench.history)
    bench.retention_seconds = 600
    restarted(bench, tmp_path)
    assert bench.document(7200, points=2000)["from_unix_seconds"] >= bench.unix_seconds - 660
    assert bench.history.size_bytes < 20_000


def cut(content: bytes) -> bytes:
    return content[: len(content) // 2]


def flipped(content: bytes) -> bytes:
    middle = len(content) // 2
    return content[:middle] + bytes([content[middle] ^ 0xFF]) + content[middle + 1 :]


def of_later_version(content: bytes) -> bytes:
    first, _, rest = gzip.decompress(content).partition(b"\n")
    return gzip.compress(json.dumps({**json.loads(first), "version": 2}).encode() + b"\n" + rest)


def with_other_tracks(content: bytes) -> bytes:
    first, _, rest = gzip.decompress(content).partition(b"\n")
    series, _, rows = rest.partition(b"\n")
    changed = json.loads(series)
    changed["tracks"] = changed["tracks"][:1]
    return gzip.compress(first + b"\n" + json.dumps(changed).encode() + b"\n" + rows)


def huge(content: bytes) -> bytes:
    first, _, rest = gzip.decompress(content).partition(b"\n")
    changed = json.loads(rest.partition(b"\n")[0])
    changed["tracks"] = [[0, 1 << 40]] * 3
    return gzip.compress(first + b"\n" + json.dumps(changed).encode() + b"\n")


@pytest.mark.parametrize(
    "change",
    [
        cut,
        flipped,
        of_later_version,
        with_other_tracks,
        huge,
        lambda _: b"",
        lambda _: gzip.compress(b"[]\n"),
        lambda content: gzip.compress(gzip.decompress(content)[:-3]),
        lambda content: gzip.compress(gzip.decompress(content) + b'{"subject": [1], "tracks": [["a", null]]}\n'),
    ],
)
def test_a_file_that_cannot_be_read_is_a_warning(
    bench: HistoryBench, tmp_path: Path, change: Callable[[bytes], bytes], caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "new" / FILE_NAME
    path.write_bytes(changed := change(path.read_bytes()))
    restarted(bench, tmp_path)
    bench.run(5, reading=READING)
    assert list(bench.values("used", seconds=600).values())[-5:] == [100] * 5
    if change in (cut, flipped):
        assert set(list(bench.values("used", seconds=600).values())[:-5]) == {None}, "no row of a damaged file"
    assert [record.levelno for record in caplog.records] == [logging.WARNING]
    assert path.with_name(FILE_NAME + ".unreadable").read_bytes() == changed
    HistoryFile(tmp_path / "new").save(bench.history)
    assert restarted(bench, tmp_path).document(5)["series"]


def test_a_failed_save_keeps_the_previous_file(
    bench: HistoryBench, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder = tmp_path / "new"
    before = (folder / FILE_NAME).read_bytes()
    (folder / (FILE_NAME + ".new")).mkdir()
    with pytest.raises(OSError, match="directory"):
        HistoryFile(folder).save(bench.history)
    assert (folder / FILE_NAME).read_bytes() == before
    blocked = tmp_path / "file"
    blocked.write_text("")
    with pytest.raises(OSError, match="exists"):
        HistoryFile(blocked).save(bench.history)
    HistoryFile(blocked).load(bench.history)
    assert [record.levelno for record in caplog.records] == [logging.WARNING]
