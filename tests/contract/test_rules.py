"""The rules for Prometheus, their runbooks, and Alertmanager's configuration.

Each alert has a file of promtool tests in rules/.
"""

from __future__ import annotations

import json
import re
import urllib.request
from collections.abc import Mapping
from functools import cache, partial
from pathlib import Path
from typing import Any

import promql_parser as promql
import pytest
import yaml

from gpumem_exporter.core.event import EVENT_TYPES
from gpumem_exporter.page.findings import SEVERITIES, SEVERITY
from tests.support.paths import REPOSITORY
from tests.support.processes.running_command import promtool_check, promtool_tests, run_tool
from tests.support.servers.alertmanagers import Receiver, alertmanager, receiving
from tests.support.truth.metrics_list import METRICS
from tests.support.truth.panel_queries import nodes
from tests.support.waiting import patient, wait_for, wait_until_equal

RULES = REPOSITORY / "deploy" / "prometheus" / "rules"
RUNBOOKS = REPOSITORY / "docs" / "runbooks"
ALERTMANAGER = REPOSITORY / "deploy" / "alertmanager" / "alertmanager.yml"
TESTS = Path(__file__).parent / "rules"

KINDS = ("fires", "silent", "resolves")
FOREIGN = {"up", "process_resident_memory_bytes", "process_open_fds", "process_start_time_seconds"}
"""Metrics of other projects that rules and runbooks may use."""
TARGET_LABELS = {"cluster", "job", "instance"}
"""The labels that Prometheus adds to every series."""
FILES = ("recording.yml", "alerts.yml", "optional/coverage.yml", "optional/inactive.yml", "optional/kv-cache.yml")
"""The rule files in the order of their evaluation."""
LEVELS = "process|device|node|rank|workload|slurm_job|ray_job|pod|namespace|cluster|owner"
"""The first parts of the names of recording rules."""
CATALOG = {metric.name: metric for metric in METRICS}
KINDS_OF_FINDINGS = {
    "GpuMemOomEndedProcess": "oom_ended_process",
    "GpuMemOomSoon": "growth",
    "GpuMemLeak": "growth",
    "GpuMemNonTorchGrowth": "growth",
    "GpuMemServerGrowth": "growth",
    "GpuMemFragmentationHigh": "fragmented",
    "GpuMemReclaimableHoarded": "idle_cache_lacked",
    "GpuMemUnattributed": "unattributed",
    "GpuMemProcessOrphaned": "orphan",
    "GpuMemDeviceLost": "device_lost",
    "GpuMemNvmlDown": "driver",
    "GpuMemReporterSilent": "silent",
    "GpuMemKvCacheUnused": "kv_cache",
    "GpuMemInactive": "inactive",
    "GpuMemExporterDegraded": "check_degraded",
    "GpuMemExporterAbsent": "check_failing",
}
"""The finding that the live page shows for the state that an alert is about."""


@cache
def groups(file: str) -> list[dict[str, Any]]:
    """Return the groups of a rule file."""
    loaded: list[dict[str, Any]] = yaml.safe_load((RULES / file).read_text())["groups"]
    return loaded


EVERY_RULE = [rule for file in FILES for group in groups(file) for rule in group["rules"]]
ALERTS: dict[str, dict[str, Any]] = {rule["alert"]: rule for rule in EVERY_RULE if "alert" in rule}
RECORDS: dict[str, dict[str, Any]] = {rule["record"]: rule for rule in EVERY_RULE if "record" in rule}


# --- Rules


def test_prometheus_loads_the_rules_and_has_their_job() -> None:
    configuration = yaml.safe_load((REPOSITORY / "deploy" / "prometheus" / "prometheus.yml").read_text())
    assert configuration["rule_files"] == ["rules/*.yml"]
    assert "gpumem" in [job["job_name"] for job in configuration["scrape_configs"]]
    assert configuration["global"]["scrape_interval"] == "15s"
    jobs = {job for alert in ALERTS.values() for job in re.findall(r"job!?=\"([^\"]*)\"", alert["expr"])}
    assert jobs == {"gpumem"}


def test_rules_and_runbooks_use_only_metrics_of_the_catalog() -> None:
    texts = {path.name: path.read_text() for path in (*RULES.rglob("*.yml"), *RUNBOOKS.glob("*.md"))}
    assert len(texts) == len(FILES) + len(ALERTS) + 1
    for file, text in texts.items():
        # Names of recording rules contain names of metrics, so they are removed first.
        recorded = re.findall(rf"\b(?:{LEVELS}):\w+:\w+", text)
        assert set(recorded) <= RECORDS.keys(), file
        plain = re.sub(rf"\b(?:{LEVELS}):\w+:\w+", "", text)
        named = {name for name in re.findall(r"\bgpumem_[a-z0-9_]+\b", plain) if name != "gpumem_exporter"}
        buckets = {f"{name}_bucket" for name, metric in CATALOG.items() if metric.type == "histogram"}
        assert named <= CATALOG.keys() | buckets, file
        foreign = set(re.findall(r"\b(?:up|process_[a-z0-9_]+)(?=[{\[])", plain))
        assert foreign <= FOREIGN, file


