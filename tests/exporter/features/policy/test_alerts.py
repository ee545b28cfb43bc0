from __future__ import annotations

import json
import time
from collections.abc import Mapping
from datetime import datetime, timezone
from pathlib import Path
from types import MappingProxyType
from typing import Any

import pytest

from gpumem_exporter.actions.action_options import Target
from gpumem_exporter.actions.rate_limits import RateLimits
from gpumem_exporter.core.caller import Caller, CallerKind, Rights
from gpumem_exporter.edge.problems import ProblemError
from gpumem_exporter.edge.request_guard import OwnNames
from gpumem_exporter.features.policy.policy_routes import AlertBody, AlertOutcome, take_alert
from gpumem_exporter.features.policy.policy_runner import EVALUATIONS, PolicyRunner
from gpumem_exporter.metrics.instruments import Counter, Registry
from tests.support.builders.builders import MIB, UNLIMITED, UUIDS, sample
from tests.support.builders.dispatching import Bench
from tests.support.builders.policies import alert_rule, written

ROOT = Caller(CallerKind.UNIX, Rights.ALL, uid=0)
PID_1 = {"pid": "1", "uuid": UUIDS[0], "workload": "train"}


class Node(Bench):
    """A node with a rule that only alerts trigger."""

    def __init__(
        self, folder: Path, limits: RateLimits = UNLIMITED, rule: Mapping[str, Any] = MappingProxyType({})
    ) -> None:
        super().__init__()
        self.dispatcher = self.build(limits=limits)
        self.names = OwnNames(["node-1", "node-1.example.org", "0.0.0.0"])
        self.policies = PolicyRunner(
            str(written(folder / "policy.yml", alert_rule(**rule))),
            dispatcher=self.dispatcher,
            snapshot=lambda: self.store.snapshot(self.now),
            stale_seconds=5.0,
            evaluations=Counter.of(EVALUATIONS, Registry()),
            record=lambda _: None,
            wall_clock=time.time,
        )
        self.started = datetime.now(timezone.utc).isoformat()

    def send(
        self,
        labels: dict[str, str],
        rule: str = "tidy",
        starts_at: str = "",
        wait_seconds: float = 0.0,
        annotations: Mapping[str, str] = MappingProxyType({}),
    ) -> AlertOutcome:
        """Send one firing alert."""
        named = {**labels, "alertname": "Hoarded", **({"gpumem_rule": rule} if rule else {})}
        alert = {"status": "firing", "labels": named, "annotations": dict(annotations), "fingerprint": "a"}
        body = AlertBody.model_validate_json(json.dumps({**alert, "startsAt": starts_at or self.started}))
        here = self.names.name_this_node(labels.get("instance", ""), "10.1.2.3")
        return take_alert(self.policies, body, ROOT, here, wait_seconds)

    def pass_time(self, seconds: float) -> None:
        self.now += seconds
        self.first = self.put(1, rank="0", devices=self.first.report.devices)
        self.policies.evaluate()

    def targets(self) -> list[Target]:
        return sorted((action.request.target for action in self.dispatcher.actions.recent()), key=str)


@pytest.fixture
def node(tmp_path: Path) -> Node:
    return Node(tmp_path)


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
    assert node.send(labels)["outcome"] == ("acted" if targets else "waiting")
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
    assert node.send(labels)["outcome"] == "refused"
    assert not node.targets()


def test_a_process_younger_than_the_alert_is_not_its_process(node: Node) -> None:
    node.put(3, start_time_ticks=0, devices=node.first.report.devices)  # its start is not known
    for labels, starts_at in ((PID_1, "2001-01-01T00:00:00Z"), ({"pid": "3", "uuid": UUIDS[0]}, "")):
        refused = node.send(labels, starts_at=starts_at)
        assert refused["outcome"] == "refused"
        assert refused["reason"].startswith(f"pid {labels['pid']}")
        assert "is not known to have started before the alert" in refused["reason"]
    node.put(4, rank="2", start_time_ticks=10**12, devices=(sample(UUIDS[1], 0, 16 * MIB),))
    assert node.send({"uuid": UUIDS[1]})["outcome"] == "acted"
    assert node.targets() == [Target(pid=2)]


