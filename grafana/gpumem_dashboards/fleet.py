"""Fleet: the fullest devices, the processes that use their memory, and the reclaimable bytes."""

from __future__ import annotations

from typing import Any

from grafana_foundation_sdk.builders import dashboard
from grafana_foundation_sdk.models import units

from gpumem_dashboards import oom_list
from gpumem_dashboards.frame import actions_annotation, board, first_of, link, ooms_annotation, variable, with_rows
from gpumem_dashboards.palette import PRESSURE, ledger_words, none_is_good, shares
from gpumem_dashboards.panels import colored, columns, count, graph, history, number, stacked
from gpumem_dashboards.promql import (
    ABOVE,
    DEVICE,
    EXPORTER_UP,
    GPU,
    NODE,
    above_seconds,
    hard_used_ratio,
    largest_category,
    largest_process,
    seconds_to_full,
    with_info,
)
from gpumem_dashboards.tables import Column, matrix, table

WORKLOAD = f'{GPU}, workload=~"$workload"'
SHOWN = 20
"""The maximum number of devices and workloads in a panel."""

TO_NODE = ("This node", link("gpumem-node", node="__data.fields.instance", gpu="__data.fields.gpu"))
TO_EXPORTERS = "/d/gpumem-exporter?${datasource:queryparam}&${__url_time_range}&${node:queryparam}"
TO_WORKLOAD = ("This workload", link("gpumem-workload", workload="__data.fields.workload"))


def fleet() -> Any:
    """Build the dashboard of all nodes, the entry to the others."""
    made = (
        board(
            "GPU memory: fleet",
            "gpumem-fleet",
            "The fullest devices, the processes that use their memory, and the reclaimable bytes. Rows link to"
            " the node, the workload or the post-mortem.",
            time="now-1h",
            refresh="30s",
        )
        .with_variable(variable("node", "Node", "gpumem_exporter_build_info", "instance"))
        .with_variable(variable("gpu", "GPU", f"gpumem_device_up{{{NODE}}}", "gpu"))
        .with_variable(variable("workload", "Workload", f"gpumem_reporter_up{{{NODE}}}", "workload"))
        .with_variable(first_of("node", f"gpumem_exporter_build_info{{{NODE}}}", "instance"))
        .with_variable(first_of("workload", f'gpumem_reporter_up{{{NODE}, workload=~"$workload"}}', "workload"))
        .annotation(ooms_annotation(WORKLOAD))
        .annotation(actions_annotation())
    )
    errors = oom_list.listed(WORKLOAD, node_shown=True)
    return with_rows(
        made,
        ("Devices", [*_overview(), _devices(), _matrix(), _history()]),
        ("Cache: reserved and in no tensor", [_wasted_workloads(), _wasted_over_time()]),
        ("Out of memory", [_errors_over_the_day(), _retries_over_the_day(), errors]),
        ("Silent reporters and unused capacity", [_silent(), _idle()]),
    )


def _overview() -> list[Any]:
    return [
        count(
            "Devices above 90 %",
            "Devices with less than a tenth of their memory free or reclaimable: the next large allocation"
            " fails there. The table below lists them.",
            f"sum(({hard_used_ratio(GPU)}) > bool {ABOVE})",
        ),
        number(
            "Idle cache",
            "Idle cache: bytes of PyTorch's caches that no process needed in the last minute. A clear releases them for"
            " good. A clear now: what torch.cuda.empty_cache() in every reporting process would release now. All"
            " above the idle cache would be reserved again.",
            units.BytesIEC,
            [
                (f"sum(gpumem_torch_idle_cache_bytes{{{WORKLOAD}}})", "idle cache"),
                (f'sum(gpumem_ledger_bytes{{{GPU}, category="torch_reclaimable"}})', "a clear now"),
            ],
        ),
        count(
            "Out-of-memory errors",
            "Out-of-memory errors that processes reported in the time range, including errors that the program caught.",
            f'round(sum(increase(gpumem_events_total{{{NODE}, type="oom"}}[$__range])))',
        ),
        count(
            "Allocation retries",
            "Allocations in the time range that succeeded only after PyTorch flushed its cache. Each retry"
            " stalls its program and often precedes an out-of-memory error.",
            f"round(sum(increase(gpumem_torch_alloc_retries_total{{{WORKLOAD}}}[$__range])))",
            bad="orange",
        ),
        count(
            "Silent reporters",
            "Processes that stopped reporting and are not known to have exited. The table at the bottom lists them.",
            f'sum(1 - gpumem_reporter_up{{{NODE}, workload=~"$workload"}})',
        ),
        number(
            "Down",
            "Devices that the driver cannot read, exporters whose driver does not answer, and exporters that"
            " Prometheus knew in the time range and cannot scrape now. Click to see which.",
            units.Short,
            [
                (f"sum(1 - gpumem_device_up{{{GPU}}})", "devices"),
                (f"sum(1 - gpumem_nvml_up{{{NODE}}})", "drivers"),
                (f"sum(1 - ({EXPORTER_UP}))", "exporters"),
            ],
            limits=none_is_good(),
            decimals=0,
        ).data_links([dashboard.DashboardLink("Which ones").url(TO_EXPORTERS)]),
    ]