def loses_the_cluster(expression: str) -> list[str]:
    """Return the joins and sums of an expression that merge clusters, jobs or nodes with equal names."""
    found = []
    for node, _ in nodes(promql.parse(expression)):
        if isinstance(node, promql.AggregateExpr):
            labels = node.modifier.labels if node.modifier else []
            kept = node.modifier is not None and node.modifier.type == promql.AggModifierType.Without
        elif isinstance(node, promql.BinaryExpr) and node.modifier is not None and node.modifier.matching is not None:
            labels = node.modifier.matching.labels
            kept = node.modifier.matching.type == promql.LabelModifierType.Exclude
        else:
            continue
        if kept and TARGET_LABELS & set(labels):
            found.append(f"{labels} are dropped: {node}")
        elif not kept and (labels[:1] != ["cluster"] or not {"job", "host"} & set(labels)):
            found.append(f"{labels} do not have `cluster` first, and `job`: {node}")
        elif not kept and {"pid", "uuid"} & set(labels) and "instance" not in labels:
            found.append(f"{labels} do not have `instance`: {node}")
    return found


@pytest.mark.parametrize("rule", EVERY_RULE, ids=lambda rule: rule.get("alert") or rule["record"])
def test_a_rule_keeps_clusters_apart(rule: dict[str, Any]) -> None:
    expression = str(rule["expr"])
    assert loses_the_cluster(expression) == []
    for place in re.finditer(r"(?<=\()cluster, ", expression):
        assert loses_the_cluster(expression[: place.start()] + expression[place.end() :]), place


def test_the_texts_of_an_alert_ask_only_about_its_own_cluster_and_node() -> None:
    for name, rule in ALERTS.items():
        for text in rule["annotations"].values():
            asked = re.findall(r'query \(printf "((?:[^"\\]|\\.)*)"', text)
            # Each selector starts with one of the variables that are defined at the start.
            assert all(selector.startswith("%s") for query in asked for selector in re.findall(r"\{([^}]*)", query)), (
                name
            )
            defined = re.findall(r':= printf "([^"]*)"((?: [$.\w]+)+)', text)
            for selector, values in defined:
                assert selector.startswith(("cluster=%q,job=%q,", "%s,pid=%q")), name
                assert values.startswith((" $labels.cluster $labels.job ", " $device ")), name
            assert len(defined) == text.count(":= printf")


def test_an_alert_about_a_process_has_its_owner() -> None:
    """Its expression joins the owner; the tests of each alert evaluate that."""
    owned = {name for name, rule in ALERTS.items() if "user, k8s_namespace" in rule["expr"]}
    about = {name for name, rule in ALERTS.items() if re.search(r"\$labels\.(pid|workload)\b", str(rule))}
    assert owned == about
    assert len(owned) > 10


def test_the_severities_are_those_of_the_findings() -> None:
    severities = {kind: ALERTS[name]["labels"]["severity"] for name, kind in KINDS_OF_FINDINGS.items()}
    assert severities == {kind: SEVERITY[kind] for kind in severities}
    assert {rule["labels"]["severity"] for rule in ALERTS.values()} == set(SEVERITIES)
    # What is no finding: caught errors are findings and no alerts, and advice about capacity is an alert alone.
    assert severities.keys() == SEVERITY.keys() - {
        "oom_caught",
        "idle_cache",
        "inactive_lacked",
        "orphan_small",
        "starting",
        "starting_together",
        "unreported",
    }


# --- Runbooks


def test_every_alert_has_a_runbook_and_every_runbook_an_alert() -> None:
    assert {path.stem for path in RUNBOOKS.glob("*.md")} - {"README"} == ALERTS.keys()


def test_runbooks_query_existing_types_of_events() -> None:
    queried = {kind for path in RUNBOOKS.glob("*.md") for kind in re.findall(r"[?&]type=(\w+)", path.read_text())}
    assert queried
    assert queried <= set(EVENT_TYPES)


def runbook_queries(path: Path) -> list[str]:
    blocks = re.findall(r"^```promql\n(.*?)^```", path.read_text(), flags=re.MULTILINE | re.DOTALL)
    return [query for block in blocks for query in block.strip().split("\n\n")]


