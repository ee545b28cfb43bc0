"""The values of the Helm chart: their table, their schema and the names that the schema lists."""

from __future__ import annotations

import json
import runpy
from typing import Any

import yaml

from gpumem_exporter.settings import setting_key
from gpumem_exporter.settings_sources import settings_model
from tests.support.paths import REPOSITORY

CHART = REPOSITORY / "deploy" / "helm" / "gpumem-exporter"
GENERATE = runpy.run_path(str(REPOSITORY / "docs" / "generate.py"))
"""The names of docs/generate.py."""


def values() -> dict[str, Any]:
    return dict(yaml.safe_load((CHART / "values.yaml").read_text(encoding="utf-8")))


def schema() -> dict[str, Any]:
    return dict(json.loads((CHART / "values.schema.json").read_text(encoding="utf-8"))["properties"])


def alerts() -> dict[str, dict[str, Any]]:
    rules = yaml.safe_load((REPOSITORY / "deploy/prometheus/rules/alerts.yml").read_text(encoding="utf-8"))
    return {rule["alert"]: rule for group in rules["groups"] for rule in group["rules"]}


def test_the_readme_describes_the_current_values() -> None:
    build = runpy.run_path(str(CHART.parent / "build_readme.py"))
    made = build["readme"]()
    assert made == (CHART / "README.md").read_text(encoding="utf-8"), "run python deploy/helm/build_readme.py"
    for name in values():
        assert f"| `{name}" in made, name


def test_the_schema_has_every_value_and_no_other() -> None:
    assert schema().keys() - {"global"} == values().keys()


def test_the_schema_has_every_setting_of_serve_that_the_chart_leaves_to_the_user() -> None:
    keys = {setting_key(field) for field in settings_model().model_fields}
    fixed = GENERATE["FIXED_BY_THE_CHART"]
    assert fixed - keys <= {"client.directory"}
    assert schema()["settings"]["properties"].keys() == keys - fixed
    written = (CHART / "values.schema.json").read_text(encoding="utf-8")
    assert written == GENERATE["chart_schema"](), "run python docs/generate.py"


def test_the_schema_lists_the_alerts_that_can_be_disabled() -> None:
    listed = schema()["prometheusRule"]["properties"]["disabled"]["items"]["enum"]
    assert sorted(listed) == sorted(alerts())
