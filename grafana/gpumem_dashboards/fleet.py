"""Fleet: which device is in trouble, whose memory it is and of what kind, since when, and what a clear would give."""

from __future__ import annotations

from typing import Any

from grafana_foundation_sdk.builders import dashboard
from grafana_foundation_sdk.models import units

from gpumem_dashboards import oom_list
from gpumem_dashboards.frame import actions_annotation, board, first_of, link, ooms_annotation, variable
from gpumem_dashboards.palette import PRESSURE, colour, ledger_words, none_is_good, shares
from gpumem_dashboards.panels import columns, count, graph, history, number, stacked
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

__all__ = ["fleet"]

WORKLOAD = f'{GPU}, workload=~"$workload"'
SHOWN = 20
"""Of a fleet's devices and workloads, those that matter most."""

TO_NODE = ("This node", link("gpumem-node", node="__data.fields.instance", gpu="__data.fields.gpu"))
TO_EXPORTERS = "/d/gpumem-exporter?${datasource:queryparam}&${__url_time_range}&${node:queryparam}"
TO_WORKLOAD = ("This workload", link("gpumem-workload", workload="__data.fields.workload"))


def fleet() -> Any:
    """The dashboard that one opens first."""
    made = (
        board(
            "GPU memory: fleet",
            "gpumem-fleet",
            "Which device is in trouble, whose memory it is and of what kind, since when, and what a clear would give"
            " back. Each row leads to its node, its workload or its post-mortem.",
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
        .with_row(dashboard.Row("Who is in trouble"))
    )
    for panel in (*_figures(), _devices(), _matrix(), _history()):
        made = made.with_panel(panel)
    made = made.with_row(dashboard.Row("Wasted: in no tensor"))
    for panel in (_wasted_workloads(), _wasted_over_time()):
        made = made.with_panel(panel)
    made = made.with_row(dashboard.Row("Out of memory"))
    for panel in (_errors_over_the_day(), _retries_over_the_day(), oom_list.listed(WORKLOAD, node_shown=True)):
        made = made.with_panel(panel)
    made = made.with_row(dashboard.Row("Silent, and idle"))
    for panel in (_silent(), _idle()):
        made = made.with_panel(panel)
    return made


def _figures() -> list[Any]:
    return [
        count(
            "Devices above 90 %",
            "Devices of whose memory less than a tenth is free or would come back by a clear: the next large"
            " allocation there fails. The table below names them.",
            f"sum(({hard_used_ratio(GPU)}) > bool {ABOVE})",
        ),
        number(
            "A clear would give back",
            "Bytes that torch.cuda.empty_cache() in every reporting process would return to the driver now.",
            units.BytesIEC,
            f'sum(gpumem_ledger_bytes{{{GPU}, category="torch_reclaimable"}})',
        ),
        count(
            "Out-of-memory errors",
            "Errors that processes told of in the time shown, caught ones included.",
            f'round(sum(increase(gpumem_events_total{{{NODE}, type="oom"}}[$__range])))',
        ),
        count(
            "Allocation retries",
            "Allocations that found no memory until PyTorch had flushed its cache, in the time shown: each stalls its"
            " program, and an out-of-memory error is near.",
            f"round(sum(increase(gpumem_torch_alloc_retries_total{{{WORKLOAD}}}[$__range])))",
            bad="orange",
        ),
        count(
            "Reporters silent",
            "Processes that reported and do so no more, though they are not known to have ended. Listed at the bottom.",
            f'sum(1 - gpumem_reporter_up{{{NODE}, workload=~"$workload"}})',
        ),
        number(
            "Down",
            "Devices for which the driver does not answer, exporters whose driver does not answer at all, and exporters"
            " that Prometheus knew in the time shown and cannot scrape now: of those nodes nothing is known. Click to"
            " see which.",
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
        "Devices, the most pressed first",
        "Pressure is the share of a device's memory that is neither free nor would come back by a clear. The largest"
        " process and its share of the bytes say whose memory it is; most of it says of what kind. Full in: at the"
        " pace at which the bytes in use grew over the time shown. Click a node to see the device.",
        units.BytesIEC,
        [
            Column("instance", heading="Node", link=TO_NODE),
            Column("gpu", heading="GPU", width=60),
            Column("Pressure", hard_used_ratio(GPU), units.PercentUnit, PRESSURE, gauge=True, width=160),
            Column("Above 90 % for", above_seconds(GPU), units.Seconds, width=120),
            Column("Full in", full, units.Seconds, width=90),
            Column("A clear gives back", by_device % '"torch_reclaimable"', width=140),
            Column("Fragmented", by_device % '"torch_fragmented"', width=110),
            Column("workload", heading="Largest process", link=TO_WORKLOAD),
            Column("command", heading="command"),
            Column("user", heading="user"),
            Column("It holds", largest_process(GPU, "workload, command, user"), width=100),
            Column("category", heading="Most of it", mapping=ledger_words()),
            Column("Of that kind", largest_category(GPU), width=110),
        ],
        sort_by="Pressure",
        drop=("uuid", "pid"),
    )


def _matrix() -> Any:
    return matrix(
        "Pressure now, nodes by devices",
        "One row a node, one column a device: the share of its memory that is neither free nor would come back by a"
        " clear. Click a cell to see the device.",
        f"sum by (instance, gpu) ({hard_used_ratio(GPU)})",
        # By its name: names come before numbers, and the column of GPU 0 is called 0.
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
            f"Since when: one row a device, time to the right, for the {SHOWN} devices that were pressed most. A row"
            " that turns red and stays so is a leak or a job that does not fit; stripes are steps.",
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
        return f"({expression}) and on (workload) topk({SHOWN}, {wasted})"

    return table(
        "Workloads by wasted bytes",
        "Wasted: reserved by PyTorch and in no tensor. A clear returns the one part to the driver at once; the"
        " fragmented part needs expandable segments or other sizes. The row without a name is of processes that were"
        " given none. Click a workload to see its ranks.",
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
            Column("A clear gives back", top(reclaimable), width=150),
            Column("Fragmented", top(fragmented), width=120),
            Column("Wasted", top(wasted), width=120),
            Column(
                "Share wasted",
                top(f"({wasted}) / {total('gpumem_torch_reserved_bytes')}"),
                units.PercentUnit,
                shares(0.25, 0.5),
                gauge=True,
            ),
        ],
        sort_by="Wasted",
        span=14,
        height=9,
    )


def _wasted_over_time() -> Any:
    queries = [
        (f"sum(gpumem_torch_reclaimable_bytes{{{WORKLOAD}}})", "a clear gives it back"),
        (f"sum(gpumem_torch_fragmented_bytes{{{WORKLOAD}}})", "fragmented"),
    ]
    panel = graph(
        "Wasted over time",
        "Bytes of all the workloads chosen that PyTorch holds and no tensor uses. Green steps are peaks that have"
        " passed; orange that grows is fragmentation that builds up.",
        units.BytesIEC,
        queries,
        span=10,
        height=9,
    ).min(0)
    return (
        stacked(panel)
        .override_by_name("a clear gives it back", [colour("green")])
        .override_by_name("fragmented", [colour("orange")])
    )


def _errors_over_the_day() -> Any:
    increase = f'increase(gpumem_events_total{{{NODE}, type="oom"}}[$__rate_interval])'
    panel = graph(
        "Out-of-memory errors over the day, by node",
        "Errors in every ten minutes of the last day, whatever time is shown elsewhere.",
        units.Short,
        [(f"sum by (instance) ({increase})", "{{instance}}")],
    )
    return columns(panel, "10m").time_from("24h").min(0)


def _retries_over_the_day() -> Any:
    increase = f"increase(gpumem_torch_alloc_retries_total{{{WORKLOAD}}}[$__rate_interval])"
    panel = graph(
        "Allocation retries over the day, by workload",
        "Allocations in every ten minutes of the last day that succeeded only after PyTorch had flushed its cache. They"
        " come before the errors.",
        units.Short,
        [(f"sum by (workload) ({increase})", "{{workload}}")],
    )
    return columns(panel, "10m").time_from("24h").min(0)


def _silent() -> Any:
    chosen = f'{NODE}, workload=~"$workload"'
    # Summed, so that no label of the target becomes a column: of Kubernetes' there is another pod among them.
    silent = (
        "sum by (instance, pid, workload, rank)"
        f" (time() - gpumem_reporter_last_report_timestamp_seconds{{{chosen}}})"
        f" and on (instance, pid) gpumem_reporter_up{{{chosen}}} == 0"
    )
    return table(
        "Reporters that went silent",
        "Processes that reported, have fallen silent and are not known to have ended: hung, stopped, or cut off from"
        " the exporter. Their bytes count as those of processes without a reporter until they speak again.",
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
        no_value="Every reporter reports.",
        span=12,
        height=9,
    )


def _idle() -> Any:
    busy = f"sum by ({DEVICE}) (avg_over_time(gpumem_device_utilization_ratio{{{GPU}}}[$__range]))"
    held = f"sum by ({DEVICE}) (avg_over_time(gpumem_device_memory_used_bytes{{{GPU}}}[$__range]))"
    never = f"sum by ({DEVICE}) (min_over_time(gpumem_device_memory_free_bytes{{{GPU}}}[$__range]))"
    return table(
        "Capacity that sits idle",
        "Of the time shown. Never used: bytes that were free all the time. Held idle: the bytes in use on average,"
        " times the share of the time in which no kernel ran. A device high in both columns could take another job.",
        units.BytesIEC,
        [
            Column("instance", heading="Node", link=TO_NODE),
            Column("gpu", heading="GPU", width=60),
            Column("Never used", never),
            Column("Held idle", f"{held} * (1 - {busy})"),
            Column("Held", held),
            Column(
                "Busy", busy, units.PercentUnit, gauge=True, limits=((None, "red"), (0.2, "yellow"), (0.5, "green"))
            ),
        ],
        sort_by="Never used",
        drop=("uuid",),
        span=12,
        height=9,
    )
