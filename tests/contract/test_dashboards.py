"""The dashboards as files: built from their program, lawful, and about every metric there is."""

from __future__ import annotations

import json
import re
import socket
import subprocess
import sys
from collections.abc import Callable
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
from gpumem_dashboards.queries import all_panels, queries

from gpumem_exporter.collectors.catalog import METRICS
from tests.support.dashboard_rules import RULES, UNITS, parsed, selectors
from tests.support.paths import REPOSITORY

FOLDER = REPOSITORY / "grafana"
NAMES = ("exporter", "fleet", "node", "oom", "workload")
FILES = {name: FOLDER / "dashboards" / f"{name}.json" for name in NAMES}

ON_NO_DASHBOARD = {
    "gpumem_device_memory_is_host": "marks an integrated GPU for who writes queries; node and fleet show its figures",
}
"""Metrics that no dashboard shows, and why."""
OF_PROMETHEUS = {"up", "scrape_duration_seconds", "scrape_samples_scraped"}
OF_THE_PROCESS = {"process_cpu_seconds_total", "process_open_fds", "process_resident_memory_bytes"}

needs_sdk = pytest.mark.skipif(
    sys.version_info < (3, 11), reason="Grafana's SDK needs Python 3.11, and one version suffices"
)


def load(name: str) -> dict[str, Any]:
    return dict(json.loads(FILES[name].read_text(encoding="utf-8")))


def test_there_are_these_five_and_no_other() -> None:
    assert sorted(path.stem for path in (FOLDER / "dashboards").iterdir()) == sorted(NAMES)
    assert {load(name)["uid"] for name in NAMES} == {f"gpumem-{name}" for name in NAMES}


@needs_sdk
def test_building_them_again_gives_the_same_bytes(tmp_path: Path) -> None:
    built = subprocess.run(
        [sys.executable, str(FOLDER / "build.py"), str(tmp_path)], capture_output=True, text=True, check=False
    )
    assert built.returncode == 0, built.stderr
    for name, path in FILES.items():
        assert (tmp_path / path.name).read_bytes() == path.read_bytes(), f"run python grafana/build.py for {name}"


@needs_sdk
@pytest.mark.filterwarnings("ignore:Prefer using dashboardv2")
@pytest.mark.parametrize("name", NAMES)
def test_grafana_s_own_types_know_every_key(name: str) -> None:
    from grafana_foundation_sdk.cog.encoder import JSONEncoder
    from grafana_foundation_sdk.cog.plugins import register_default_plugins
    from grafana_foundation_sdk.models.dashboard import Dashboard

    register_default_plugins()
    mistyped = load(name)
    mistyped["panels"][1]["targets"][0]["exprr"] = ""
    for dashboard, lost in ((load(name), False), (mistyped, True)):
        again = json.loads(JSONEncoder().encode(Dashboard.from_json(dashboard)))
        assert (again != dashboard) is lost


@needs_sdk
def test_every_unit_is_one_of_grafana_s() -> None:
    from grafana_foundation_sdk.models import units

    assert {value for value in vars(units).values() if isinstance(value, str)} >= UNITS


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("name", NAMES)
def test_it_keeps_to_the_rule(name: str, rule: str) -> None:
    assert list(RULES[rule](load(name))) == []


def _expression(dashboard: dict[str, Any], change: Callable[[str], str]) -> None:
    target = dashboard["panels"][1]["targets"][0]
    target["expr"] = change(target["expr"])


def _panel(dashboard: dict[str, Any], **changes: Any) -> None:
    dashboard["panels"][1].update(changes)


def _defaults(dashboard: dict[str, Any], **changes: Any) -> None:
    dashboard["panels"][1]["fieldConfig"]["defaults"].update(changes)


def _first(dashboard: dict[str, Any], kind: str) -> dict[str, Any]:
    return next(panel for panel in dashboard["panels"] if panel["type"] == kind)


def _relink(dashboard: dict[str, Any], column: str, other: str) -> None:
    panels = json.dumps(dashboard["panels"])
    assert f"__data.fields.{column}" in panels
    dashboard["panels"] = json.loads(panels.replace(f"__data.fields.{column}", f"__data.fields.{other}"))


def _without_links(dashboard: dict[str, Any], target: str) -> None:
    for part in ("panels", "annotations"):
        dashboard[part] = json.loads(json.dumps(dashboard[part]).replace(f"/d/{target}?", "/d/elsewhere?"))


