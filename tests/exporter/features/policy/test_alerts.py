from __future__ import annotations

import json
import time
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import pytest

from gpumem_exporter.actions.action_options import DEFAULT_ACTIONS, Target
from gpumem_exporter.actions.rate_limits import RateLimits
from gpumem_exporter.core.caller import Caller, CallerKind, Rights
from gpumem_exporter.edge.problems import ProblemError
from gpumem_exporter.edge.request_guard import OwnNames
from gpumem_exporter.features.policy import alerts
from gpumem_exporter.features.policy.alerts import MAX_ALERTS, AlertReceiver, read_alerts
from gpumem_exporter.features.policy.evaluation import PolicyEvaluator
from gpumem_exporter.features.policy.policy_metrics import PolicyMetrics
from gpumem_exporter.features.policy.policy_runner import PolicyRunner
from gpumem_exporter.metrics.instruments import Registry
from tests.support.builders import MIB, UUIDS, sample
from tests.support.dispatching import Bench
from tests.support.policies import alert_rule, written

FIRING: dict[str, Any] = {
    "status": "firing",
    "labels": {"alertname": "Hoarded", "gpu": "0"},
    "startsAt": "2026-01-02T03:04:05.678901234Z",
    "fingerprint": "0123456789abcdef",
}
MESSAGE: dict[str, Any] = {"version": "4", "alerts": [FIRING]}
ROOT = Caller(CallerKind.UNIX, Rights.ALL, uid=0)
PID_1 = {"pid": "1", "uuid": UUIDS[0], "workload": "train"}


class Node(Bench):
    """A node with rules that only alerts trigger, and a receiver of alerts."""

    def __init__(self, folder: Path, *rules: dict[str, Any], complete_seconds: float = 0.0, **changes: Any) -> None:
        super().__init__()
        self.dispatcher = self.build(**changes)
        self.names = OwnNames(["node-1", "node-1.example.org", "0.0.0.0"])
        self.policies = PolicyRunner(
            written(folder / "policy.yml", *(rules or (alert_rule(),))),
            allowed=frozenset(DEFAULT_ACTIONS),
            dispatcher=self.dispatcher,
            snapshot=self.snapshot,
            stale_seconds=5.0,
            metrics=PolicyMetrics(Registry()),
            record=lambda _: None,
            wall_clock=time.time,
        )
        self.receiver = AlertReceiver(
            self.dispatcher,
            self.policies,
            self.snapshot,
            clock=lambda: self.now,
            wall_clock=time.time,
            complete_seconds=complete_seconds,
        )
        self.started = datetime.now(timezone.utc).isoformat()

    def snapshot(self) -> Any:
        return self.store.snapshot(self.now)

    def send(
        self,
        labels: dict[str, str],
        rule: str = "tidy",
        starts_at: str = "",
        fingerprint: str = "a",
        status: str = "firing",
        **annotations: str,
    ) -> tuple[str, str, float | None]:
        """Send one alert; return its outcome, the reason, and the seconds until it should be repeated."""
        named = {**labels, "alertname": "Hoarded", **({"gpumem_rule": rule} if rule else {})}
        alert = {"status": status, "labels": named, "annotations": annotations, "fingerprint": fingerprint}
        message = {"version": "4", "alerts": [{**alert, "startsAt": starts_at or self.started}]}
        (read,) = read_alerts(json.dumps(message).encode()).alerts
        here = self.names.name_this_node(labels.get("instance", ""), "10.1.2.3")
        outcome, retry_seconds = self.receiver.take(read, ROOT, of_this_node=here)
        return outcome["outcome"], outcome["reason"], retry_seconds

    def targets(self) -> list[Target]:
        return sorted((action.target for action in self.dispatcher.recent()), key=str)

    def end(self, outcome: str = "done") -> None:
        """End the last action with an outcome."""
        (action, *_) = self.dispatcher.recent()
        process = self.first if action.target == Target(pid=1) else self.second
        self.dispatcher.commands(process)
        self.answer(process, action, outcome)


@pytest.fixture
def node(tmp_path: Path) -> Node:
    return Node(tmp_path)


def test_fields_of_a_later_alertmanager_are_ignored() -> None:
    later = {**MESSAGE, "new": 1, "alerts": [{**FIRING, "newer": [], "labels": {}}]}
    assert read_alerts(json.dumps(later).encode()).alerts[0].name == FIRING["fingerprint"]


