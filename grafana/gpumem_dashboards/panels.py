"""Builders for each kind of panel, with title, description, unit, data source and numbered queries."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from string import ascii_uppercase
from typing import Any, TypeAlias

from grafana_foundation_sdk.builders import bargauge, common, prometheus, stat, statushistory, timeseries
from grafana_foundation_sdk.models import common as models
from grafana_foundation_sdk.models import units
from grafana_foundation_sdk.models.dashboard import DataSourceRef, DynamicConfigValue

from gpumem_dashboards.palette import LEDGER, color, none_is_good, steps
from gpumem_dashboards.promql import coverage

SOURCE = DataSourceRef(type_val="prometheus", uid="${datasource}")

Series: TypeAlias = tuple[str, str] | tuple[str, str, str]
"""The expression and the legend of a query, and the color of its series if Grafana does not choose it."""
Limits = Sequence[tuple[float | None, str]]


def query(expression: str, legend: str, letter: str = "A", *, instant: bool = False) -> Any:
    """Build one query, over the time range or at its end."""
    made = prometheus.Dataquery().expr(expression).legend_format(legend).ref_id(letter).datasource(SOURCE)
    return made.instant() if instant else made.range()


def described(panel: Any, title: str, description: str, unit: str) -> Any:
    """Set the properties that every panel has."""
    return panel.title(title).description(description).unit(unit).datasource(SOURCE)


def legend(mode: models.LegendDisplayMode = models.LegendDisplayMode.LIST) -> Any:
    """Build a legend below the panel."""
    return common.VizLegendOptions().show_legend(True).display_mode(mode).placement(models.LegendPlacement.BOTTOM)


def number(
    title: str,
    description: str,
    *queries: Series | str,
    unit: str = units.BytesIEC,
    limits: Limits = (),
    decimals: int | None = None,
    no_value: str = "unknown",
    span: int = 4,
    height: int = 4,
) -> Any:
    """Build a panel with one value in large type, or a few that have legends, colored by its limits."""
    panel = (
        described(stat.Panel(), title, description, unit)
        .reduce_options(common.ReduceDataOptions().calcs(["lastNotNull"]))
        .graph_mode(models.BigValueGraphMode.NONE)
        .color_mode(models.BigValueColorMode.BACKGROUND if limits else models.BigValueColorMode.NONE)
        .no_value(no_value)
        .height(height)
        .span(span)
    )
    panel = _asking(panel, [(each, "") if isinstance(each, str) else each for each in queries], instant=True)
    if not isinstance(queries[0], str):
        panel = panel.text_mode(models.BigValueTextMode.VALUE_AND_NAME)
    if limits:
        panel = panel.thresholds(steps(*limits))
    return panel if decimals is None else panel.decimals(decimals)


def count(title: str, description: str, expression: str, *, bad: str = "orange", span: int = 4) -> Any:
    """Build a panel with a count that should be zero."""
    return number(title, description, expression, unit="short", limits=none_is_good(bad), decimals=0, span=span)


def idle_cache(each: str, selector: str, reclaimable: str, *, span: int = 4) -> Any:
    """Build a panel with the idle cache of the selected processes, and what a clear of each would release now."""
    return number(
        "Idle cache",
        "Idle cache: bytes of PyTorch's caches that no process needed in the last minute. A clear releases them for"
        f" good. A clear now: what torch.cuda.empty_cache() in every {each} would release now. All above the idle cache"
        " would be reserved again.",
        (f"sum(gpumem_torch_idle_cache_bytes{{{selector}}})", "idle cache"),
        (f"sum({reclaimable})", "a clear now"),
        span=span,
    )


def share_reported(node: str) -> Any:
    """Build a panel with the coverage of the selected nodes."""
    return number(
        "Coverage",
        "Of the memory that processes use, the share of the processes that report. The memory of the other processes is"
        " known only as a sum. Nodes where the driver does not list all processes are left out.",
        coverage(node),
        unit="percentunit",
        span=3,
    )


def graph(
    title: str,
    description: str,
    *queries: Series,
    unit: str = units.BytesIEC,
    low: float | None = 0,
    high: float | None = None,
    span: int = 12,
    height: int = 8,
) -> Any:
    """Build a graph over time, with a table of the last and the highest values below.

    `low` and `high` are the ends of its axis; None for values that may be negative, or that have no maximum.
    """
    panel = (
        described(timeseries.Panel(), title, description, unit)
        .fill_opacity(10)
        .show_points(models.VisibilityMode.NEVER)
        .legend(legend(models.LegendDisplayMode.TABLE).calcs(["lastNotNull", "max"]))
        .tooltip(common.VizTooltipOptions().mode(models.TooltipDisplayMode.MULTI).sort(models.SortOrder.DESCENDING))
        .height(height)
        .span(span)
    )
    if low is not None:
        panel = panel.min(low)
    if high is not None:
        panel = panel.max(high)
    return _asking(panel, queries)


def stacked(panel: Any, fill_opacity: int = 70) -> Any:
    """Turn a graph into a stack."""
    stack = common.StackingConfig().mode(models.StackingMode.NORMAL).group("A")
    return panel.stacking(stack).fill_opacity(fill_opacity).line_width(0)


def columns(panel: Any, smallest_interval: str) -> Any:
    """Turn a graph into stacked columns, each of at least the given interval."""
    return stacked(panel.draw_style(models.GraphDrawStyle.BARS), 80).interval(smallest_interval).line_width(1)


def dashed(name: str, shade: str) -> tuple[str, list[DynamicConfigValue]]:
    """Return overrides that draw one series of a stack as a dashed line outside of the stack."""
    return name, [
        DynamicConfigValue("custom.stacking", {"mode": "none", "group": "A"}),
        DynamicConfigValue("custom.fillOpacity", 0),
        DynamicConfigValue("custom.lineWidth", 2),
        DynamicConfigValue("custom.lineStyle", {"fill": "dash", "dash": [10, 10]}),
        color(shade),
    ]


def ledger(title: str, description: str, selector: str, only: str = "", *, span: int = 16) -> Any:
    """Build a graph of the ledger of the selected devices, stacked to their total; `only` restricts them further."""
    categories = (
        (f'sum by (category) (gpumem_ledger_bytes{{{selector}, category="{category}"}}{only})', name, shade)
        for category, name, shade in LEDGER
    )
    total = (f"sum(gpumem_device_memory_total_bytes{{{selector}}}{only})", "total")
    panel = graph(title, description, *categories, total, low=None, span=span, height=10)
    return stacked(panel, 80).override_by_name(*dashed("total", "text"))


def bars(
    title: str,
    description: str,
    *queries: Series,
    unit: str = units.BytesIEC,
    limits: Limits = ((None, "green"),),
    no_value: str = "none",
    span: int = 8,
    height: int = 8,
) -> Any:
    """Build horizontal bars, one for each series, with the value at the end of the time range."""
    panel = (
        described(bargauge.Panel(), title, description, unit)
        .reduce_options(common.ReduceDataOptions().calcs(["lastNotNull"]))
        .orientation(models.VizOrientation.HORIZONTAL)
        .display_mode(models.BarGaugeDisplayMode.BASIC)
        .name_placement(models.BarGaugeNamePlacement.TOP)
        .value_mode(models.BarGaugeValueMode.TEXT)
        .sizing(models.BarGaugeSizing.AUTO)
        .show_unfilled(True)
        .thresholds(steps(*limits))
        .min(0)
        .no_value(no_value)
        .height(height)
        .span(span)
    )
    return _asking(panel, queries, instant=True)


def history(title: str, description: str, *queries: Series, unit: str, limits: Limits, height: int = 10) -> Any:
    """Build a heat map: one row for each series, with the value as color over time."""
    panel = (
        described(statushistory.Panel(), title, description, unit)
        .thresholds(steps(*limits))
        .show_value(models.VisibilityMode.NEVER)
        .row_height(0.9)
        .col_width(1)
        .legend(legend())
        .tooltip(common.VizTooltipOptions().mode(models.TooltipDisplayMode.SINGLE).sort(models.SortOrder.NONE))
        .max_data_points(120)
        .height(height)
        .span(24)
    )
    return _asking(panel, queries)


def _asking(panel: Any, queries: Iterable[Series], *, instant: bool = False) -> Any:
    """Add the queries with the letters A, B and so on."""
    for letter, (expression, name, *shade) in zip(ascii_uppercase, queries, strict=False):
        panel = panel.with_target(query(expression, name, letter, instant=instant))
        if shade:
            panel = panel.override_by_name(name, [color(*shade)])
    return panel