SPOILT: dict[str, Callable[[dict[str, Any]], Any]] = {
    "panels_say_what_they_show": lambda d: _defaults(d, unit="gigabytes"),
    "everything_is_numbered": lambda d: _panel(d, id=d["panels"][2]["id"]),
    "all_data_comes_from_the_chosen_source": lambda d: _panel(d, datasource={"uid": "p"}),
    "panels_lie_side_by_side": lambda d: _panel(d, gridPos=d["panels"][2]["gridPos"]),
    "panels_ask_and_show_what_their_kind_needs": lambda d: _first(d, "table")["targets"][0].update(
        instant=False, range=True
    ),
    "variables_are_the_agreed_ones_and_follow_the_time": lambda d: d["templating"]["list"][1].update(refresh=1),
    "variables_are_matched_as_they_are_chosen": lambda d: _expression(d, lambda e: e.replace('=~"$node"', '="$node"')),
    "every_selector_names_its_nodes": lambda d: _expression(d, lambda e: e.replace('instance=~"$node", ', "")),
    "counters_are_only_asked_for_their_increase": lambda d: _expression(
        d, lambda _: 'sum(gpumem_torch_ooms_total{instance=~"$node"})'
    ),
    "a_pid_is_one_process_of_one_node": lambda d: _expression(
        d, lambda _: 'sum by (pid) (gpumem_torch_allocated_bytes{instance=~"$node"})'
    ),
    "count_values_survives_a_known_bug": lambda d: _expression(
        d, lambda _: 'count_values by (uuid, gpu) ("x", gpumem_device_up{instance=~"$node"})'
    ),
    "no_recording_rule_and_no_unknown_label": lambda d: _expression(d, lambda e: e.replace("gpu=~", "card=~")),
    "links_at_the_top_lead_to_every_other_dashboard_with_time_and_variables": lambda d: d["links"][0].update(
        keepTime=False
    ),
    "links_lead_to_a_dashboard_with_time_and_variables": lambda d: _defaults(
        d, links=[{"url": "/d/gpumem-node?${datasource:queryparam}&var-node=a"}]
    ),
    "links_are_filled_from_what_is_there": lambda d: _relink(d, "gpu", "card"),
    "cells_say_what_their_labels_say": lambda d: _first(d, "table")["fieldConfig"].update(overrides=[]),
    "downward_links_are_there": lambda d: _without_links(d, "gpumem-oom"),
    "events_are_marked": lambda d: d["annotations"]["list"].pop(0),
    "it_can_be_found_and_edited": lambda d: d.update(tags=[]),
}
"""For each rule, what makes a dashboard break it."""


@pytest.mark.parametrize("rule", RULES)
def test_each_rule_finds_a_dashboard_that_breaks_it(rule: str) -> None:
    dashboard = deepcopy(load("fleet"))
    SPOILT[rule](dashboard)
    assert list(RULES[rule](dashboard)) != []


def metrics_on(dashboard: dict[str, Any]) -> set[str]:
    """The names of all series that a dashboard's panels and annotations ask for."""
    return {str(selector.name) for query in queries(dashboard) for selector, _ in selectors(parsed(query.expression))}


def test_every_metric_on_a_dashboard_exists_and_every_metric_is_on_one_or_there_is_a_reason() -> None:
    shown = set().union(*(metrics_on(load(name)) for name in NAMES)) - OF_PROMETHEUS - OF_THE_PROCESS
    families = {re.sub(r"(_seconds)_(?:bucket|count|sum)$", r"\1", name) for name in shown}
    catalog = {metric.name for metric in METRICS}
    assert families - catalog == set()
    assert catalog - families == ON_NO_DASHBOARD.keys()
    assert all(ON_NO_DASHBOARD.values())


def test_each_dashboard_shows_what_it_is_for() -> None:
    wanted = {
        "fleet": {"gpumem_ledger_bytes", "gpumem_torch_fragmented_bytes", "gpumem_reporter_up", "gpumem_events_total"},
        "node": {"gpumem_ledger_bytes", "gpumem_torch_reclaimable_bytes", "gpumem_process_info"},
        "workload": {
            *("gpumem_torch_step", "gpumem_torch_phase_peak_bytes", "gpumem_torch_component_bytes"),
            *("gpumem_torch_planned_reserved_peak_bytes", "gpumem_torch_plan_error_ratio"),
        },
        "oom": {metric.name for metric in METRICS if metric.name.startswith("gpumem_last_oom_")},
        "exporter": {
            *("gpumem_held_requests", "gpumem_reports_total", "process_resident_memory_bytes"),
            *("gpumem_policy_evaluations_total", "gpumem_alerts_total"),
        },
    }
    for name, metrics in wanted.items():
        assert metrics <= metrics_on(load(name)), name


def test_a_table_names_each_of_its_columns_and_drops_none_by_mistake() -> None:
    for name in NAMES:
        for panel in all_panels(load(name)):
            for transformation in panel.get("transformations") or ():
                if panel["type"] == "table" and transformation["id"] == "organize":
                    renamed = transformation["options"]["renameByName"]
                    letters = [target["refId"] for target in panel["targets"]]
                    values = [f"Value #{letter}" for letter in letters] if len(letters) > 1 else ["Value"]
                    assert set(values) <= renamed.keys(), panel["title"]
                    headings = {*renamed.values(), *transformation["options"]["indexByName"]}
                    dressed = {override["matcher"]["options"] for override in panel["fieldConfig"]["overrides"]}
                    assert dressed - {".*"} <= headings, panel["title"]
                    assert panel["options"]["sortBy"][0]["displayName"] in headings, panel["title"]


def test_the_preview_says_in_one_line_that_no_prometheus_answers(tmp_path: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))  # and not listening
        url = f"http://127.0.0.1:{taken.getsockname()[1]}"
        command = (sys.executable, str(FOLDER / "preview.py"), "--prometheus", url, "--out", str(tmp_path))
        told = subprocess.run(command, capture_output=True, text=True, check=False)
    assert told.returncode == 1
    assert url in told.stderr
    assert told.stderr.count("\n") == 1