@pytest.mark.parametrize(
    ("spoil", "field"),
    [
        (lambda m: m.update(version=4), "version"),
        (lambda m: m.update(alerts=[FIRING] * (MAX_ALERTS + 1)), "alerts"),
        (lambda m: m["alerts"][0].update(status="pending"), "alerts.0.status"),
        (lambda m: m["alerts"][0].update(startsAt="monday"), "alerts.0.startsAt"),
        (lambda m: m["alerts"][0].update(fingerprint="a b"), "alerts.0.fingerprint"),
    ],
)
def test_an_invalid_message_is_refused_with_the_invalid_field(spoil: Any, field: str) -> None:
    message = json.loads(json.dumps(MESSAGE))
    spoil(message)
    with pytest.raises(ProblemError) as refused:
        read_alerts(json.dumps(message).encode())
    assert (refused.value.status, refused.value.errors[0].field) == (422, field)


def test_an_alert_lets_its_rule_act_on_the_process_of_its_labels(node: Node) -> None:
    node.policies.tick()
    assert not node.targets(), "without an alert, the rule does not act"
    assert node.send(PID_1)[0] == "acted"
    assert node.targets() == [Target(pid=1)]
    (action,) = node.dispatcher.recent()
    assert (action.action, action.requested_by) == ("empty_cache", f"alert:Hoarded by {ROOT}")
    assert action.reason.startswith("alert Hoarded (a): slack_bytes 4.0 MiB")
    node.policies.tick()
    assert node.targets() == [Target(pid=1)]


@pytest.mark.parametrize(
    ("labels", "targets"),
    [
        ({"uuid": UUIDS[1]}, [Target(pid=2)]),  # of process 1, the other device meets the condition
        ({"uuid": UUIDS[1], "rank": "0"}, []),
        ({"instance": "node-1:9844"}, [Target(pid=1), Target(pid=2)]),
        ({"instance": "10.1.2.3:9844", "pid": "2"}, [Target(pid=2)]),
        ({"instance": "node-1.example.org:9844", "gpu": "0"}, [Target(pid=1)]),
    ],
)
def test_labels_narrow_the_rule(node: Node, labels: dict[str, str], targets: list[Target]) -> None:
    assert node.send(labels)[0] == ("acted" if targets else "waiting")
    assert node.targets() == targets


@pytest.mark.parametrize(
    "labels",
    [
        {"pid": "1"},
        {"pid": "1", "instance": "node-2:9844"},
        {"pid": "1", "instance": "localhost:9844"},  # may be of any node
        {"pid": "1", "instance": "0.0.0.0:9844"},
        {"pid": "1", "instance": "10.1.2.4:9844"},
        {"workload": "train"},
        {**PID_1, "uuid": "GPU-of-another-node"},
        {**PID_1, "workload": "other"},
        {**PID_1, "rank": "7"},
        {**PID_1, "pid": "2"},  # which does not use the device
    ],
)
def test_an_alert_that_may_be_of_another_node_or_process_is_refused(node: Node, labels: dict[str, str]) -> None:
    assert node.send(labels)[0] == "refused"
    assert not node.targets()


def test_a_process_younger_than_the_alert_is_not_its_process(node: Node) -> None:
    outcome, reason, _ = node.send(PID_1, starts_at="2001-01-01T00:00:00Z")
    assert outcome == "refused"
    assert "pid 1" in reason
    assert "2001-01-01" in reason
    node.put(3, start_time_ticks=0, devices=node.first.report.devices)
    unknown = {"pid": "3", "uuid": UUIDS[0]}
    assert "unknown" in node.send(unknown, fingerprint="b")[1]
    assert not node.targets()


def test_a_rule_acts_on_the_older_processes_of_a_device(tmp_path: Path) -> None:
    node = Node(tmp_path)
    node.put(3, rank="2", start_time_ticks=10**12, devices=(sample(UUIDS[1], 0, 16 * MIB),))
    assert node.send({"uuid": UUIDS[1]})[0] == "acted"
    assert node.targets() == [Target(pid=2)]


def test_a_rule_acts_only_if_the_process_qualifies_now(tmp_path: Path) -> None:
    changes: dict[str, Any] = {"for": "3s", "workloads": ["train"], "when": {"slack_bytes": {"over": "3MiB"}}}
    node = Node(tmp_path, alert_rule(**changes))

    def outcome(slack: int, **changes: Any) -> tuple[str, str]:
        node.now += 2
        node.put(1, devices=(sample(UUIDS[0], 8 * MIB, slack),), **changes)
        node.policies.tick()
        return node.send({"pid": "1", "uuid": UUIDS[0]})[:2]

    assert outcome(0) == ("waiting", "the rule tidy does not act now: a condition is false or its value is unknown")
    assert outcome(4 * MIB, workload="eval")[0] == "waiting", "the rule is not for its workload"
    assert outcome(4 * MIB)[0] == "waiting", "for too short a time"
    assert outcome(4 * MIB)[0] == "waiting", "for too short a time"
    assert outcome(4 * MIB)[0] == "acted"