def _devices() -> Any:
    by_device = f"sum by ({DEVICE}) (gpumem_ledger_bytes{{{GPU}, category=~%s}})"
    free = f'sum by ({DEVICE}) (gpumem_ledger_bytes{{{GPU}, category=~"free|torch_reclaimable"}})'
    full = seconds_to_full(free, "gpumem_device_memory_used_bytes", GPU, DEVICE)
    return table(
        "Devices by pressure",
        "Pressure is the share of a device's memory that is neither free nor reclaimable. Largest process and"
        " largest category say where the memory is. Full in is the time until the device is full at the growth"
        " rate of the time range. Allocatable is the free memory and the idle cache: the space for another process."
        " Click a node to see the device.",
        units.BytesIEC,
        [
            Column("instance", heading="Node", link=TO_NODE),
            Column("gpu", heading="GPU", width=60),
            Column("Pressure", hard_used_ratio(GPU), units.PercentUnit, PRESSURE, gauge=True, width=160),
            Column("Above 90 % for", above_seconds(GPU), units.Seconds, width=120),
            Column("Full in", full, units.Seconds, width=90),
            Column("Allocatable", f"sum by ({DEVICE}) (gpumem_device_allocatable_bytes{{{GPU}}})", width=110),
            Column("Idle cache", f"sum by ({DEVICE}) (gpumem_torch_idle_cache_bytes{{{GPU}}})", width=110),
            Column("Reclaimable", by_device % '"torch_reclaimable"', width=140),
            Column("Fragmented", by_device % '"torch_fragmented"', width=110),
            Column("workload", heading="Largest process", link=TO_WORKLOAD),
            Column("command", heading="command"),
            Column("user", heading="user"),
            Column("Its bytes", largest_process(GPU, "workload, command, user"), width=100),
            Column("category", heading="Largest category", mapping=ledger_words()),
            Column("Bytes of category", largest_category(GPU), width=110),
        ],
        sort_by="Pressure",
        drop=("uuid", "pid"),
    )


def _matrix() -> Any:
    return matrix(
        "Pressure by node and device",
        "One row per node, one column per device: the share of its memory that is neither free nor reclaimable."
        " Click a cell to see the device.",
        f"sum by (instance, gpu) ({hard_used_ratio(GPU)})",
        # Grafana resolves names before numbers, and the column of GPU 0 is named 0.
        ("This device", link("gpumem-node", node="__data.fields.Node", gpu="__field.name")),
        span=24,
        height=7,
    )


def _history() -> Any:
    pressure = hard_used_ratio(GPU)
    worst = f"topk({SHOWN}, max_over_time(({pressure})[$__range:$__rate_interval] @ end()))"
    return (
        history(
            "Pressure over time",
            f"One row per device, for the {SHOWN} devices with the highest pressure. A row that turns red and stays red"
            " is a leak or a job that does not fit; stripes are steps.",
            units.PercentUnit,
            [(f"({pressure}) and on ({DEVICE}) {worst}", "{{instance}} GPU {{gpu}}")],
            PRESSURE,
        )
        .min(0)
        .max(1)
    )


def _wasted_workloads() -> Any:
    def total(metric: str) -> str:
        return f"sum by (workload) ({metric}{{{WORKLOAD}}})"

    reclaimable, fragmented = total("gpumem_torch_reclaimable_bytes"), total("gpumem_torch_fragmented_bytes")
    wasted = f"{reclaimable} + {fragmented}"

    def top(expression: str) -> str:
        return f"({expression}) and on (workload) topk({SHOWN}, {wasted} > 0)"

    return table(
        "Workloads by cache",
        "Cache is memory that PyTorch reserved and no tensor uses. A clear releases the reclaimable part to the"
        " driver, of which only the idle cache stays free; the fragmented part needs expandable segments or other"
        " sizes. The row without a name has the processes without a workload. Click a workload to see its ranks.",
        units.BytesIEC,
        [
            Column("workload", heading="Workload", link=TO_WORKLOAD),
            Column(
                "Processes",
                top(f'count by (workload) (gpumem_reporter_up{{{NODE}, workload=~"$workload"}} == 1)'),
                units.Short,
                width=100,
            ),
            Column("Reserved", top(total("gpumem_torch_reserved_bytes")), width=120),
            Column("Idle cache", top(total("gpumem_torch_idle_cache_bytes")), width=120),
            Column("Reclaimable", top(reclaimable), width=150),
            Column("Fragmented", top(fragmented), width=120),
            Column("Cache", top(wasted), width=120),
            Column(
                "Share of reserved",
                top(f"({wasted}) / {total('gpumem_torch_reserved_bytes')}"),
                units.PercentUnit,
                shares(0.25, 0.5),
                gauge=True,
            ),
        ],
        sort_by="Cache",
        span=14,
        height=9,
    )


