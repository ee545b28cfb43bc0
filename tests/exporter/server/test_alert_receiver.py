from __future__ import annotations

import pytest

from gpumem_exporter.actions.caller import Caller, CallerKind, Rights
from gpumem_exporter.server.api import alerts
from gpumem_exporter.server.api.alerts import AlertBody
from tests.support.dispatching import Bench

ROOT = Caller(CallerKind.UNIX, Rights.ALL, uid=0)


def test_the_least_recently_seen_alert_is_forgotten_at_the_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(alerts, "MAX_REMEMBERED", 2)
    bench = Bench()
    receiver = alerts.AlertReceiver(bench.dispatcher, lambda: bench.now, lambda: 0.0)

    def outcome_of(fingerprint: str) -> str:
        labels = {"gpumem_action": "reset_peak", "gpumem_target_pid": "1"}
        sent = {"status": "firing", "labels": labels, "startsAt": "monday", "fingerprint": fingerprint}
        return receiver.take(AlertBody.model_validate(sent), ROOT)["outcome"]

    assert [outcome_of(each) for each in ("a", "b", "a", "c")] == ["acted", "acted", "repeated", "acted"]
    assert list(receiver.acted) == ["a", "c"]
