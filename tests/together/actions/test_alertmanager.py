from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import datetime, timedelta, timezone
from pathlib import Path
from typing import Any

import pytest
import yaml

from gpumem_client.wire.http import Connection
from gpumem_client.wire.protocol import MODES
from tests.conftest import StartExporter
from tests.emulation.fixtures import StartTorch
from tests.emulation.node import MIB, EmulatedNode
from tests.support.builders.builders import UUIDS, report, sample
from tests.support.builders.policies import alert_rule, written
from tests.support.paths import REPOSITORY
from tests.support.servers.alertmanagers import running_alertmanager
from tests.support.servers.exporter_process import QUICK
from tests.support.servers.running_exporter import RunningExporter, problem, running_exporter
from tests.support.waiting import patient, wait_for

ALERTS = "/api/v1/alerts"
EXAMPLE = REPOSITORY / "deploy" / "alertmanager" / "gpumem-receiver.example.yml"
DEFERRED = re.compile(rb'alertmanager_notification_requests_failed_total\{.*integration="webhook".*\} [1-9]')
HOARD = (sample(UUIDS[0], 10 * MIB, 7 * MIB),)


@pytest.fixture
def exporter(tmp_path: Path) -> Iterator[RunningExporter]:
    """An exporter with one reporting process, pid 1."""
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


def test_alerts_about_a_process_that_may_not_have_reported_yet_are_repeated(exporter: RunningExporter) -> None:
    invalid, absent, known = alert(rule="clear"), alert("2"), alert()
    answer = exporter.request("POST", ALERTS, message(invalid, absent, known))
    assert "pid=2" in problem(answer, 503)["detail"]
    assert 0 < int(answer.headers["retry-after"]) <= 60
    assert exporter.report(report(2, devices=HOARD)).status == 200
    for outcomes in (["refused", "acted", "acted"], ["refused", "waiting", "waiting"]):
        sent = send(exporter, invalid, absent, known)
        assert [each["outcome"] for each in sent] == outcomes
    assert "'clear'" in sent[0]["reason"]
    assert [counted(exporter, outcome) for outcome in ("refused", "acted", "waiting")] == [3, 2, 2]


def test_an_alert_without_a_request_and_an_invalid_message_are_counted(exporter: RunningExporter) -> None:
    (outcomes,) = send(exporter, alert(rule=""))
    assert (outcomes["outcome"], outcomes["action_id"]) == ("ignored", None)
    problem(exporter.request("POST", ALERTS, body=b"{"), 422)
    assert [counted(exporter, outcome) for outcome in ("ignored", "invalid", "acted")] == [1, 1, 0]
    assert not exporter.document("/api/v1/actions")["actions"]


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
