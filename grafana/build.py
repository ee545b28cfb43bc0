"""Writes `dashboards/node.json`, the dashboard of one node: `python grafana/build.py`.

The dashboard is made here and never edited by hand; a test compares the file with what this makes. Needs the dependency
group `dashboards`, whose pinned version decides the file's bytes.
"""

from __future__ import annotations

from pathlib import Path
from string import ascii_uppercase
from typing import Any

from grafana_foundation_sdk.builders import bargauge, common, dashboard, prometheus, stat, table, timeseries
from grafana_foundation_sdk.cog.encoder import JSONEncoder
from grafana_foundation_sdk.models import units
from grafana_foundation_sdk.models.common import (
    BarGaugeDisplayMode,
    BigValueColorMode,
    BigValueGraphMode,
    BigValueTextMode,
    LegendDisplayMode,
    LegendPlacement,
    SortOrder,
    StackingMode,
    TooltipDisplayMode,
    VizOrientation,
)
from grafana_foundation_sdk.models.dashboard import (
    DashboardCursorSync,
    DataSourceRef,
    DataTransformerConfig,
    DynamicConfigValue,
    FieldColorModeId,
    VariableRefresh,
    VariableSort,
)
from grafana_foundation_sdk.models.prometheus import PromQueryFormat

__all__ = ["TARGET", "node_dashboard"]

TARGET = Path(__file__).with_name("dashboards") / "node.json"

SOURCE = DataSourceRef(type_val="prometheus", uid="${datasource}")
NODE = 'instance="$node"'
GPU = f'{NODE}, gpu=~"$gpu"'
PROCESS = "{{workload}} {{rank}} (pid {{pid}})"

# Category of the ledger, its name on the graph, its colour: from the bottom of the stack to its top.
LEDGER = (
    ("torch_allocated", "in tensors", "dark-blue"),
    ("torch_reclaimable", "cached, a clear gives it back", "green"),
    ("torch_fragmented", "cached, a clear cannot give it back", "orange"),
    ("non_torch", "CUDA context, NCCL, libraries", "purple"),
    ("other_processes", "processes without a reporter", "yellow"),
    ("driver_reserved", "held back by the driver", "dark-red"),
    ("unattributed", "of no known process", "super-light-red"),
    ("free", "free", "#80808030"),
)

# Column of the processes' table, and the query behind it. The first one carries the process' labels.
BY_PROCESS = "instance, gpu, pid"
PROCESS_LABELS = "workload, rank, command, user, k8s_namespace, k8s_pod, reporting"
COLUMNS = (
    (
        "",
        f"group by ({BY_PROCESS}) (gpumem_process_memory_used_bytes{{{GPU}}} or on ({BY_PROCESS})"
        f" gpumem_torch_reserved_bytes{{{GPU}}}) * on (instance, pid) group_left ({PROCESS_LABELS})"
        f" gpumem_process_info{{{NODE}}}",
    ),
    ("Used", f"sum by ({BY_PROCESS}) (gpumem_process_memory_used_bytes{{{GPU}}})"),
    ("In tensors", f"sum by ({BY_PROCESS}) (gpumem_torch_allocated_bytes{{{GPU}}})"),
    ("Reserved", f"sum by ({BY_PROCESS}) (gpumem_torch_reserved_bytes{{{GPU}}})"),
    ("A clear gives back", f"sum by ({BY_PROCESS}) (gpumem_torch_reclaimable_bytes{{{GPU}}})"),
    ("Fragmented", f"sum by ({BY_PROCESS}) (gpumem_torch_fragmented_bytes{{{GPU}}})"),
    ("Not torch", f"sum by ({BY_PROCESS}) (gpumem_torch_non_torch_bytes{{{GPU}}})"),
)


def node_dashboard() -> str:
    """The dashboard as Grafana's JSON, with a newline at its end."""
    built = (
        dashboard.Dashboard("GPU memory: one node")
        .uid("gpumem-node")
        .description("Where every byte of GPU memory is, whose it is, and what of it would come back.")
        .tags(["gpu", "pytorch", "gpumem"])
        .editable()
        .tooltip(DashboardCursorSync.CROSSHAIR)
        .time("now-1h", "now")
        .refresh("10s")
        .with_variable(dashboard.DatasourceVariable("datasource").label("Data source").type("prometheus"))
        .with_variable(_variable("node", "Node", "label_values(gpumem_exporter_build_info, instance)"))
        .with_variable(
            _variable("gpu", "GPU", f"label_values(gpumem_device_memory_total_bytes{{{NODE}}}, gpu)")
            .multi(True)
            .include_all(True)
        )
        .with_row(dashboard.Row("Node"))
    )
    for panel in _node_panels():
        built = built.with_panel(panel)
    built = built.with_panel(_processes_table())
    built = (
        built.with_row(dashboard.Row("GPU $gpu").repeat("gpu")).with_panel(_ledger()).with_panel(_clear_gives_back())
    )
    for title, panels in (("Over time", _history_panels()), ("Exporter", _exporter_panels())):
        built = built.with_row(dashboard.Row(title))
        for panel in panels:
            built = built.with_panel(panel)
    model = built.build()
    for number, panel in enumerate(model.panels or [], start=1):
        panel.id_val = number
    return JSONEncoder(sort_keys=True, indent=2).encode(model) + "\n"