def test_the_reason_says_why_a_rule_does_not_act_now(tmp_path: Path) -> None:
    node = Node(tmp_path, rule={"for": "3s", "workloads": ["train"]})
    assert "waits for the time of `for`" in node.send(PID_1)["reason"]
    node.put(1, devices=(sample(UUIDS[0], 8 * MIB, 0),))
    waiting = node.send({**PID_1, "workload": ""})
    assert waiting["outcome"] == "waiting"
    assert waiting["reason"] == "the rule tidy does not act now: a condition is false or its value is unknown"
    node.put(1, devices=node.first.report.devices, workload="eval")
    assert "not for this workload" in node.send({"pid": "1", "uuid": UUIDS[0]})["reason"]


@pytest.mark.parametrize(
    ("rule", "annotations", "named"),
    [
        ("absent", {}, ("'absent'", "tidy")),
        ("tidy", {"gpumem_dry_run": "true"}, ("gpumem_dry_run", "gpumem_rule")),
        ("", {"gpumem_action": "empty_cache", "gpumem_target_pid": "1"}, ("gpumem_action", "rule", "gpumem_rule")),
    ],
)
def test_an_alert_with_an_unknown_rule_or_with_options_is_refused(
    node: Node, rule: str, annotations: dict[str, str], named: tuple[str, ...]
) -> None:
    refused = node.send(PID_1, rule, annotations=annotations)
    assert refused["outcome"] == "refused"
    assert [part for part in named if part not in refused["reason"]] == [], refused


def test_an_alert_that_names_neither_a_rule_nor_an_action_is_ignored_whatever_its_labels(node: Node) -> None:
    ignored = node.send({**PID_1, "gpumem_team": "ml"}, rule="", annotations={"gpumem_rule": " ", "gpumem_action": ""})
    assert (ignored["outcome"], ignored["action_id"]) == ("ignored", None)
    assert "gpumem_rule" in ignored["reason"]
    assert not node.targets()


@pytest.mark.parametrize("dry_run", [False, True])
def test_a_repeated_alert_acts_again_as_the_rule_does(tmp_path: Path, dry_run: bool) -> None:
    node = Node(tmp_path, rule={"cooldown": "30s", "dry_run": dry_run, "stop_after": "never"})
    sent = []
    for seconds in (0, 1, 20, 10):
        node.pass_time(seconds)
        sent.append(node.send(PID_1)["outcome"])
        for action in node.dispatcher.actions.recent():
            node.dispatcher.commands(node.first)
            node.answer(node.first, action)
    assert sent == ["acted", "waiting", "waiting", "waiting" if dry_run else "acted"]
    assert {action.request.dry_run for action in node.dispatcher.actions.recent()} == {dry_run}


def test_an_unknown_target_is_requested_again_only_soon_after_the_start(node: Node) -> None:
    absent = {"pid": "3", "uuid": UUIDS[0]}
    with pytest.raises(ProblemError, match="pid=3") as deferred:
        node.send(absent, wait_seconds=15.0)
    assert (deferred.value.status, deferred.value.headers) == (503, {"Retry-After": "15"})
    assert node.send({"pid": "3"}, wait_seconds=15.0)["outcome"] == "refused"
    node.put(3, devices=(sample(UUIDS[0], 0, 16 * MIB),))
    assert node.send(absent, wait_seconds=15.0)["outcome"] == "acted"
    assert node.send({**absent, "pid": "4"})["outcome"] == "refused"


def test_a_refused_action_is_a_refused_alert_and_starts_the_cooldown(tmp_path: Path) -> None:
    limits = RateLimits(per_caller=1, per_process=10, clock=lambda: 100.0)
    node = Node(tmp_path, limits)
    limits.take("alert:Hoarded", ())
    assert node.send(PID_1)["outcome"] == "refused"
    assert node.send(PID_1)["outcome"] == "waiting"
