"""The preview draws a dashboard as Grafana does in the cases that are easy to get wrong."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest
from gpumem_dashboards.charts import line_chart
from gpumem_dashboards.queries import Query, Scope, all_panels
from gpumem_dashboards.rendering import render

from tests.support.paths import REPOSITORY

FOLDER = REPOSITORY / "grafana" / "dashboards"
SCOPE = Scope(1000.0, range_seconds=100, scrape_seconds=10)
SCOPE_OF_ALL = Scope(1000.0, variables={"node": ".*", "gpu": ".*", "workload": ".*"})
TIMES = [910.0 + 10 * at for at in range(10)]
WIDTH, HEIGHT = 600, 300


def panel(dashboard: str, title: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return a dashboard and its panel with a title."""
    document = json.loads((FOLDER / f"{dashboard}.json").read_text())
    (found,) = (each for each in all_panels(document) if each["title"] == title)
    return document, found


def drawn(dashboard: str, title: str, series: dict[str, list[float]]) -> str:
    _, found = panel(dashboard, title)
    named = [(name, list(zip(TIMES, values, strict=True))) for name, values in series.items()]
    return line_chart(found, named, SCOPE, 10.0, [], WIDTH, HEIGHT)


def heights(points: str) -> list[float]:
    return [float(point.partition(",")[2]) for point in points.split()]


@pytest.mark.parametrize("value", [-5e9, 0.0])
def test_a_graph_without_anything_above_zero_is_drawn(value: float) -> None:
    page = drawn("workload", "Growth per step, by rank", {"rank 0": [value] * 10})
    assert page.count("<polyline") == 1
    assert not {"nan", "inf"} & set(re.findall(r"[a-z]+", page))


def test_the_ledger_meets_the_total_also_where_a_report_is_ahead_of_the_driver() -> None:
    ahead = [3.0] * 10
    ahead[4] = -7.0
    free = [100.0 - 40.0 - figure for figure in ahead]
    categories = {"allocated": [40.0] * 10, "non-torch": ahead, "free": free}
    page = drawn("node", "Ledger of GPU $gpu", {**categories, "total": [100.0] * 10})
    (total,) = re.findall(r'<polyline points="([^"]+)"', page)
    *_, uppermost = re.findall(r'<polygon points="([^"]+)"', page)
    assert heights(uppermost)[:10] == heights(total)


def test_a_table_shows_labels_as_they_are_and_leaves_cells_without_a_value_empty() -> None:
    class Answers:
        def ask(self, query: Query, _scope: Scope, _smallest_seconds: float = 0.0) -> list[dict[str, Any]]:
            metric = {"instance": "a", "gpu": "3", "pid": "4711", "workload": "", "rank": "7"}
            return [{"metric": metric, "values": [(1000.0, "1024")]}] if "gpumem_" in query.expression else []

    document, found = panel("fleet", "Last error of each process")
    only = {**document, "panels": [found], "annotations": {"list": []}}
    page, _ = render(only, Answers(), SCOPE_OF_ALL)
    cells = re.findall(r'<td class="t">([^<]*)</td>', page)
    assert cells == ["a", "3", "", "7", "4711"]
