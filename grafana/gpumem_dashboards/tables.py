"""Tables: each column is a query, and rows are joined by the common labels."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from string import ascii_uppercase
from typing import Any

from grafana_foundation_sdk.builders import common
from grafana_foundation_sdk.builders import table as tables
from grafana_foundation_sdk.models import units
from grafana_foundation_sdk.models.dashboard import DataTransformerConfig, DynamicConfigValue
from grafana_foundation_sdk.models.prometheus import PromQueryFormat

from gpumem_dashboards.palette import PRESSURE, steps
from gpumem_dashboards.panels import Limits, described, query

# Otherwise Grafana reads "0" as a number with the table's unit: GPU 0 would be "0 B", also in links.
_AS_IT_IS = DynamicConfigValue("unit", "string")


@dataclass(frozen=True, slots=True)
class Column:
    """One column: a query, or a label of a query."""

    title: str
    """The heading, or the name of the label, whose heading is `heading`."""
    expression: str = ""
    """The query; empty if the column is a label."""
    unit: str = ""
    """The unit; empty for the unit of the table."""
    limits: Limits = ()
    """Thresholds for the color of the cell's background."""
    gauge: bool = False
    """Whether the cell is a bar from 0 to 1."""
    heading: str = ""
    width: int = 0
    links: Sequence[tuple[str, str]] = ()
    """Pairs of title and URL; Grafana shows several as a menu."""
    mapping: dict[str, Any] = field(default_factory=dict)
    """Texts for values."""
    hidden: bool = False
    """Whether the column is only needed for its labels or for a link."""


def table(
    title: str,
    description: str,
    listed: Sequence[Column],
    *,
    unit: str = units.BytesIEC,
    sort_by: str,
    descending: bool = True,
    drop: Sequence[str] = (),
    no_value: str = "",
    span: int = 24,
    height: int = 10,
) -> Any:
    """Build a table of the queries' results at the end of the time range, in the order of `listed`.

    `unit` is for columns without one, `sort_by` the heading of the column of the initial order. The labels `drop` of
    the queries are not shown; without a column of its own, `cluster` is not shown either.
    """
    panel = (
        described(tables.Panel(), title, description, unit)
        .height(height)
        .span(span)
        .sort_by([common.TableSortByFieldState().display_name(sort_by).desc(descending)])
        .with_transformation(DataTransformerConfig(id_val="merge", options={}))
    )
    if no_value:
        # Grafana also shows `no_value` in each empty cell of a table with rows, unless the column overrides it.
        panel = panel.no_value(no_value).override_by_regexp(".*", [DynamicConfigValue("noValue", "")])
    queries = [column for column in listed if column.expression]
    # With one query, Grafana names its column "Value"; with several, "Value #A" and so on.
    names = ["Value"] if len(queries) == 1 else [f"Value #{letter}" for letter in ascii_uppercase[: len(queries)]]
    fields = {id(column): name for column, name in zip(queries, names, strict=True)}
    for letter, column in zip(ascii_uppercase, queries, strict=False):
        made = query(column.expression, "", letter, instant=True).format(PromQueryFormat.TABLE)
        panel = panel.with_target(made)
    shown = {fields.get(id(column), column.title): column for column in listed}
    headings = {name: column.heading or column.title for name, column in shown.items()}
    panel = panel.with_transformation(
        DataTransformerConfig(
            id_val="organize",
            options={
                "excludeByName": dict.fromkeys(("Time", *drop, *({"cluster"} - shown.keys())), True),
                "indexByName": {name: at for at, name in enumerate(shown)},
                "renameByName": {name: heading for name, heading in headings.items() if name != heading},
            },
        )
    )
    for column in listed:
        panel = _dress(panel, column)
    return panel


def matrix(title: str, description: str, expression: str, link: tuple[str, str], *, span: int, height: int) -> Any:
    """Build a table with a row for each node and a column for each device index; the value is the cell's color."""
    order = ({"fields": {}, "sort": [{"field": name}]} for name in ("instance", "gpu"))
    ordered = [DataTransformerConfig(id_val="sortBy", options=by) for by in order]
    panel = (
        described(tables.Panel(), title, description, "percentunit")
        .height(height)
        .span(span)
        .decimals(0)
        .thresholds(steps(*PRESSURE))
        .with_target(query(expression, "", instant=True).format(PromQueryFormat.TABLE))
    )
    grouping = {"columnField": "gpu", "rowField": "instance", "valueField": "Value", "emptyValue": "null"}
    for transformation in (*ordered, DataTransformerConfig(id_val="groupingToMatrix", options=grouping)):
        panel = panel.with_transformation(transformation)
    cell = [DynamicConfigValue("custom.cellOptions", {"type": "color-background", "mode": "basic"}), _links(link)]
    return panel.override_by_regexp("^[0-9].*", cell).override_by_name(
        r"instance\gpu", [DynamicConfigValue("displayName", "Node"), _AS_IT_IS]
    )


def _dress(panel: Any, column: Column) -> Any:
    wanted: list[DynamicConfigValue] = []
    if not column.expression:
        wanted.append(_AS_IT_IS)
    if column.unit:
        wanted.append(DynamicConfigValue("unit", column.unit))
    if column.gauge:
        wanted += [
            DynamicConfigValue("custom.cellOptions", {"type": "gauge", "mode": "basic", "valueDisplayMode": "text"}),
            DynamicConfigValue("min", 0),
            DynamicConfigValue("max", 1),
        ]
    if column.limits:
        made = [{"value": value, "color": name} for value, name in column.limits]
        wanted.append(DynamicConfigValue("thresholds", {"mode": "absolute", "steps": made}))
        if not column.gauge:
            wanted.append(DynamicConfigValue("custom.cellOptions", {"type": "color-background", "mode": "basic"}))
    if column.mapping:
        wanted.append(DynamicConfigValue("mappings", [column.mapping]))
    if column.width:
        wanted.append(DynamicConfigValue("custom.width", column.width))
    if column.links:
        wanted.append(_links(*column.links))
    if column.hidden:
        wanted.append(DynamicConfigValue("custom.hidden", True))
    return panel.override_by_name(column.heading or column.title, wanted) if wanted else panel


def _links(*links: tuple[str, str]) -> DynamicConfigValue:
    return DynamicConfigValue("links", [{"title": title, "url": url, "targetBlank": False} for title, url in links])