def _node_panels() -> list[Any]:
    return [
        _number(
            "Devices up",
            "Devices for which the driver answers.",
            units.Short,
            f"sum(gpumem_device_up{{{NODE}}})",
        ),
        _number(
            "Memory used",
            "Share of the node's GPU memory that is in use, as the driver counts it. A full device need not be a busy"
            " one: cached memory counts as used.",
            units.PercentUnit,
            f"sum(gpumem_device_memory_used_bytes{{{GPU}}}) / sum(gpumem_device_memory_total_bytes{{{GPU}}})",
        ),
        _number(
            "A clear would give back",
            "Bytes that torch.cuda.empty_cache() in every reporting process would give back to the driver now.",
            units.BytesIEC,
            f'sum(gpumem_ledger_bytes{{{GPU}, category="torch_reclaimable"}})',
        ),
        _number(
            "Fragmented",
            "Bytes in no tensor that a clear cannot give back.",
            units.BytesIEC,
            f'sum(gpumem_ledger_bytes{{{GPU}, category="torch_fragmented"}})',
        ),
        _number(
            "Out of memory",
            "Out-of-memory errors that PyTorch raised in the time shown, caught ones included.",
            units.Short,
            f"sum(increase(gpumem_torch_ooms_total{{{GPU}}}[$__range]))",
        ),
        _number(
            "Source",
            "nvml: these are real devices. demo: everything here is simulated.",
            units.NoUnit,
            f"gpumem_exporter_build_info{{{NODE}}}",
            legend="{{source}} {{version}}",
        ).text_mode(BigValueTextMode.NAME),
    ]


def _ledger() -> Any:
    panel = (
        _graph(
            "Where every byte of GPU $gpu is",
            "The stack meets the dashed line, the device's total, to the byte at every scrape. Bytes of no known"
            " process are signed: below zero, a report is ahead of the driver's last reading.",
            units.BytesIEC,
            [(f'gpumem_ledger_bytes{{{GPU}, category="{category}"}}', name) for category, name, _ in LEDGER]
            + [(f"gpumem_device_memory_total_bytes{{{GPU}}}", "total")],
        )
        .stacking(common.StackingConfig().mode(StackingMode.NORMAL).group("A"))
        .fill_opacity(80)
        .line_width(0)
        .override_by_name(
            "total",
            [
                DynamicConfigValue("custom.stacking", {"mode": "none", "group": "A"}),
                DynamicConfigValue("custom.fillOpacity", 0),
                DynamicConfigValue("custom.lineWidth", 2),
                DynamicConfigValue("custom.lineStyle", {"fill": "dash", "dash": [10, 10]}),
                _colour("text"),
            ],
        )
    )
    for _, name, colour in LEDGER:
        panel = panel.override_by_name(name, [_colour(colour)])
    return panel.height(10).span(16)


def _clear_gives_back() -> Any:
    return (
        _described(
            bargauge.Panel(),
            "What a clear would give back on GPU $gpu",
            "Reclaimable bytes of each process: what torch.cuda.empty_cache() would return to the driver now. The"
            " fifteen largest.",
            units.BytesIEC,
        )
        .with_target(_query(f"sort_desc(topk(15, gpumem_torch_reclaimable_bytes{{{GPU}}}))", PROCESS).instant())
        .reduce_options(common.ReduceDataOptions().calcs(["lastNotNull"]))
        .orientation(VizOrientation.HORIZONTAL)
        .display_mode(BarGaugeDisplayMode.BASIC)
        .color_scheme(dashboard.FieldColor().mode(FieldColorModeId.FIXED).fixed_color("green"))
        .min(0)
        .no_value("no process reports")
        .height(10)
        .span(8)
    )


def _processes_table() -> Any:
    panel = (
        _described(
            table.Panel(),
            "Processes",
            "Each process on each device. Without a reporter only what the driver counts is known; an empty cell is"
            " unknown, not zero.",
            units.BytesIEC,
        )
        .height(10)
        .span(24)
        .sort_by([common.TableSortByFieldState().display_name("Used").desc(True)])
        .with_transformation(DataTransformerConfig(id_val="merge", options={}))
    )
    labels = ["gpu", "pid", *PROCESS_LABELS.split(", ")]
    values = {f"Value #{letter}": name for letter, (name, _) in zip(ascii_uppercase, COLUMNS, strict=False)}
    for letter, (_, expression) in zip(ascii_uppercase, COLUMNS, strict=False):
        panel = panel.with_target(_query(expression, "", letter).instant().format(PromQueryFormat.TABLE))
    order = [*labels, *list(values)[1:]]
    return panel.with_transformation(
        DataTransformerConfig(
            id_val="organize",
            options={
                "excludeByName": {"Time": True, "instance": True, "Value #A": True},
                "indexByName": {name: index for index, name in enumerate(order)},
                "renameByName": {"gpu": "GPU", "k8s_namespace": "namespace", "k8s_pod": "pod"}
                | {value: name for value, name in values.items() if name},
            },
        )
    )


