"""The whole path of an alert, each part real: demo, Prometheus with the project's rules, Alertmanager, a receiver."""

from __future__ import annotations

import re
import urllib.request
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.support.alert_path import Receiver, alertmanager, prometheus, receiving
from tests.support.exporter_process import ExporterProcess
from tests.support.waiting import patient

TIMES = 150.0
"""The speed relative to production: 50 minutes there are 20 seconds here."""
TIMEOUT_SECONDS = 180.0
"""Enough for a slow machine."""


@dataclass(frozen=True)
class AlertPath:
    """The exporter that alerts are about, and the receiver of their notifications."""

    exporter: ExporterProcess
    receiver: Receiver


@pytest.fixture
def path(tmp_path: Path) -> Iterator[AlertPath]:
    exporter = ExporterProcess(tmp_path, "--demo", "--report.interval=0.2", "--collect.interval=0.2")
    try:
        with (
            receiving() as receiver,
            alertmanager(tmp_path, receiver.url, times=TIMES) as alerts_to,
            prometheus(tmp_path, exporter=exporter.tcp_url.removeprefix("http://"), alerts_to=alerts_to, times=TIMES),
        ):
            yield AlertPath(exporter, receiver)
    finally:
        exporter.close()


def test_a_leak_and_fragmentation_fire_alerts_that_an_action_resolves(path: AlertPath) -> None:
    # The forecast silences GpuMemLeak of the same process.
    alerts = {"GpuMemFragmentationHigh": "demo-asr-varlen", "GpuMemOomSoon": "demo-rag-indexer-leak"}
    fired, notified_before_action = {}, {}
    for name, workload in alerts.items():
        fired[name] = path.receiver.wait_for_alert("firing", TIMEOUT_SECONDS, alertname=name, workload=workload)
        notified_before_action[name] = len(path.receiver.notifications)
        # In both workloads, the garbage collector frees tensors: the leaked ones, or those that fragment the cache.
        action = path.exporter.act("empty_cache", target={"workload": workload}, collect_garbage=True, wait_seconds=30)
        assert (action["state"], action["freed_bytes"] > 1 << 28) == ("done", True)
    for name, workload in alerts.items():
        since = notified_before_action[name]
        resolved = path.receiver.wait_for_alert(
            "resolved", TIMEOUT_SECONDS, since=since, alertname=name, workload=workload
        )
        assert resolved["fingerprint"] == fired[name]["fingerprint"]
        assert resolved["endsAt"] > resolved["startsAt"]
    for alert in fired.values():
        assert_texts_are_complete(alert)


def assert_texts_are_complete(alert: Mapping[str, Any]) -> None:
    """Check that the texts name the process, the device, and the size or the time, and that the runbook exists."""
    labels, annotations = alert["labels"], alert["annotations"]
    assert labels["severity"] == "warning"
    assert labels["job"] == "gpumem"
    for text in (annotations["summary"], annotations["description"]):
        assert labels["workload"] in text
        assert f"GPU {labels['gpu']}" in text
        assert re.search(r"\d[KMGT]iB|\dm \d+s", text), text
        assert not re.search(r"no value|error|NaN|{{|}}", text), text
    assert labels["pid"] in annotations["description"]
    with urllib.request.urlopen(annotations["runbook_url"], timeout=patient(30)) as answer:
        assert labels["alertname"] in answer.read().decode()