def _wasted_over_time() -> Any:
    series = [
        (f"sum(gpumem_torch_{name}_bytes{{{WORKLOAD}}})", name, shade)
        for name, shade in (("reclaimable", "green"), ("fragmented", "orange"))
    ]
    panel = graph(
        "Cache over time",
        "Bytes of the selected workloads that PyTorch reserved and no tensor uses. Reclaimable bytes increase"
        " after a peak; fragmented bytes that keep growing show that fragmentation builds up.",
        units.BytesIEC,
        [(expression, name) for expression, name, _ in series],
        span=10,
        height=9,
    ).min(0)
    return colored(stacked(panel), series)


def _errors_over_the_day() -> Any:
    increase = f'increase(gpumem_events_total{{{NODE}, type="oom"}}[$__rate_interval])'
    panel = graph(
        "Out-of-memory errors in the last day, by node",
        "Errors per ten minutes in the last day, independent of the time range of the dashboard.",
        units.Short,
        [(f"sum by (instance) ({increase})", "{{instance}}")],
    )
    return columns(panel, "10m").time_from("24h").min(0)


def _retries_over_the_day() -> Any:
    increase = f"increase(gpumem_torch_alloc_retries_total{{{WORKLOAD}}}[$__rate_interval])"
    panel = graph(
        "Allocation retries in the last day, by workload",
        "Allocations per ten minutes in the last day that succeeded only after PyTorch flushed its cache."
        " Retries precede out-of-memory errors.",
        units.Short,
        [(f"sum by (workload) ({increase})", "{{workload}}")],
    )
    return columns(panel, "10m").time_from("24h").min(0)


def _silent() -> Any:
    chosen = f'{NODE}, workload=~"$workload"'
    # The sum removes the target's labels; those of Kubernetes include another `pod`.
    silent = (
        "sum by (instance, pid, workload, rank)"
        f" (time() - gpumem_reporter_last_report_timestamp_seconds{{{chosen}}})"
        f" and on (instance, pid) gpumem_reporter_up{{{chosen}}} == 0"
    )
    return table(
        "Silent processes",
        "Processes that stopped reporting and are not known to have exited: they hang, are stopped, or cannot"
        " reach the exporter. Their memory counts as other processes until they report again.",
        units.Seconds,
        [
            Column("instance", heading="Node"),
            Column("workload", heading="Workload", link=TO_WORKLOAD),
            Column("rank", heading="Rank"),
            Column("pid"),
            Column("user"),
            Column("k8s_pod", heading="pod"),
            Column("command"),
            Column("Last report", with_info(silent, "command, user, k8s_pod"), heading="Silent for"),
        ],
        sort_by="Silent for",
        no_value="No process is silent.",
        span=12,
        height=9,
    )


def _idle() -> Any:
    busy = f"sum by ({DEVICE}) (avg_over_time(gpumem_device_utilization_ratio{{{GPU}}}[$__range]))"
    held = f"sum by ({DEVICE}) (avg_over_time(gpumem_device_memory_used_bytes{{{GPU}}}[$__range]))"
    never = f"sum by ({DEVICE}) (min_over_time(gpumem_device_memory_free_bytes{{{GPU}}}[$__range]))"
    return table(
        "Unused capacity",
        "Never used: bytes that were free during the whole time range. Used while idle: the average of the used"
        " bytes multiplied by the share of time without a kernel. A device that is high in both columns could"
        " take another job.",
        units.BytesIEC,
        [
            Column("instance", heading="Node", link=TO_NODE),
            Column("gpu", heading="GPU", width=60),
            Column("Never used", never),
            Column("Used while idle", f"{held} * (1 - {busy})"),
            Column("Used", held),
            Column(
                "Utilization",
                busy,
                units.PercentUnit,
                gauge=True,
                limits=((None, "red"), (0.2, "yellow"), (0.5, "green")),
            ),
        ],
        sort_by="Never used",
        drop=("uuid",),
        span=12,
        height=9,
    )
