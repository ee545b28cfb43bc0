from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from datetime import datetime, timedelta, timezone
from pathlib import Path
from typing import Any

import pytest
import yaml

from gpumem_client.wire.http import Connection
from gpumem_client.wire.protocol import MODES
from gpumem_exporter.core.samples import ProcessMemory
from tests.conftest import StartExporter
from tests.emulation.fixtures import StartTorch
from tests.emulation.node import MIB, EmulatedNode
from tests.support.alertmanagers import running_alertmanager
from tests.support.builders import UUIDS, report, sample
from tests.support.exporter_process import QUICK
from tests.support.paths import REPOSITORY
from tests.support.running_exporter import RunningExporter, ScriptedProvider, problem, running_exporter
from tests.support.waiting import patient, wait_for

ALERTS = "/api/v1/alerts"
EXAMPLE = REPOSITORY / "deploy" / "alertmanager" / "gpumem-receiver.example.yml"
CLEAR = {"gpumem_action": "empty_cache", "gpumem_target_pid": "1"}


@pytest.fixture
def exporter() -> Iterator[RunningExporter]:
    """An exporter with one reporting process, pid 1."""
    with running_exporter(report_interval=20, report_expiry=60) as running:
        assert running.report(report(1, devices=(sample(UUIDS[0], 10, 7),), modes=MODES)).status == 200
        yield running


def alert(fingerprint: str = "aaaa", status: str = "firing", starts_at: str = "monday", **texts: str) -> dict[str, Any]:
    return {
        "status": status,
        "labels": {"alertname": "Hoarded"},
        "annotations": texts,
        "startsAt": starts_at,
        "endsAt": "0001-01-01T00:00:00Z",
        "generatorURL": "",
        "fingerprint": fingerprint,
    }


def message(*alerts: dict[str, Any]) -> dict[str, Any]:
    return {"version": "4", "status": "firing", "receiver": "gpumem", "groupKey": "{}", "alerts": list(alerts)}


def send(exporter: RunningExporter, *alerts: dict[str, Any], **headers: Any) -> list[dict[str, Any]]:
    """Send alerts and return the outcome of each."""
    answer = exporter.request("POST", ALERTS, message(*alerts), **headers)
    assert answer.status == 200, answer.body
    outcomes: list[dict[str, Any]] = json.loads(answer.body)["alerts"]
    return outcomes


def counted(exporter: RunningExporter, outcome: str) -> float | None:
    return exporter.sample("gpumem_alerts_total", outcome=outcome)


def actions(exporter: RunningExporter) -> list[Any]:
    listed: list[Any] = exporter.document("/api/v1/actions")["actions"]
    return listed


def test_concurrent_equal_messages_act_once(exporter: RunningExporter) -> None:
    together = threading.Barrier(16)

    def ask() -> list[dict[str, Any]]:
        together.wait(patient(30))
        return send(exporter, alert("aaaa", **CLEAR), alert("bbbb", **CLEAR), alert("aaaa", **CLEAR))

    with ThreadPoolExecutor(16) as pool:
        outcomes = [each for sent in [pool.submit(ask) for _ in range(16)] for each in sent.result(patient(30))]
    assert [each["outcome"] for each in outcomes].count("acted") == 2
    assert {each["outcome"] for each in outcomes} == {"acted", "repeated"}
    assert len(actions(exporter)) == 2


def test_another_firing_acts_again_after_the_cooldown(exporter: RunningExporter) -> None:
    quick = {**CLEAR, "gpumem_cooldown_seconds": "0"}
    assert send(exporter, alert(starts_at="monday", **CLEAR))[0]["outcome"] == "acted"
    assert send(exporter, alert(starts_at="tuesday", **CLEAR))[0]["outcome"] == "cooling"
    assert send(exporter, alert("bbbb", starts_at="monday", **quick))[0]["outcome"] == "acted"
    assert send(exporter, alert("bbbb", starts_at="tuesday", **quick))[0]["outcome"] == "acted"
    assert len(actions(exporter)) == 3


def test_a_refused_alert_does_not_affect_others_and_is_retried(exporter: RunningExporter) -> None:
    absent = alert("bbbb", gpumem_action="empty_cache", gpumem_target_pid="2")
    outcomes = send(exporter, alert("cccc", gpumem_action="clear"), absent, alert(**CLEAR))
    assert [each["outcome"] for each in outcomes] == ["refused", "refused", "acted"]
    assert "'clear'" in outcomes[0]["reason"]
    assert "'2'" in outcomes[1]["reason"]
    assert counted(exporter, "refused") == 2
    assert exporter.report(report(2, devices=(sample(UUIDS[1], 10, 7),))).status == 200
    assert [each["outcome"] for each in send(exporter, absent)] == ["acted"]


def test_an_alert_without_a_request_and_an_invalid_message_are_counted(exporter: RunningExporter) -> None:
    (outcomes,) = send(exporter, alert(summary="hi"))
    assert (outcomes["outcome"], outcomes["action_id"]) == ("ignored", None)
    problem(exporter.request("POST", ALERTS, body=b"{"), 422)
    assert (counted(exporter, "ignored"), counted(exporter, "invalid"), actions(exporter)) == (1, 1, [])