@pytest.mark.parametrize(
    ("rule", "annotations", "named"),
    [
        ("absent", {}, ("'absent'", "tidy")),
        ("tidy", {"gpumem_dry_run": "true"}, ("gpumem_dry_run", "gpumem_rule")),
        ("tidy", {"gpumem_rule": "other"}, ("gpumem_rule", "label", "annotation")),
        ("", {"gpumem_action": "empty_cache", "gpumem_target_pid": "1"}, ("gpumem_action", "rule", "gpumem_rule")),
    ],
)
def test_an_alert_with_an_unknown_rule_or_with_options_is_refused(
    node: Node, rule: str, annotations: dict[str, str], named: tuple[str, ...]
) -> None:
    outcome, reason, retry_seconds = node.send(PID_1, rule, **annotations)
    assert (outcome, retry_seconds) == ("refused", None)
    assert [part for part in named if part not in reason] == [], reason


def test_without_a_policy_file_a_rule_is_refused(node: Node) -> None:
    node.receiver.policies = None
    assert "--policy.file" in node.send(PID_1)[1]


def test_a_firing_counts_as_acted_once_an_action_is_done(tmp_path: Path) -> None:
    node = Node(tmp_path, alert_rule(cooldown="1s", stop_after="never"))
    for outcome in ("expired", "done"):
        assert node.send(PID_1)[0] == "acted"
        assert node.send(PID_1)[0] == "repeated", "while the action runs"
        node.end(outcome)
        node.now += 2
        node.first = node.put(1, rank="0", devices=node.first.report.devices)
        node.policies.tick()
    assert node.send(PID_1)[0] == "repeated"
    later = datetime.now(timezone.utc).isoformat()
    assert node.send(PID_1, starts_at=later)[0] == "acted", "another firing"
    assert len(node.targets()) == 3


def test_a_dry_run_of_a_rule_acts_once_per_firing(tmp_path: Path) -> None:
    node = Node(tmp_path, alert_rule(dry_run=True))
    assert [node.send(PID_1)[0] for _ in range(2)] == ["acted", "repeated"]
    (action,) = node.dispatcher.recent()
    assert action.dry_run


def test_an_unknown_target_is_asked_for_again_only_soon_after_the_start(tmp_path: Path) -> None:
    node = Node(tmp_path, complete_seconds=115.0)
    absent = {"pid": "3", "uuid": UUIDS[0]}
    outcome, _, retry_seconds = node.send(absent)
    assert (outcome, retry_seconds) == ("refused", 15.0)
    node.put(3, devices=(sample(UUIDS[0], 0, 16 * MIB),))
    assert node.send(absent)[0] == "acted"
    node.now = 115.0
    assert node.send({**absent, "pid": "4"}, fingerprint="b")[::2] == ("refused", None)


def test_a_rate_limit_is_tried_again_and_costs_no_cooldown(tmp_path: Path) -> None:
    clock = {"now": 100.0}
    limits = RateLimits(per_caller=1, per_process=10, clock=lambda: clock["now"])
    changes: dict[str, Any] = {
        "for": "1s",
        "cooldown": "1h",
        "max_per_hour": 1,
        "when": {"slack_bytes": {"over": "3MiB"}},
    }
    node = Node(tmp_path, alert_rule(**changes), limits=limits)
    limits.take("alert:Hoarded", ())
    node.policies.tick()
    node.now += 1.5
    node.first = node.put(1, rank="0", devices=node.first.report.devices)
    outcome, _, retry_seconds = node.send(PID_1)
    assert outcome == "refused"
    assert retry_seconds is not None
    node.now += retry_seconds
    clock["now"] += retry_seconds
    node.first = node.put(1, rank="0", devices=node.first.report.devices)
    assert node.send(PID_1)[0] == "acted"


def test_the_least_recently_seen_alert_is_forgotten_at_the_limit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(alerts, "MAX_REMEMBERED", 2)
    node = Node(tmp_path, alert_rule(dry_run=True))
    outcomes = []
    for each in ("a", "b", "a", "c", "a", "b"):
        node.policies.evaluator = PolicyEvaluator(
            node.policies.evaluator.rules, stale_seconds=5.0, held_back=lambda *_: False
        )
        outcomes.append(node.send(PID_1, fingerprint=each)[0])
    assert outcomes == ["acted", "acted", "repeated", "acted", "repeated", "acted"]