@pytest.mark.tools
def test_the_query_for_lost_devices_excludes_devices_with_a_new_index(tmp_path: Path) -> None:
    query = runbook_queries(RUNBOOKS / "GpuMemDeviceLost.md")[1]

    ups = {(0, "a"): "1x20", (1, "b"): "1x5 stale", (2, "c"): "1x5 stale", (1, "c"): "_x8 1x10"}
    device = '{{job="gpumem",instance="NODE:9844",gpu="{}",uuid="GPU-{}"}}'
    lost = {f"gpumem_device_up{device.format(*key)}": values for key, values in ups.items()}
    checks = [promtool_check(query, 18 * 60, {device.format(1, "b"): 1})]
    promtool_tests(tmp_path, {"input_series": lost, "promql_expr_test": checks}, interval="1m")


@pytest.mark.tools
def test_every_query_of_a_runbook_is_valid() -> None:
    queries = [query for path in sorted(RUNBOOKS.glob("*.md")) for query in runbook_queries(path)]
    assert len(queries) >= len(ALERTS)
    rules = [{"record": f"query:{number}", "expr": query} for number, query in enumerate(queries)]
    queries_as_rules = yaml.safe_dump({"groups": [{"name": "queries", "rules": rules}]})
    checked = run_tool("promtool", "check", "rules", "/dev/stdin", stdin=queries_as_rules)
    assert checked.returncode == 0, checked.stdout + checked.stderr


# --- Tests of the alerts


@pytest.mark.parametrize("name", ALERTS)
def test_an_alert_has_tests_for_firing_staying_silent_and_resolving(name: str) -> None:
    tests = yaml.safe_load((TESTS / f"{name}.yml").read_text())["tests"]
    assert {test["name"].partition(":")[0] for test in tests} == set(KINDS)
    assert {case["alertname"] for test in tests for case in test["alert_rule_test"]} == {name}


@pytest.mark.tools
def test_every_alert_passes_its_tests(tmp_path: Path) -> None:
    """Each file runs with the rules that it needs: all rules take seven times longer."""
    files = []
    for path in TESTS.glob("*.yml"):
        document = yaml.safe_load(path.read_text())
        needed = needed_rules(json.dumps(document["tests"]))
        kept = [
            {**group, "rules": [rule for rule in group["rules"] if (rule.get("alert") or rule["record"]) in needed]}
            for file in FILES
            for group in groups(file)
        ]
        kept = [group for group in kept if group["rules"]]
        rules = tmp_path / f"rules-{path.name}"
        rules.write_text(json.dumps({"groups": kept}))  # JSON is YAML
        order = [group["name"] for group in kept]
        files.append(tmp_path / path.name)
        files[-1].write_text(json.dumps({**document, "rule_files": [rules.name], "group_eval_order": order}))
    ran = run_tool("promtool", "test", "rules", *files)
    assert ran.returncode == 0, ran.stdout + ran.stderr


def needed_rules(text: str) -> set[str]:
    """Return the names of the rules that a text names, and of all rules that these rules need."""
    found: set[str] = set()
    left = [text]
    while left:
        text = left.pop()
        new = set(re.findall(r"[\w:]+", text)) & (ALERTS.keys() | RECORDS.keys()) - found
        found |= new
        left += [str(ALERTS.get(name) or RECORDS[name]) for name in new]
    return found


# --- Alertmanager


ROUTES = [
    ({"severity": "critical"}, "page"),
    ({"severity": "warning"}, "tickets"),
    ({"severity": "critical", "user": "ann"}, "owners"),
    ({"severity": "warning", "k8s_namespace": "ml"}, "namespaces"),
    ({"severity": "critical", "user": "root", "k8s_namespace": "ml"}, "namespaces"),
]


@pytest.mark.parametrize(("labels", "receiver"), ROUTES)
@pytest.mark.tools
def test_an_alert_reaches_its_owner_or_else_the_receiver_of_its_severity(labels: dict[str, str], receiver: str) -> None:
    given = [f"{name}={value}" for name, value in {"alertname": "GpuMemX", **labels}.items()]
    routed = run_tool("amtool", "config", "routes", "test", f"--config.file={ALERTMANAGER}", *given)
    assert routed.stdout.split() == [receiver], routed.stderr


def alert(name: str, instance: str = "node-1:9844", **labels: str) -> dict[str, Any]:
    """Return an alert as Prometheus sends it."""
    severity = ALERTS[name]["labels"]["severity"]
    return {"labels": {"alertname": name, "job": "gpumem", "instance": instance, "severity": severity, **labels}}


