"""`profile` against a real exporter and a reporter that takes profiles."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from gpumem_client.profile.profile_types import Profile
from gpumem_exporter.main import main
from tests.support.builders import MIB
from tests.support.made_up_profiles import training
from tests.support.pprof_reader import read_pprof
from tests.support.profile_documents import Reporter, takes
from tests.support.running_exporter import RunningExporter, running_exporter
from tests.support.waiting import patient


@pytest.fixture
def exporter(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[RunningExporter]:
    """Run an exporter, which the commands of the test use."""
    monkeypatch.chdir(tmp_path)
    with running_exporter() as exporter:
        monkeypatch.setenv("GPUMEM_EXPORTER_URL", exporter.url)
        yield exporter


def kept_ids(exporter: RunningExporter) -> list[str]:
    """The ids of the kept profiles, the oldest first."""
    return [kept["id"] for kept in reversed(exporter.document("/api/v1/profiles")["profiles"])]


def test_a_profile_is_a_table_of_owners_and_lines(
    exporter: RunningExporter, capsys: pytest.CaptureFixture[str]
) -> None:
    thread = takes(exporter, training())
    assert main(["profile", "100", "--duration", "30s"]) == 0
    thread.join(patient(30))
    shown = capsys.readouterr()
    assert "30 s" in shown.err
    lines = shown.out.splitlines()
    assert lines[0] == "Memory of train, pid 100, recorded for 30 s"
    assert any("AdamW.exp_avg model.layers.*.mlp.fc.weight" in line and "768 MiB" in line for line in lines)
    assert any(line.split()[:4] == ["300", "MiB", "1", "model.py:30"] for line in lines)
    assert exporter.document("/api/v1/actions")["actions"][0]["action"] == "profile"


def test_formats_files_and_differences(exporter: RunningExporter, capsys: pytest.CaptureFixture[str]) -> None:
    thread = takes(exporter, training(leaked=300), training(leaked=900))
    assert main(["profile", "100", "-o", "before.pb.gz", "-q"]) == 0
    assert main(["profile", "--pid", "100", "-o", "after.html", "-q"]) == 0
    thread.join(patient(30))
    assert (
        sum(sample.values["inuse_space"] for sample in read_pprof(Path("before.pb.gz").read_bytes()).samples)
        == 4610 * MIB
    )
    assert Path("after.html").read_text().startswith("<!DOCTYPE html>")
    before, after = kept_ids(exporter)
    capsys.readouterr()

    assert main(["profile", "list"]) == 0
    listed = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in listed[1:]] == [after[:8], before[:8]]

    assert main(["profile", "diff", before[:8], after[:8]]) == 0
    of_ids = capsys.readouterr().out
    assert "+600 MiB" in of_ids
    assert "model.py:30 in forward" in of_ids
    assert main(["profile", "show", before, "-o", "before.json"]) == 0
    capsys.readouterr()
    assert main(["profile", "diff", "before.json", after[:8]]) == 0
    assert capsys.readouterr().out == of_ids
    assert main(["profile", "diff", before, after, "--format", "json"]) == 0
    (row,) = json.loads(capsys.readouterr().out)["rows"]
    assert row["change_bytes"] == 600 * MIB


def test_several_processes_have_a_file_each(exporter: RunningExporter, capsys: pytest.CaptureFixture[str]) -> None:
    threads = [takes(exporter, training(), pid=pid) for pid in (100, 101)]
    assert main(["profile", "--workload", "train", "-o", "one.json"]) == 2
    assert "2 processes" in capsys.readouterr().err
    assert main(["profile", "--workload", "train", "--format", "json"]) == 0
    for thread in threads:
        thread.join(patient(30))
    written = [json.loads(path.read_bytes()) for path in Path().glob("profile-*.json")]
    assert {document["pid"] for document in written} == {100, 101}
    assert sorted(capsys.readouterr().out.split()) == sorted(str(path) for path in Path().glob("profile-*.json"))


def test_a_process_that_cannot_be_profiled_says_why(
    exporter: RunningExporter, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["profile", "100"]) == 1
    assert "100" in capsys.readouterr().err
    reporter = Reporter(exporter, 100, actions=("empty_cache",))
    assert main(["profile", str(reporter.pid)]) == 1
    shown = capsys.readouterr()
    assert shown.out == ""
    assert "pid 100" in shown.err


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["100", "--duration", "soon"], "30s"),
        (["100", "-o", "missing/profile.html"], "missing/profile.html"),
        (["100", "--json", "--format", "html"], "--format html"),
        (["100", "--format", "folded"], "expected text, html, pprof, json"),
        (["diff", "a"], "B"),
        ([], "no target"),
    ],
)
def test_wrong_usage(words: list[str], expected: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["profile", *words]) == 2
    assert expected in capsys.readouterr().err


def test_an_unknown_profile_and_a_missing_moment(exporter: RunningExporter, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["profile", "show", "abc"]) == 1
    assert "abc" in capsys.readouterr().err
    without: dict[str, Any] = {**vars(training()), "recorded_seconds": 0.0}
    without["devices"] = tuple(device.__class__(device.uuid, device.allocated_bytes) for device in without["devices"])
    without["rows"] = tuple(row._replace(peak_bytes=None, peak_blocks=None) for row in without["rows"])
    thread = takes(exporter, Profile(**without))
    assert main(["profile", "100", "-q"]) == 0
    thread.join(patient(30))
    (kept,) = kept_ids(exporter)
    assert main(["profile", "show", kept, "--moment", "peak"]) == 2
