"""Rules of a policy that act by themselves, on a reload, and for the alerts of a real Alertmanager."""

from __future__ import annotations

import itertools
import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import datetime, timedelta, timezone
from pathlib import Path
from typing import Any

import pytest
import yaml

from gpumem_client.wire.http import Connection
from gpumem_client.wire.protocol import MODES, CommandResult, DeviceResult
from tests.conftest import StartExporter
from tests.emulation.fixtures import StartTorch
from tests.emulation.node import MIB, EmulatedNode
from tests.support.builders.builders import UUIDS, report, sample
from tests.support.builders.policies import alert_rule, rule, written
from tests.support.paths import REPOSITORY
from tests.support.servers.alertmanagers import running_alertmanager
from tests.support.servers.exporter_process import QUICK
from tests.support.servers.running_exporter import RunningExporter, problem, running_exporter
from tests.support.waiting import eventually, patient, wait_for

ALERTS = "/api/v1/alerts"
EXAMPLE = REPOSITORY / "deploy" / "alertmanager" / "gpumem-receiver.example.yml"
DEFERRED = re.compile(rb'alertmanager_notification_requests_failed_total\{.*integration="webhook".*\} [1-9]')
HOARD = (sample(UUIDS[0], 10 * MIB, 7 * MIB),)
RELOAD = "/-/reload"
EVALUATIONS = "gpumem_policy_evaluations_total"


@pytest.fixture
def policy(tmp_path: Path) -> Path:
    return written(tmp_path / "policy.yml", rule())


@pytest.fixture
def exporter(policy: Path) -> Iterator[RunningExporter]:
    with running_exporter(policy_file=str(policy)) as running:
        yield running


def test_a_rule_clears_an_idle_process_and_a_dry_run_does_not(
    node: EmulatedNode, start_exporter: StartExporter, start_torch: StartTorch, tmp_path: Path
) -> None:
    idle = {"slack_bytes": {"over": "100MiB"}, "idle_seconds": {"over": "1s"}}
    policy = written(
        tmp_path / "policy.yml",
        rule("acts", workloads=["hoard*"], when=idle, do={"action": "empty_cache", "mode": "idle"}),
        rule("would", workloads=["tidy"], when=idle, dry_run=True),
    )
    exporter = start_exporter(node, *QUICK, "--policy.file", str(policy))
    processes = {}
    for workload in ("hoarder", "tidy"):
        process = start_torch(GPUMEM_EXPORTER_URL=exporter.url)
        process.call("start_client", workload=workload, rank=0)
        process.call("free", numbers=[process.call("alloc", nbytes=256 * MIB)])
        processes[workload] = (process, node.books().used_by(process.pid))
    (hoarder, before), (tidy, kept) = processes["hoarder"], processes["tidy"]
    wait_for(lambda: exporter.metrics().values(EVALUATIONS, rule="would", result="would_act") == [1], "the dry run")
    wait_for(lambda: node.books().used_by(hoarder.pid) == before - 256 * MIB, "the clear")
    assert node.books().used_by(tidy.pid) == kept

    def acted() -> list[Any]:
        actions = exporter.get("/api/v1/actions")["actions"]
        return [action for action in actions if action["requested_by"] == "policy:acts" and action["outcomes"]]

    wait_for(acted, "its result")
    (action,) = acted()
    (row,) = exporter.get(f"/api/v1/actions/{action['id']}")["results"]
    assert (row["pid"], row["workload"], row["outcome"], row["freed_bytes"]) == (
        hoarder.pid,
        "hoarder",
        "done",
        256 * MIB,
    )
    assert (action["mode"], action["target"]) == ("idle", {"pid": hoarder.pid})
    assert re.search(r"slack_bytes\b.*\b256 MiB\b.*\b100 MiB\b.*idle_seconds", action["reason"])
    assert exporter.metrics().value(EVALUATIONS, rule="acts", result="acted") == 1
    assert [event["detail"]["requested_by"] for event in exporter.get("/api/v1/events?type=action")["events"]] == [
        "policy:acts"
    ]
    assert "requested_by=policy:would" in exporter.log()