def test_terminate_from_an_alert_requires_that_the_action_is_allowed() -> None:
    target = subprocess.Popen(["sleep", "600"])
    request = {"gpumem_action": "terminate", "gpumem_target_pid": str(target.pid)}
    provider = ScriptedProvider()
    provider.processes[UUIDS[0]] = (ProcessMemory(target.pid, MIB),)
    try:
        with running_exporter(provider=provider) as exporter:
            assert exporter.report(report(target.pid, devices=(sample(),))).status == 200
            (outcomes,) = send(exporter, alert(**request))
            assert outcomes["outcome"] == "refused"
            assert "--action.allow" in outcomes["reason"]
        assert target.poll() is None
        with running_exporter(provider=provider, action_allow="terminate") as exporter:
            assert exporter.report(report(target.pid, devices=(sample(),))).status == 200
            assert send(exporter, alert(**request))[0]["outcome"] == "acted"
            target.wait(patient(30))
    finally:
        target.kill()
        target.wait()


def test_alertmanager_clears_a_process_once_and_resolves_the_alert(
    node: EmulatedNode, start_exporter: StartExporter, start_torch: StartTorch, tmp_path: Path
) -> None:
    token = tmp_path / "token"
    token.touch(0o600)
    token.write_text("s3cret\n")
    exporter = start_exporter(node, *QUICK, "--action.token-file", str(token))
    process = start_torch(GPUMEM_EXPORTER_URL=exporter.url)
    process.call("start_client", workload="hoarder", rank=0)
    process.call("free", numbers=[process.call("alloc", nbytes=256 * MIB)])
    exporter.wait_for_processes(process.pid)

    def outcome(name: str) -> float:
        return exporter.metrics().value("gpumem_alerts_total", outcome=name)

    before = node.books().used_by(process.pid)
    now = datetime.now(timezone.utc)
    firing = {
        "labels": {"alertname": "CacheHoarded", "gpumem_action": "empty_cache", "pid": str(process.pid)},
        "annotations": {
            "gpumem_target_pid": str(process.pid),
            "gpumem_reason": "256 MiB could be released",
        },
        "endsAt": (now + timedelta(minutes=10)).isoformat(),
    }
    other = {"labels": {"alertname": "Other"}, "annotations": {"gpumem_action": "empty_cache"}}  # not for the exporter
    with alertmanager(tmp_path, exporter.tcp_url + ALERTS, token) as post:
        post(firing, other)
        wait_for(lambda: node.books().used_by(process.pid) == before - 256 * MIB, "the clear")
        process.call("free", numbers=[process.call("alloc", nbytes=128 * MIB)])  # a second clear would release it
        wait_for(lambda: outcome("repeated") >= 2, "its repetitions")
        post({**firing, "endsAt": datetime.now(timezone.utc).isoformat()})
        wait_for(lambda: outcome("resolved") >= 1, "its end")
    assert (outcome("acted"), outcome("refused"), outcome("invalid"), outcome("ignored")) == (1, 0, 0, 0)
    assert node.books().used_by(process.pid) == before - 128 * MIB
    answer = exporter.request("GET", "/api/v1/actions", headers={"Authorization": "Bearer s3cret"})
    (action,) = json.loads(answer.body)["actions"]
    answer = exporter.request("GET", f"/api/v1/actions/{action['id']}", headers={"Authorization": "Bearer s3cret"})
    (row,) = json.loads(answer.body)["results"]
    assert (row["pid"], row["outcome"], row["freed_bytes"]) == (process.pid, "done", 256 * MIB)
    assert action["requested_by"] == f"alert:CacheHoarded by token:token@loopback:uid={os.getuid()}"
    assert re.search(r"\bCacheHoarded \([0-9a-f]{16}\): 256 MiB could be released$", action["reason"])


@contextmanager
def alertmanager(folder: Path, receiver: str, token: Path) -> Iterator[Callable[..., None]]:
    """Run Alertmanager with the example's route and receiver, but faster; yield a function that posts alerts."""
    configuration = yaml.safe_load(EXAMPLE.read_text())
    (route,) = configuration["route"]["routes"]
    route |= {"group_interval": "500ms", "repeat_interval": "500ms"}
    (webhook,) = configuration["receivers"][1]["webhook_configs"]
    webhook["url"] = receiver
    webhook["http_config"]["authorization"]["credentials_file"] = str(token)
    with running_alertmanager(folder, configuration) as address:
        connection = Connection(f"http://{address}", timeout_seconds=patient(30.0))

        def post(*alerts: dict[str, Any]) -> None:
            answer = connection.request(
                "POST", "/api/v2/alerts", json.dumps(alerts).encode(), {"Content-Type": "application/json"}
            )
            assert answer.status == 200, answer.body

        yield post
        connection.close()


def test_alertmanager_accepts_the_example_and_routes_only_requests() -> None:
    def amtool(*words: str) -> str:
        program = shutil.which("amtool")
        assert program, "amtool is not on PATH: run the tests by `sh tests/run.sh`, which brings it"
        return subprocess.run([program, *words], check=True, capture_output=True, text=True, timeout=patient(60)).stdout

    assert "SUCCESS" in amtool("check-config", str(EXAMPLE))
    route = ("config", "routes", "test", f"--config.file={EXAMPLE}")
    assert amtool(*route, "alertname=Hoarded", "gpumem_action=empty_cache").strip() == "gpumem"
    assert amtool(*route, "alertname=Hoarded").strip() == "default"