def _history_panels() -> list[Any]:
    return [
        _graph(
            "In tensors, by process",
            "Bytes handed out to tensors. A steady training loop draws a level band; one that rises from step to step"
            " keeps tensors that it no longer needs.",
            units.BytesIEC,
            [(f"gpumem_torch_allocated_bytes{{{GPU}}}", f"GPU {{{{gpu}}}} {PROCESS}")],
        ).min(0),
        _graph(
            "Fragmentation, by process",
            "Share of what PyTorch reserved that is in no tensor and that a clear cannot give back.",
            units.PercentUnit,
            [(f"gpumem_torch_fragmentation_ratio{{{GPU}}}", f"GPU {{{{gpu}}}} {PROCESS}")],
        )
        .min(0)
        .max(1),
        _graph(
            "Allocation retries, by process",
            "Allocations a second that failed at first, upon which PyTorch flushed its cache and tried again. Each one"
            " stalls the program, and an out-of-memory error is near.",
            units.CountsPerSecond,
            [(f"rate(gpumem_torch_alloc_retries_total{{{GPU}}}[$__rate_interval])", f"GPU {{{{gpu}}}} {PROCESS}")],
        ).min(0),
        _graph(
            "Time in which a kernel ran, by device",
            "Share of the time in which at least one kernel ran: busy time, not how much of the chip was used.",
            units.PercentUnit,
            [(f"gpumem_device_utilization_ratio{{{GPU}}}", "GPU {{gpu}}")],
        )
        .min(0)
        .max(1),
    ]


def _exporter_panels() -> list[Any]:
    return [
        _graph(
            "Age of the last report, by process",
            "How long ago each process last reported. It rises when a process hangs, or has no exporter to talk to.",
            units.Seconds,
            [(f"time() - gpumem_reporter_last_report_timestamp_seconds{{{NODE}}}", PROCESS)],
        ).min(0),
        _graph(
            "Reports, by outcome",
            "Reports a second that the exporter took or turned away.",
            units.CountsPerSecond,
            [(f"sum by (outcome) (rate(gpumem_reports_total{{{NODE}}}[$__rate_interval]))", "{{outcome}}")],
        ).min(0),
        _graph(
            "Given back by actions",
            "Bytes that actions returned to the driver, as measured in the processes.",
            units.BytesIEC,
            [
                (
                    f"sum by (action) (increase(gpumem_action_freed_bytes_total{{{NODE}}}[$__rate_interval]))",
                    "{{action}}",
                )
            ],
        ).min(0),
        _graph(
            "Poll of the driver",
            "How long the last poll of all devices took. Absent while the driver does not answer.",
            units.Seconds,
            [(f"gpumem_poll_duration_seconds{{{NODE}}}", "poll")],
        ).min(0),
    ]


def _number(title: str, description: str, unit: str, expression: str, legend: str = "") -> Any:
    return (
        _described(stat.Panel(), title, description, unit)
        .with_target(_query(expression, legend).instant())
        .reduce_options(common.ReduceDataOptions().calcs(["lastNotNull"]))
        .color_mode(BigValueColorMode.NONE)
        .graph_mode(BigValueGraphMode.NONE)
        .no_value("unknown")
        .height(4)
        .span(4)
    )


def _graph(title: str, description: str, unit: str, queries: list[tuple[str, str]]) -> Any:
    panel = (
        _described(timeseries.Panel(), title, description, unit)
        .fill_opacity(10)
        .legend(
            common.VizLegendOptions()
            .show_legend(True)
            .display_mode(LegendDisplayMode.TABLE)
            .placement(LegendPlacement.BOTTOM)
            .calcs(["lastNotNull", "max"])
        )
        .tooltip(common.VizTooltipOptions().mode(TooltipDisplayMode.MULTI).sort(SortOrder.DESCENDING))
        .height(8)
        .span(12)
    )
    for letter, (expression, legend) in zip(ascii_uppercase, queries, strict=False):
        panel = panel.with_target(_query(expression, legend, letter))
    return panel


def _described(panel: Any, title: str, description: str, unit: str) -> Any:
    return panel.title(title).description(description).unit(unit).datasource(SOURCE)


def _query(expression: str, legend: str, letter: str = "A") -> Any:
    return prometheus.Dataquery().expr(expression).legend_format(legend).ref_id(letter).datasource(SOURCE)


def _variable(name: str, label: str, query: str) -> Any:
    return (
        dashboard.QueryVariable(name)
        .label(label)
        .datasource(SOURCE)
        .query(query)
        .refresh(VariableRefresh.ON_TIME_RANGE_CHANGED)
        .sort(VariableSort.NATURAL_ASC)
    )


def _colour(name: str) -> DynamicConfigValue:
    return DynamicConfigValue("color", {"mode": "fixed", "fixedColor": name})


if __name__ == "__main__":
    TARGET.write_text(node_dashboard(), encoding="utf-8")
