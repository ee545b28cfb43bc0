from __future__ import annotations

import dataclasses
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from gpumem_exporter.core.readings import DeviceReading
from gpumem_exporter.core.samples import ProcessKey, SilentReporter, Snapshot
from gpumem_exporter.node.poller import PollerStatus, ReleaseRequest
from gpumem_exporter.page.health import Health, HealthDocument
from gpumem_exporter.page.live import NodeView
from tests.support.builders.builders import UUIDS, Clock, device, node, reporting
from tests.support.servers.running_exporter import running_exporter
from tests.support.waiting import wait_until_equal

WELL = PollerStatus(alive=True, polls=3, busy_seconds=None, stuck=False, error="")


def health(snapshot: Snapshot, **poller: Any) -> HealthDocument:
    polling: Any = SimpleNamespace(status=lambda _: dataclasses.replace(WELL, **poller))
    return Health(polling, source="nvml", version="1.2.3", checks={}).document(snapshot)


def test_a_healthy_node_is_ok() -> None:
    snapshot = Snapshot(0.0, node(device(UUIDS[0]), device(UUIDS[1], gpu="1")), (reporting(),))
    document = health(snapshot)
    assert document["status"] == "ok"
    assert document["nvml"] == {"up": True, "error": "", "released": False}
    assert (document["devices"], document["processes"]) == (2, 1)
    assert (document["version"], document["source"]) == ("1.2.3", "nvml")
    assert {check["status"] for check in document["checks"].values()} == {"ok"}
    down = dataclasses.replace(node(up=False), error="released on request by ada")
    document = health(Snapshot(0.0, down), release=ReleaseRequest("ada", 0.0))
    assert document["nvml"] == {"up": False, "error": down.error, "released": True}


LOST = DeviceReading(gpu="1", uuid=UUIDS[1], error="GPU is lost")
SILENT = SilentReporter(ProcessKey(1, 2), 2, 3, "w", "0", 0.0, 0.0)


@pytest.mark.parametrize(
    ("snapshot", "poller", "status", "check", "detail"),
    [
        (Snapshot(0.0, dataclasses.replace(node(up=False), error="no driver")), {}, "degraded", "nvml", "no driver"),
        (Snapshot(0.0, None), {"polls": 0}, "degraded", "nvml", "not answered"),
        (Snapshot(0.0, node(device(), LOST)), {}, "degraded", "devices", r"\b1 of 2\b.*\b1: GPU is lost"),
        (Snapshot(0.0, None), {"alive": False, "error": "boom"}, "failing", "poller", "boom"),
        (Snapshot(0.0, None), {"stuck": True, "busy_seconds": 61.0}, "failing", "poller", "61 s"),
        (Snapshot(0.0, node(device()), silent=(SILENT,)), {}, "ok", "reports", r"\b1\b.*\bsilent"),
    ],
)
def test_a_check_shows_what_is_wrong(
    snapshot: Snapshot, poller: dict[str, Any], status: str, check: str, detail: str
) -> None:
    document = health(snapshot, **poller)
    assert (document["status"], document["checks"][check]["status"]) == (status, status)
    assert re.search(detail, document["checks"][check]["detail"])


def test_an_invalid_token_file_is_degraded_until_it_is_fixed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "token"
    path.write_text("secret")
    path.chmod(0o600)
    clock = Clock(1000.0)
    with running_exporter(action_token_file=str(path), clock=clock, wall_clock=clock) as exporter:
        wait_until_equal(lambda: exporter.sample("gpumem_health_check_ok", check="tokens"), 1, "the metric")
        path.chmod(0o644)
        wait_until_equal(lambda: exporter.sample("gpumem_health_check_ok", check="tokens"), 0, "the metric")
        check = exporter.document("/health")["checks"]["tokens"]
        assert check["status"] == "degraded"
        assert check["detail"].startswith("token: every user may read the file;")
        assert exporter.sample("gpumem_health_check_ok", check="poller") == 1
        clock.now += 4.0  # a finding that is absent for longer starts again
        (finding,) = [each for each in exporter.document("/api/v1/live")["findings"] if "tokens" in str(each)]
        assert finding["since_unix_seconds"] == 1000.0, "it was noticed before anybody looked"
        monkeypatch.delattr(NodeView, "notice")  # the metric does not depend on the findings
        path.chmod(0o600)
        wait_until_equal(lambda: exporter.sample("gpumem_health_check_ok", check="tokens"), 1, "the metric")