EARLY_AND_LATE = """
import os, signal, sys
from gpumem_exporter import serving
from gpumem_exporter.features.policy.policy_runner import PolicyRunner
make = serving.create_app

def create_app(runtime):
    app = make(runtime)
    os.kill(os.getpid(), signal.SIGHUP)
    stop = runtime.poller.stop

    def stop_late(seconds):
        os.kill(os.getpid(), signal.SIGHUP)
        return stop(seconds)

    runtime.poller.stop = stop_late
    reload = PolicyRunner.reload

    async def reload_and_end(self, requested_by):
        await reload(self, requested_by)
        os.kill(os.getpid(), signal.SIGTERM)

    PolicyRunner.reload = reload_and_end
    return app

serving.create_app = create_app
sys.argv = ["gpumem-exporter", *sys.argv[1:]]
from gpumem_exporter.main import main
sys.exit(main())
"""


def test_a_sighup_during_the_start_reloads_after_it_and_one_during_the_stop_does_nothing(policy: Path) -> None:
    arguments = ["serve", "--policy.file", str(policy), "--web.listen-address", "127.0.0.1:0", "--log.format", "json"]
    ended = subprocess.run(
        [sys.executable, "-c", EARLY_AND_LATE, *arguments], capture_output=True, text=True, timeout=patient(120)
    )
    assert ended.returncode == 0, ended
    lines = [json.loads(line) for line in ended.stderr.splitlines()]
    assert [line["requested_by"] for line in lines if "requested_by" in line] == ["start", "SIGHUP"]


def test_reload_applies_the_file_and_returns_its_rules(exporter: RunningExporter, policy: Path) -> None:
    written(policy, rule("one"), rule("two", dry_run=True))
    answer = exporter.request("POST", RELOAD, Content_Type="application/x-www-form-urlencoded")
    assert answer.status == 200
    assert json.loads(answer.body)["rules"] == [
        {"name": "one", "dry_run": False, "stopped": 0, "stopped_until": None},
        {"name": "two", "dry_run": True, "stopped": 0, "stopped_until": None},
    ]
    assert exporter.sample(EVALUATIONS, rule="two", result="acted") == 0
    assert exporter.sample(EVALUATIONS, rule="tidy", result="acted") is None
    policy.write_text("rules:\n  - {}\n")
    assert f"{policy}:2: " in problem(exporter.request("POST", RELOAD), 422)["detail"]
    assert exporter.sample(EVALUATIONS, rule="two", result="acted") == 0, "an invalid file changes nothing"


def test_a_rule_that_does_not_help_stops_with_an_event(tmp_path: Path) -> None:
    policy = written(tmp_path / "policy.yml", rule(stop_after={"clears": 1, "still_free_after": "0s"}))
    with running_exporter(policy_file=str(policy)) as exporter:
        sequence, devices = itertools.count(1), (sample(UUIDS[0], 10 * MIB, 50 * MIB),)

        def commands(*results: CommandResult) -> Any:
            answer = exporter.report(report(1, devices=devices, sequence=next(sequence), results=results))
            assert answer.status == 200
            return json.loads(answer.body).get("commands")

        (command,) = eventually(commands)
        released = DeviceResult(UUIDS[0], 60 * MIB, 60 * MIB, freed_bytes=0)
        commands(CommandResult(command["id"], "done", devices=(released,)))
        (event,) = eventually(lambda: exporter.document("/api/v1/events?type=policy_stopped")["events"])
        assert [event[name] for name in ("pid", "workload", "gpu")] == [1, "train", "0"]
        detail = event["detail"]
        assert (detail["rule"], detail["action"]) == ("tidy", "empty_cache")
        assert re.search(r"\bempty_cache\b.*\b0 B\b", detail["reason"])
        assert [tried["action_id"] for tried in detail["tries"]] == [command["id"]]
        commands()
        eventually(lambda: exporter.sample(EVALUATIONS, rule="tidy", result="stopped"))
        assert exporter.sample(EVALUATIONS, rule="tidy", result="acted") == 1
        (listed,) = json.loads(exporter.request("POST", RELOAD).body)["rules"]
        assert listed["stopped"] == 1
        until, recorded = (
            datetime.fromisoformat(text.replace("Z", "+00:00")) for text in (listed["stopped_until"], detail["until"])
        )
        assert 23 < (until - datetime.now(timezone.utc)).total_seconds() / 3600 <= 24
        assert abs((until - recorded).total_seconds()) < 1


