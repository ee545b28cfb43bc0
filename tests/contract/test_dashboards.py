"""The dashboards as files: they equal the output of their generator, follow the rules, and show every metric."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.support.dashboard_rules import RECORDED, RULES, parsed, selectors
from tests.support.metrics_list import METRICS
from tests.support.panel_queries import queries
from tests.support.paths import REPOSITORY

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


@needs_sdk
@pytest.mark.filterwarnings("ignore:Prefer using dashboardv2")
@pytest.mark.parametrize("name", NAMES)
def test_grafanas_types_have_every_key(name: str) -> None:
    from grafana_foundation_sdk.cog.encoder import JSONEncoder
    from grafana_foundation_sdk.cog.plugins import register_default_plugins
    from grafana_foundation_sdk.models.dashboard import Dashboard

    register_default_plugins()
    mistyped = load(name)
    mistyped["panels"][1]["targets"][0]["exprr"] = ""
    for dashboard, lost in ((load(name), False), (mistyped, True)):
        again = json.loads(JSONEncoder().encode(Dashboard.from_json(dashboard)))
        assert (again != dashboard) is lost


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
