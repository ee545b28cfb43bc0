"""Profiles over HTTP and with the command `profile`: how a process sends one, and what is shown of it."""

from __future__ import annotations

import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from gpumem_client.profile.profile_types import ProfiledDevice, Row
from gpumem_client.wire.reason_codes import ReasonCode
from gpumem_exporter.main import main
from tests.support.builders.builders import MIB, UUIDS
from tests.support.builders.profile_documents import Reporter, profile, takes, training
from tests.support.processes.running_command import run_command
from tests.support.servers.running_exporter import ACTIONS, RunningExporter, problem, running_exporter
from tests.support.truth.pprof_reader import read_pprof
from tests.support.waiting import eventually, patient

PROFILES = "/api/v1/profiles"
EVENTS = "/api/v1/events"
MEDIA_TYPES = {"pprof": "application/octet-stream", "html": "text/html"}


@pytest.fixture
def exporter(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[RunningExporter]:
    """Run an exporter, which the commands of the test use."""
    monkeypatch.chdir(tmp_path)
    with running_exporter() as exporter:
        monkeypatch.setenv("GPUMEM_EXPORTER_URL", exporter.url)
        yield exporter


def asked(exporter: RunningExporter, **changes: Any) -> Any:
    wanted = {"action": "profile", "target": {"all": True}, "wait_seconds": 0, **changes}
    answer = exporter.act(**wanted)
    assert answer.status == 202, answer.body
    return json.loads(answer.body)


def sent(answer: Any) -> str:
    """Return the id of an accepted profile."""
    assert answer.status == 201, answer.body
    return str(json.loads(answer.body)["id"])


def listed(exporter: RunningExporter, query: str = "") -> list[str]:
    return [each["id"] for each in exporter.document(f"{PROFILES}{query}")["profiles"]]


def test_a_profile_for_a_command_is_listed_and_named_in_the_result(exporter: RunningExporter) -> None:
    reporter = Reporter(exporter)
    action = asked(exporter, duration_seconds=5)
    command = reporter.command()
    assert (command["action"], command["duration_seconds"]) == ("profile", 5)
    profile_id = sent(reporter.send(profile(command["id"])))
    assert sent(reporter.send(profile(command["id"]))) == profile_id
    reporter.finish(command, "another")
    (row,) = exporter.document(f"{ACTIONS}/{action['id']}")["results"]
    assert (row["outcome"], row["profile"]) == ("done", profile_id)
    (shown,) = exporter.document(PROFILES)["profiles"]
    assert (shown["id"], shown["cause"], shown["pid"]) == (profile_id, "action", 100)
    assert shown["devices"][0]["gpu"] == "0"
    found = exporter.document(f"{PROFILES}/{profile_id}")
    assert sum(row["bytes"] for row in found["rows"]) == 700
    (event,) = exporter.document(f"{EVENTS}?type=action")["events"]
    assert event["detail"]["results"][0]["profile"] == profile_id
    problem(reporter.send(profile(command["id"])), 409)  # the command has ended


def test_a_process_that_was_silent_while_it_took_a_profile_may_send_it() -> None:
    with running_exporter(report_interval=0.1, report_expiry=2.0) as exporter:
        reporter = Reporter(exporter)
        action = asked(exporter, duration_seconds=60)
        command = reporter.command()
        eventually(
            lambda: [each["state"] for each in exporter.document("/api/v1/processes")["processes"]],
            lambda states: states == ["silent"],
        )
        profile_id = sent(reporter.send(profile(command["id"])))
        reporter.finish(command, profile_id)
        (row,) = exporter.document(f"{ACTIONS}/{action['id']}")["results"]
        assert (row["outcome"], row["profile"]) == ("done", profile_id)


def test_the_formats_and_the_difference_of_two_profiles(exporter: RunningExporter) -> None:
    reporter = Reporter(exporter)
    ids = []
    for recorded in (True, False):
        asked(exporter)
        command = reporter.command()
        now: dict[str, Any] = {
            "devices": (ProfiledDevice(UUIDS[0], 100),),
            "rows": (Row(0, "default", None, 1, 100, 1, None, None),),
        }
        ids.append(sent(reporter.send(profile(command["id"], **({} if recorded else now)))))
        reporter.finish(command)
    assert listed(exporter) == ids[::-1]
    assert listed(exporter, "?limit=1&pid=100&workload=train&job=train") == ids[1:]
    assert listed(exporter, "?pid=101") == listed(exporter, "?workload=other") == listed(exporter, "?job=pid~1") == []
    first = f"{PROFILES}/{ids[0]}"
    for form, media_type in MEDIA_TYPES.items():
        for path in (first, f"{first}/diff/{ids[1]}"):
            answer = exporter.get(f"{path}?format={form}")
            assert answer.status == 200, answer.body
            assert answer.headers["content-type"].startswith(media_type)
            assert answer.headers["cache-control"] == "no-store"
            policy = answer.headers.get("content-security-policy", "")
            assert policy.startswith("sandbox allow-scripts") is (form == "html")
            assert "allow-same-origin" not in policy
    problem(exporter.get(f"{PROFILES}/{ids[1]}?moment=peak"), 422)  # taken without a recording
    (wrong,) = problem(exporter.get(f"{first}?format=folded"), 422)["errors"]
    assert all(form in wrong["message"] for form in ("json", "pprof", "html"))
    problem(exporter.get(f"{PROFILES}/{'0' * 32}"), 404)
    problem(exporter.get(f"{first}/diff/{'0' * 32}"), 404)
    problem(exporter.get(f"{PROFILES}/..%2f..%2fevents.db"), 404)


def test_a_profile_that_no_command_and_no_error_explains_is_refused(exporter: RunningExporter) -> None:
    reporter = Reporter(exporter)
    problem(reporter.send(profile()), 409)
    problem(reporter.send(profile(cause="another")), 422)
    clear = exporter.act(action="snapshot", target={"all": True}, wait_seconds=0)
    problem(reporter.send(profile(json.loads(clear.body)["id"])), 409)
    waiting = asked(exporter)
    problem(reporter.send(profile(waiting["id"])), 409)  # the process does not have the command yet
    command = reporter.command()
    neighbor = Reporter(exporter, 101)
    problem(neighbor.send(profile(command["id"])), 409)
    reporter.changes["session"] = "unknown"
    problem(reporter.send(profile(command["id"])), 409)
    assert listed(exporter) == []
    for body, status in ((b"", 422), (b"x" * ((1 << 20) + 1), 413)):
        problem(neighbor.post(body), status)
    problem(exporter.request("POST", PROFILES, {"id": "x"}), 415)


def test_the_event_of_an_error_has_its_profile_whichever_arrives_first(tmp_path: Path) -> None:
    with running_exporter(storage_path=str(tmp_path)) as exporter:
        reporter = Reporter(exporter, slurm_job_id="4711")
        reporter.fail(1)
        first = sent(reporter.send(reporter.error_profile(1)))
        assert sent(reporter.send(reporter.error_profile(1))) == first
        second = sent(reporter.send(reporter.error_profile(2)))
        reporter.fail(2)
        reporter.fail(3)
    with running_exporter(storage_path=str(tmp_path)) as exporter:
        reporter.exporter = exporter
        reporter.report()
        third = sent(reporter.send(reporter.error_profile(3)))  # the exporter has restarted in between
        events = eventually(
            lambda: exporter.document(f"{EVENTS}?type=oom")["events"],
            lambda found: [each["detail"]["profile"] for each in found] == [first, second, third],
        )
        one = exporter.document(f"{EVENTS}/{events[0]['id']}")
        assert one["event"]["detail"]["profile"] == first
        assert exporter.document(f"{PROFILES}/{first}")["cause"] == "out_of_memory"
        job = exporter.document("/api/v1/jobs/4711")
        assert [each["id"] for each in job["profiles"]] == [third, second, first]
        shown = run_command("report", "--job", "4711", "--url", exporter.url).stdout
        assert f"profile show {third[:8]}" in shown
        unknown = run_command("report", "--job", "4711", "--user", "no-such-user", "--url", exporter.url)
        assert (unknown.returncode, "no-such-user" in unknown.stderr) == (2, True)


def test_a_profile_that_names_an_unknown_device_is_refused(exporter: RunningExporter) -> None:
    reporter = Reporter(exporter)
    reporter.fail(1)
    known = reporter.error_profile(1)
    unknown = replace(known.devices[0], uuid="GPU-of-another-node", allocated_bytes=0, peak_bytes=0)
    for devices in ((unknown, *known.devices), (*known.devices, unknown)):
        rows = [row._replace(device=devices.index(known.devices[0])) for row in known.rows]
        answer = reporter.send(replace(known, devices=devices, rows=tuple(rows)))
        assert "GPU-of-another-node" in problem(answer, 422)["detail"]
    assert listed(exporter) == []


def test_a_scraper_gets_a_new_profile_that_is_not_kept() -> None:
    with running_exporter() as exporter, ThreadPoolExecutor(2) as pool:
        reporter = Reporter(exporter)
        path = "/api/v1/processes/100/profile"
        asking = pool.submit(exporter.get, f"{path}?format=json")
        command = reporter.command()
        assert (command["action"], command.get("duration_seconds", 0)) == ("profile", 0)
        assert exporter.get("/api/v1/devices").status == 200  # a waiting scraper keeps no other request waiting
        sent(reporter.send(profile(command["id"])))
        reporter.finish(command)
        answer = asking.result()
        assert answer.status == 200, answer.body
        assert b"forward" in answer.body
        refusing = pool.submit(exporter.get, path)
        command = reporter.command()
        why = "a CUDA graph is being captured"
        reporter.finish(command, outcome="refused", reason=why, reason_code=ReasonCode.CUDA_GRAPH_CAPTURE)
        assert why in problem(refusing.result(), 409)["detail"]
        assert listed(exporter) == []
        assert exporter.document(ACTIONS)["actions"] == []
        assert exporter.document(f"{EVENTS}?type=action")["events"] == []
        assert exporter.sample("gpumem_actions_total", action="profile", outcome="done") == 1
        problem(exporter.get("/api/v1/processes/4711/profile"), 404)
        problem(exporter.get("/api/v1/processes/x/profile"), 422)


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
    after, before = listed(exporter)
    capsys.readouterr()

    assert main(["profile", "list"]) == 0
    rows = capsys.readouterr().out.splitlines()[1:]
    assert [row.split()[0] for row in rows] == [after[:8], before[:8]]

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