@pytest.fixture
def alerted(tmp_path: Path) -> Iterator[RunningExporter]:
    """An exporter with one reporting process, pid 1, and a rule for alerts."""
    policy = written(tmp_path / "policy.yml", alert_rule())
    with running_exporter(report_interval=20, report_expiry=60, policy_file=str(policy)) as running:
        assert running.report(report(1, devices=HOARD, modes=MODES)).status == 200
        yield running


def alert(pid: str = "1", rule: str = "tidy") -> dict[str, Any]:
    return {
        "status": "firing",
        "labels": {"alertname": "Hoarded", "uuid": UUIDS[0], "pid": pid},
        "annotations": {"gpumem_rule": rule},
        "startsAt": datetime.now(timezone.utc).isoformat(),
        "fingerprint": pid,
    }


def message(*alerts: dict[str, Any]) -> dict[str, Any]:
    return {"version": "4", "alerts": alerts}


def send(exporter: RunningExporter, *alerts: dict[str, Any]) -> list[dict[str, Any]]:
    """Send alerts and return the outcome of each."""
    answer = exporter.request("POST", ALERTS, message(*alerts))
    assert answer.status == 200, answer.body
    outcomes: list[dict[str, Any]] = json.loads(answer.body)["alerts"]
    return outcomes


def counted(exporter: RunningExporter, outcome: str) -> float | None:
    return exporter.sample("gpumem_alerts_total", outcome=outcome)


def test_alerts_about_a_process_that_may_not_have_reported_yet_are_repeated(alerted: RunningExporter) -> None:
    invalid, absent, known = alert(rule="clear"), alert("2"), alert()
    answer = alerted.request("POST", ALERTS, message(invalid, absent, known))
    assert "pid=2" in problem(answer, 503)["detail"]
    assert 0 < int(answer.headers["retry-after"]) <= 60
    assert alerted.report(report(2, devices=HOARD)).status == 200
    for outcomes in (["refused", "acted", "acted"], ["refused", "waiting", "waiting"]):
        sent = send(alerted, invalid, absent, known)
        assert [each["outcome"] for each in sent] == outcomes
    assert "'clear'" in sent[0]["reason"]
    assert [counted(alerted, outcome) for outcome in ("refused", "acted", "waiting")] == [3, 2, 2]


def test_an_alert_without_a_request_and_an_invalid_message_are_counted(alerted: RunningExporter) -> None:
    (outcomes,) = send(alerted, alert(rule=""))
    assert (outcomes["outcome"], outcomes["action_id"]) == ("ignored", None)
    problem(alerted.request("POST", ALERTS, body=b"{"), 422)
    assert [counted(alerted, outcome) for outcome in ("ignored", "invalid", "acted")] == [1, 1, 0]
    assert not alerted.document("/api/v1/actions")["actions"]