def of_process(name: str, pid: str, *, user: str = "ann", cluster: str = "east") -> dict[str, Any]:
    owner = {"user": user, "k8s_namespace": "ml", "workload": "train", "cluster": cluster}
    return alert(name, "node-4:9844", uuid="GPU-e", pid=pid, **owner)


@pytest.mark.tools
def test_an_alert_inhibits_its_effects_on_the_same_node_device_and_process(tmp_path: Path) -> None:
    sent = {
        "the driver": alert("GpuMemNvmlDown"),
        "a device of that node": alert("GpuMemDeviceLost", gpu="0", uuid="GPU-a"),
        "a device of another node": alert("GpuMemDeviceLost", "node-2:9844", gpu="0", uuid="GPU-b"),
        "a device of another cluster": alert("GpuMemDeviceLost", cluster="west", gpu="0", uuid="GPU-a"),
        "a process that outlived itself": alert("GpuMemProcessGoneMemoryHeld", "node-3:9844", gpu="0", uuid="GPU-c"),
        "its memory": alert("GpuMemUnattributed", "node-3:9844", gpu="0", uuid="GPU-c"),
        "other memory": alert("GpuMemUnattributed", "node-3:9844", gpu="1", uuid="GPU-d"),
        "a forecast": of_process("GpuMemOomSoon", "7"),
        "the leak behind it": of_process("GpuMemLeak", "7"),
        "the growth behind it": of_process("GpuMemNonTorchGrowth", "7"),
        "the retries before it": of_process("GpuMemAllocatorRetrying", "7"),
        "the leak of another process": of_process("GpuMemLeak", "8"),
        "the leak of that pid in another cluster": of_process("GpuMemLeak", "7", cluster="west", user="bob"),
        "an error that ended its process": of_process("GpuMemOomEndedProcess", "9"),
        "its forecast": of_process("GpuMemOomSoon", "9"),
        "fragmentation": of_process("GpuMemFragmentationHigh", "10"),
        "its retries": of_process("GpuMemAllocatorRetrying", "10"),
        "no exporter": alert("GpuMemExporterAbsent", "node-5:9844", host="node-5"),
        "what it reported last": alert("GpuMemLeak", "node-5:9844", uuid="GPU-f", pid="7"),
        "an idle job": alert("GpuMemReporterSilent", "node-1:9844", pid="7"),
        "a lost device": alert("GpuMemDeviceLost", "node-6:9844", uuid="GPU-g"),
        "its unattributed memory": alert("GpuMemUnattributed", "node-6:9844", uuid="GPU-g"),
    }
    silenced = {
        *("a device of that node", "its memory", "the leak behind it", "the growth behind it", "the retries before it"),
        *("its forecast", "its retries", "what it reported last", "its unattributed memory"),
    }
    with receiving() as receiver, alertmanager(tmp_path, receiver.url, times=20) as address:
        url = f"http://{address}/api/v2/alerts"
        post(url, list(sent.values()))
        wait_until_equal(lambda: _silenced(url, sent), silenced, "the alerts that others silence")
        for name, labels in (("namespaces", {"user": "ann"}), ("namespaces", {"user": "bob"}), ("page", {})):
            sent_to = partial(notifications_to, receiver, name, labels)
            alerts = [each for notification in wait_for(sent_to, f"{name} {labels}") for each in notification["alerts"]]
            assert {each["labels"].get("user") for each in alerts} == {labels.get("user")}
        notified = {
            (each["labels"]["alertname"], each["labels"]["pid"])
            for notification in receiver.notifications
            if notification["groupLabels"].get("user") == "ann"
            for each in notification["alerts"]
        }
    assert notified == {
        ("GpuMemOomSoon", "7"),
        ("GpuMemLeak", "8"),
        ("GpuMemOomEndedProcess", "9"),
        ("GpuMemFragmentationHigh", "10"),
    }


def notifications_to(receiver: Receiver, name: str, labels: dict[str, str]) -> list[Mapping[str, Any]]:
    """Return the notifications of a receiver of the configuration about groups with these labels."""
    return [
        each
        for each in receiver.notifications
        if each["receiver"] == name and labels.items() <= each["groupLabels"].items()
    ]


def post(url: str, body: Any) -> None:
    request = urllib.request.Request(url, json.dumps(body).encode(), {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=patient(30)):
        pass


def _silenced(url: str, sent: dict[str, Any]) -> set[str] | None:
    """Return the inhibited ones of the sent alerts; None until Alertmanager has all of them."""
    with urllib.request.urlopen(url, timeout=patient(30)) as answer:
        known = json.load(answer)
    if len(known) != len(sent):
        return None
    labels = [one["labels"] for one in known if one["status"]["inhibitedBy"]]
    return {what for what, one in sent.items() if one["labels"] in labels}
