"""The dashboards as files: they equal the output of their generator, follow the rules, and show every metric."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import promql_parser as promql
import pytest
import yaml

from tests.support.paths import REPOSITORY
from tests.support.truth.metrics_list import METRICS
from tests.support.truth.panel_queries import Query, Scope, all_panels, nodes, queries, selectors

Dashboard = dict[str, Any]
Rule = Callable[[Dashboard], Iterator[str]]

VARIABLES = {
    "gpumem-fleet": ["datasource", "cluster", "node", "gpu", "user", "namespace", "workload"],
    "gpumem-node": ["datasource", "cluster", "node", "gpu", "workload", "rank"],
    "gpumem-workload": ["datasource", "cluster", "node", "workload", "rank", "gpu"],
    "gpumem-oom": ["datasource", "cluster", "node", "gpu", "workload", "rank", "pid"],
    "gpumem-exporter": ["datasource", "cluster", "node"],
    "gpumem-usage": ["datasource", "cluster", "user", "namespace", "account"],
}
RECORDED = {"gpumem-usage"}
"""Dashboards of weeks, which need the recording rules. Their series are of owners, not of nodes."""
ONE_OF = {
    "gpumem-fleet": ["one_node", "one_workload"],
    "gpumem-node": ["one_workload"],
    "gpumem-workload": ["one_node"],
    "gpumem-oom": ["one_workload"],
    "gpumem-exporter": ["one_node"],
    "gpumem-usage": [],
}
"""Hidden variables, for links from a variable with multiple values to one with a single value."""
LABELS = {metric.name: {*metric.labels, "cluster", "instance", "job"} for metric in METRICS}
COUNTERS = {metric.name for metric in METRICS if metric.type == "counter"} | {"process_cpu_seconds_total"}
RATES = {"rate", "increase"}
_TO_LIVE_PAGE = re.compile(
    r"\$\{live_page\}\$\{(node|__data\.fields\.instance)\}\$\{live_page_end\}(\?(workload|gpu)=\$\{[\w.]+:percentencode\})?"
)


def parsed(expression: str) -> Any:
    """Parse an expression; each variable is replaced by its name in angle brackets."""
    lists = (*VARIABLES.values(), *ONE_OF.values())
    names = {name: f"<{name}>" for names in lists for name in names}
    return promql.parse(Scope(0.0, variables=names).fill(expression))


def all_queries(dashboard: Dashboard) -> Iterator[Query]:
    """Yield every query, also the queries of variables."""
    yield from queries(dashboard)
    for variable in dashboard["templating"]["list"]:
        if variable["type"] == "query":
            selector = re.fullmatch(r"label_values\((.*), \w+\)", variable["query"], re.DOTALL)
            yield Query(f"{dashboard['uid']} / variable {variable['name']}", selector[1] if selector else "")


def selectors_match_variables_with_the_right_operator(dashboard: Dashboard) -> Iterator[str]:
    several = {variable["name"]: bool(variable.get("multi")) for variable in dashboard["templating"]["list"]}
    for query in all_queries(dashboard):
        for name in re.findall(r"\$\{?([a-z]+)", query.expression):
            if name not in several:
                yield f"{query.where}: there is no variable {name}"
            wanted = rf'=~"\${name}"' if several.get(name) else rf'!?="\${name}"'
            if len(re.findall(wanted, query.expression)) != len(re.findall(rf"\${name}\b", query.expression)):
                yield f"{query.where}: ${name} is not matched by {'=~' if several.get(name) else '='}"


def every_selector_has_the_cluster_and_the_node(dashboard: Dashboard) -> Iterator[str]:
    for query in all_queries(dashboard):
        for selector, _ in selectors(parsed(query.expression)):
            chosen = {matcher.name: matcher.value for matcher in selector.matchers.matchers}
            name = query.where.removeprefix(f"{dashboard['uid']} / variable ")
            if chosen.get("cluster") != "<cluster>" and name != "cluster":
                yield f"{query.where}: {selector.name} selects every cluster"
            if dashboard["uid"] in RECORDED:
                continue
            if chosen.get("instance") != "<node>" and name not in ("cluster", "node"):
                yield f"{query.where}: {selector.name} selects every node"


def selectors_have_labels_of_their_metric(dashboard: Dashboard) -> Iterator[str]:
    """A selector with another label finds no series, and a group or a join by it merges all series."""
    for query in all_queries(dashboard):
        for selector, above in selectors(parsed(query.expression)):
            used = {matcher.name for matcher in selector.matchers.matchers}
            if above and isinstance(above[-1], promql.AggregateExpr) and above[-1].modifier is not None:
                used |= set(above[-1].modifier.labels)
            unknown = used - LABELS.get(selector.name or "", used)
            if unknown:
                yield f"{query.where}: {selector.name} has no label {sorted(unknown)}"


def only_counters_have_rates(dashboard: Dashboard) -> Iterator[str]:
    for query in all_queries(dashboard):
        if "$__interval" in query.expression:
            yield f"{query.where}: $__interval may be shorter than two scrapes; use $__rate_interval"
        for selector, above in selectors(parsed(query.expression)):
            name = (selector.name or "").removesuffix("_bucket").removesuffix("_count").removesuffix("_sum")
            is_counter = selector.name in COUNTERS or name == "gpumem_action_duration_seconds"
            calls = [node.func.name for node in above if isinstance(node, promql.Call)]
            if is_counter and not (calls and calls[-1] in RATES):
                yield f"{query.where}: {selector.name} is a counter without rate() or increase()"
            if not is_counter and calls and calls[-1] in RATES:
                yield f"{query.where}: {selector.name} is not a counter, but has {calls[-1]}()"
        for window in re.findall(r"\[([^\]]*)\]", query.expression):
            if window.split(":")[0] not in ("$__rate_interval", "$__range"):
                yield f"{query.where}: the window [{window}] does not follow the time range"


def pids_are_joined_with_the_node(dashboard: Dashboard) -> Iterator[str]:
    """Without the node, joins and groups merge processes with one pid; without the cluster, nodes with one name."""
    for query in all_queries(dashboard):
        for node, _ in nodes(parsed(query.expression)):
            if isinstance(node, promql.AggregateExpr) and node.modifier is not None:
                labels = set(node.modifier.labels)
                if "pid" in labels and "instance" not in labels:
                    yield f"{query.where}: grouped by pid without instance"
                # A maximum is the value of one of the nodes with this name.
                if "instance" in labels and "cluster" not in labels and not str(node.op).startswith("max"):
                    yield f"{query.where}: grouped by instance without cluster"
            matching = node.modifier.matching if isinstance(node, promql.BinaryExpr) and node.modifier else None
            if matching is not None:
                on = set(matching.labels)
                if not {"cluster", "instance"} <= on and not (dashboard["uid"] in RECORDED and "cluster" in on):
                    yield f"{query.where}: joined on {sorted(on)}, without the node"
                about = [selector.name for selector, _ in selectors(node.rhs)]
                if about == ["gpumem_process_info"] and on != {"cluster", "instance", "pid"}:
                    yield f"{query.where}: the info of a process is joined on {sorted(on)}"


def links_keep_time_node_and_variables(dashboard: Dashboard) -> Iterator[str]:
    addresses = [
        (panel["title"], link["url"])
        for panel in all_panels(dashboard)
        for link in (
            *(panel["fieldConfig"]["defaults"].get("links") or ()),
            *(
                link
                for override in panel["fieldConfig"]["overrides"]
                for entry in override["properties"]
                if entry["id"] == "links"
                for link in entry["value"]
            ),
        )
    ]
    for annotation in dashboard["annotations"]["list"]:
        addresses += [(annotation["name"], url) for url in re.findall(r'href="([^"]+)"', annotation["textFormat"])]
    for where, url in addresses:
        if url.startswith("${live_page}"):
            if not _TO_LIVE_PAGE.fullmatch(url):
                yield f"{where}: does not lead to a live page: {url}"
            continue
        target = re.match(r"/d/([\w-]+)\?", url)
        if target is None or target[1] not in VARIABLES:
            yield f"{where}: does not lead to a dashboard: {url}"
            continue
        if "${__url_time_range}" not in url and not ("&from=" in url or ("?from=" in url and "&to=" in url)):
            yield f"{where}: loses the time: {url}"
        if "${datasource:queryparam}" not in url and "href" not in where and where != "Out of memory":
            yield f"{where}: loses the data source: {url}"
        of_nodes = dashboard["uid"] not in RECORDED and target[1] != "gpumem-workload"
        if of_nodes and not re.search(r"var-node=|\$\{node:queryparam\}", url):
            yield f"{where}: has no node: {url}"
        for name in re.findall(r"var-(\w+)=", url):
            if name not in VARIABLES[target[1]]:
                yield f"{where}: {target[1]} has no variable {name}"


RULES: dict[str, Rule] = {
    rule.__name__: rule
    for rule in (
        selectors_match_variables_with_the_right_operator,
        every_selector_has_the_cluster_and_the_node,
        selectors_have_labels_of_their_metric,
        only_counters_have_rates,
        pids_are_joined_with_the_node,
        links_keep_time_node_and_variables,
    )
}


FOLDER = REPOSITORY / "grafana"
FILES = {path.stem: path for path in sorted((FOLDER / "dashboards").iterdir())}
NAMES = tuple(FILES)

ON_NO_DASHBOARD = {
    "gpumem_device_memory_is_host": "marks an integrated GPU for queries; node and fleet show its values",
    "gpumem_process_orphan": "an alert and a finding name each orphan; its memory is with the other processes",
}
"""Metrics that no dashboard shows, with the reason."""
OF_PROMETHEUS = {"up", "scrape_duration_seconds", "scrape_samples_scraped"}
OF_THE_PROCESS = {"process_cpu_seconds_total", "process_open_fds", "process_resident_memory_bytes"}

needs_sdk = pytest.mark.skipif(sys.version_info < (3, 11), reason="Grafana's SDK needs Python 3.11")


def load(name: str) -> dict[str, Any]:
    return dict(json.loads(FILES[name].read_text(encoding="utf-8")))


@needs_sdk
def test_the_files_are_the_output_of_the_generator(tmp_path: Path) -> None:
    built = subprocess.run(
        [sys.executable, str(FOLDER / "build.py"), str(tmp_path)], capture_output=True, text=True, check=False
    )
    assert built.returncode == 0, built.stderr
    for name, path in FILES.items():
        assert (tmp_path / path.name).read_bytes() == path.read_bytes(), f"run python grafana/build.py for {name}"


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("name", NAMES)
def test_a_dashboard_follows_the_rule(name: str, rule: str) -> None:
    assert list(RULES[rule](load(name))) == []


def metrics_on(dashboard: dict[str, Any]) -> set[str]:
    """Return the names of all series in the queries of a dashboard."""
    return {str(selector.name) for query in queries(dashboard) for selector, _ in selectors(parsed(query.expression))}


def test_dashboards_of_weeks_use_existing_recording_rules() -> None:
    rules = yaml.safe_load((REPOSITORY / "deploy/prometheus/rules/recording.yml").read_text(encoding="utf-8"))
    recorded = {rule["record"] for group in rules["groups"] for rule in group["rules"]}
    for uid in RECORDED:
        used = metrics_on(load(uid.removeprefix("gpumem-")))
        assert used
        assert used <= recorded | {"gpumem_exporter_build_info"}


def test_the_dashboards_show_every_metric_and_no_other() -> None:
    of_metrics = [name for name in NAMES if f"gpumem-{name}" not in RECORDED]
    shown = set().union(*(metrics_on(load(name)) for name in of_metrics)) - OF_PROMETHEUS - OF_THE_PROCESS
    families = {re.sub(r"(_seconds)_(?:bucket|count|sum)$", r"\1", name) for name in shown}
    catalog = {metric.name for metric in METRICS}
    assert families - catalog == set()
    assert catalog - families == ON_NO_DASHBOARD.keys()
    assert all(ON_NO_DASHBOARD.values())