def test_alertmanager_clears_a_process_once_and_resolves_the_alert(
    node: EmulatedNode, start_exporter: StartExporter, start_torch: StartTorch, tmp_path: Path
) -> None:
    token = tmp_path / "token"
    token.touch(0o600)
    token.write_text("s3cret\n")
    policy = written(tmp_path / "policy.yml", alert_rule(when={"slack_bytes": {"over": "200MiB"}}, cooldown="10s"))
    flags = ("--action.token-file", str(token), "--policy.file", str(policy), "--report.expiry", "600")
    exporter = start_exporter(node, *QUICK, *flags)
    process = start_torch(GPUMEM_EXPORTER_URL=exporter.url)
    process.call("free", numbers=[process.call("alloc", nbytes=256 * MIB)])

    def outcome(name: str) -> float:
        return exporter.metrics().value("gpumem_alerts_total", outcome=name)

    before = node.books().used_by(process.pid)
    now = datetime.now(timezone.utc)
    firing = {
        "labels": {
            "alertname": "CacheHoarded",
            "gpumem_rule": "tidy",
            "instance": "another-name:9844",  # the uuid says which node it is
            "uuid": node.uuid(0),
            "pid": str(process.pid),
            "workload": "hoarder",
        },
        "endsAt": (now + timedelta(minutes=10)).isoformat(),
    }
    other = {"labels": {"alertname": "Other"}, "annotations": {"gpumem_rule": "tidy"}}  # not for the exporter
    with alertmanager(tmp_path, exporter.tcp_url + ALERTS, token) as connection:
        post(connection, firing, other)
        wait_for(lambda: DEFERRED.search(connection.request("GET", "/metrics").body), "503 for an unknown process")
        process.call("start_client", workload="hoarder", rank=0)
        wait_for(lambda: node.books().used_by(process.pid) == before - 256 * MIB, "the clear")
        process.call("free", numbers=[process.call("alloc", nbytes=128 * MIB)])  # a second clear would release it
        wait_for(lambda: outcome("waiting") >= 2, "its repetitions")
        post(connection, {**firing, "endsAt": datetime.now(timezone.utc).isoformat()})
        wait_for(lambda: outcome("resolved") >= 1, "its end")
    assert (outcome("acted"), outcome("invalid"), outcome("ignored")) == (1, 0, 0)
    assert node.books().used_by(process.pid) == before - 128 * MIB
    answer = exporter.request("GET", "/api/v1/actions", headers={"Authorization": "Bearer s3cret"})
    (action,) = json.loads(answer.body)["actions"]
    answer = exporter.request("GET", f"/api/v1/actions/{action['id']}", headers={"Authorization": "Bearer s3cret"})
    (row,) = json.loads(answer.body)["results"]
    assert (row["pid"], row["outcome"], row["freed_bytes"]) == (process.pid, "done", 256 * MIB)
    assert action["requested_by"] == f"alert:CacheHoarded by token:token@loopback:uid={os.getuid()}"
    assert re.search(r"\bCacheHoarded \([0-9a-f]{16}\): slack_bytes 256 MiB", action["reason"])


@contextmanager
def alertmanager(folder: Path, receiver: str, token: Path) -> Iterator[Connection]:
    """Run Alertmanager with the example's route and receiver, but faster; yield a connection to it."""
    configuration = yaml.safe_load(EXAMPLE.read_text())
    (route,) = configuration["route"]["routes"]
    route |= {"group_interval": "500ms", "repeat_interval": "500ms"}
    (webhook,) = configuration["receivers"][1]["webhook_configs"]
    webhook["url"] = receiver
    webhook["http_config"]["authorization"]["credentials_file"] = str(token)
    with running_alertmanager(folder, configuration) as address:
        connection = Connection(f"http://{address}", timeout_seconds=patient(30.0))
        yield connection
        connection.close()


def post(connection: Connection, *alerts: dict[str, Any]) -> None:
    body, headers = json.dumps(alerts).encode(), {"Content-Type": "application/json"}
    assert connection.request("POST", "/api/v2/alerts", body, headers).status == 200


def test_alertmanager_accepts_the_example_and_routes_only_requests() -> None:
    def amtool(*words: str) -> str:
        program = shutil.which("amtool")
        assert program, "amtool is not on PATH: run the tests by `sh tests/run.sh`, which brings it"
        return subprocess.run([program, *words], check=True, capture_output=True, text=True, timeout=patient(60)).stdout

    assert "SUCCESS" in amtool("check-config", str(EXAMPLE))
    route = ("config", "routes", "test", f"--config.file={EXAMPLE}")
    assert amtool(*route, "alertname=Hoarded", "gpumem_rule=tidy").strip() == "gpumem"
    assert amtool(*route, "alertname=Hoarded").strip() == "default"
