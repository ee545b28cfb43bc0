"""Fleet: the fullest devices, the jobs, users and namespaces that use their memory, and the idle cache."""

from __future__ import annotations

from typing import Any

from grafana_foundation_sdk.builders import dashboard
from grafana_foundation_sdk.models import units

from gpumem_dashboards import engines, oom_list
from gpumem_dashboards.frame import board, link, live_page, with_rows
from gpumem_dashboards.palette import PRESSURE, ledger_words, none_is_good
from gpumem_dashboards.panels import columns, count, graph, history, idle_cache, number, share_reported, stacked
from gpumem_dashboards.promql import (
    ABOVE,
    CLUSTER,
    DEVICE,
    EXPORTER_UP,
    GPU,
    NODE,
    ON_PROCESS,
    PROCESS,
    above_seconds,
    hard_used_ratio,
    largest_category,
    largest_process,
    process_used,
    seconds_to_full,
    with_info,
)
from gpumem_dashboards.tables import Column, matrix, table

WORKLOAD = f'{GPU}, workload=~"$workload"'
OWNERS = f'{NODE}, workload=~"$workload", user=~"$user", k8s_namespace=~"$namespace"'
SHOWN = 20
"""The maximum number of devices and jobs in a panel."""

CELL = {"cluster": "__data.fields.cluster", "node": "__data.fields.instance"}
TO_NODE = ("This node", link("gpumem-node", **CELL))
TO_DEVICE = ("This device", link("gpumem-node", **CELL, gpu="__data.fields.gpu"))
TO_DEVICE_PAGE = ("This device on the live page", live_page(CELL["node"], gpu="__data.fields.gpu"))
TO_EXPORTERS = link("gpumem-exporter", "cluster", "node")
TO_WORKLOAD = ("This workload", link("gpumem-workload", cluster=CELL["cluster"], workload="__data.fields.workload"))
TO_JOB = ("This job on the live page", live_page(CELL["node"], workload="__data.fields.workload"))

_DEVICE_COLUMNS = (
    Column("cluster", heading="Cluster"),
    Column("instance", heading="Node", links=[TO_DEVICE, TO_DEVICE_PAGE]),
    Column("gpu", heading="GPU", width=60),
)


def fleet() -> Any:
    """Build the dashboard of all nodes, the entry to the others."""
    made = board(
        "GPU memory: fleet",
        "gpumem-fleet",
        "The fullest devices, the jobs, users and namespaces that use their memory, and the idle cache. Rows link"
        " to the node, the workload, the live page or the post-mortem.",
        time="now-1h",
        refresh="5m",  # its queries read all nodes: docs/sizing.md
        variables=[
            ("node", "Node", f"gpumem_exporter_build_info{{{CLUSTER}}}", "instance"),
            ("gpu", "GPU", f"gpumem_device_up{{{NODE}}}", "gpu"),
            ("user", "User", f"gpumem_process_info{{{NODE}}}", "user"),
            ("namespace", "Namespace", f"gpumem_process_info{{{NODE}}}", "k8s_namespace"),
            ("workload", "Workload", f"gpumem_reporter_up{{{NODE}}}", "workload"),
        ],
        first=[
            ("node", f"gpumem_exporter_build_info{{{NODE}}}", "instance"),
            ("workload", f'gpumem_reporter_up{{{NODE}, workload=~"$workload"}}', "workload"),
        ],
        ooms=WORKLOAD,
        actions=NODE,
    )
    errors = oom_list.listed(WORKLOAD, node_shown=True)
    return with_rows(
        made,
        ("Devices", [*_overview(), _devices(), _matrix(), _history()]),
        (
            "Jobs of the selected users, namespaces and workloads",
            [
                _jobs(),
                _owners("Users", "user", "user", "The row without a name has processes of unknown or hidden users."),
                _owners(
                    "Namespaces",
                    "k8s_namespace",
                    "namespace",
                    "The row without a name has processes outside Kubernetes.",
                ),
                _users_over_time(),
                _wasted_over_time(),
            ],
        ),
        ("Engines", [engines.listed(WORKLOAD, [TO_WORKLOAD, TO_JOB], TO_NODE)]),
        ("Out of memory", [_errors_over_the_day(), _retries_over_the_day(), errors]),
        ("Silent reporters and unused capacity", [_silent(), _idle(), _held()]),
        open_rows=3,
    )


def _overview() -> list[Any]:
    nearly_full = f"({hard_used_ratio(GPU)}) > bool {ABOVE}"
    return [
        number(
            "Devices above 90 %",
            "Devices with less than a tenth of their memory free or reclaimable: the next large allocation"
            " fails there. Some jobs fill a device on purpose. The table below lists them.",
            (f"sum({nearly_full})", "devices"),
            (f"count({hard_used_ratio(GPU)})", "of"),
            unit=units.Short,
        ),
        share_reported(NODE),
        idle_cache("reporting process", WORKLOAD, f'gpumem_ledger_bytes{{{GPU}, category="torch_reclaimable"}}'),
        count(
            "Out-of-memory errors",
            "Out-of-memory errors that processes reported in the time range, including errors that the program caught.",
            f'round(sum(increase(gpumem_events_total{{{NODE}, type="oom"}}[$__range])))',
            span=3,
        ),
        count(
            "Allocation retries",
            "Allocations in the time range that succeeded only after PyTorch flushed its cache. Each retry"
            " stalls its program and often precedes an out-of-memory error.",
            f"round(sum(increase(gpumem_torch_alloc_retries_total{{{WORKLOAD}}}[$__range])))",
            span=3,
        ),
        count(
            "Silent reporters",
            "Processes that stopped reporting and are not known to have exited. The table at the bottom lists them.",
            f'sum(1 - gpumem_reporter_up{{{NODE}, workload=~"$workload"}})',
            span=3,
        ),
        number(
            "Down",
            "Devices that the driver cannot read, exporters whose driver does not answer, and exporters that"
            " Prometheus knew in the time range and cannot scrape now. Click to see which.",
            (f"sum(1 - gpumem_device_up{{{GPU}}})", "devices"),
            (f"sum(1 - gpumem_nvml_up{{{NODE}}})", "drivers"),
            (f"sum(1 - ({EXPORTER_UP}))", "exporters"),
            unit=units.Short,
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
        [
            *_DEVICE_COLUMNS,
            Column("Pressure", hard_used_ratio(GPU), units.PercentUnit, PRESSURE, gauge=True, width=160),
            Column("Above 90 % for", above_seconds(GPU), units.Seconds, width=120),
            Column("Full in", full, units.Seconds, width=90),
            Column("Allocatable", f"sum by ({DEVICE}) (gpumem_device_allocatable_bytes{{{GPU}}})", width=110),
            Column("Idle cache", f"sum by ({DEVICE}) (gpumem_torch_idle_cache_bytes{{{GPU}}})", width=110),
            Column("Reclaimable", by_device % '"torch_reclaimable"', width=140),
            Column("Fragmented", by_device % '"torch_fragmented"', width=110),
            Column("workload", heading="Largest process", links=[TO_WORKLOAD, TO_JOB]),
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
        " Click a cell to see the device. Of nodes with equal names in different clusters, the fuller device is shown.",
        f"max by (instance, gpu) ({hard_used_ratio(GPU)})",
        # Grafana resolves names before numbers, and the column of GPU 0 is named 0.
        ("This device", link("gpumem-node", "cluster", node="__data.fields.Node", gpu="__field.name")),
        span=24,
        height=7,
    )


def _history() -> Any:
    pressure = hard_used_ratio(GPU)
    worst = f"topk({SHOWN}, max_over_time(({pressure})[$__range:$__rate_interval] @ end()))"
    return (
        history(
            "Pressure over time",
            f"One row per device, for the {SHOWN} devices with the highest pressure. A row that turns orange and stays"
            " orange is a leak or a job that does not fit; stripes are steps.",
            (f"({pressure}) and on ({DEVICE}) {worst}", "{{instance}} GPU {{gpu}}"),
            unit=units.PercentUnit,
            limits=PRESSURE,
        )
        .min(0)
        .max(1)
    )


def _of_owners(expression: str, by: str) -> str:
    """Return the sum of a value of processes on devices by labels of the selected processes."""
    return f"sum by ({by}) ({with_info(expression, 'workload, user, k8s_namespace', OWNERS)})"


def _counts_and_bytes(by: str, only: str = "") -> list[Column]:
    """Return the columns of the processes, devices and bytes by labels; `only` restricts the rows."""

    def of_torch(name: str) -> str:
        return _of_owners(f"sum by ({PROCESS}) (gpumem_torch_{name}_bytes{{{GPU}}})", by) + only

    def number_of(what: str) -> str:
        return f"count by ({by}) ({_of_owners(process_used(GPU), f'{by}, {what}')}){only}"

    processes, devices = ("pid", "uuid") if "instance" in by else ("cluster, instance, pid", "cluster, instance, uuid")
    return [
        Column("Processes", number_of(processes), units.Short, width=90),
        Column("Devices", number_of(devices), units.Short, width=80),
        Column("Used", _of_owners(process_used(GPU), by) + only, width=110),
        Column("Idle cache", of_torch("idle_cache"), width=110),
        Column("Reclaimable", of_torch("reclaimable"), width=110),
        Column("Fragmented", of_torch("fragmented"), width=110),
    ]


def _jobs() -> Any:
    by = "cluster, instance, workload, user, k8s_namespace"
    largest = f" and on ({by}) topk({SHOWN}, {_of_owners(process_used(GPU), by)})"
    return table(
        "Jobs",
        f"The {SHOWN} jobs with the most used memory: the processes of one workload and one user on one node. A clear"
        " releases the idle cache for good; the job reserves the rest of the reclaimable bytes again. The processes of"
        " a user without a workload are one row. Click a workload to see its ranks, or its page on the node.",
        [
            Column("workload", heading="Workload", links=[TO_WORKLOAD, TO_JOB]),
            Column("user", heading="User"),
            Column("k8s_namespace", heading="Namespace"),
            Column("cluster", heading="Cluster"),
            Column("instance", heading="Node", links=[TO_NODE]),
            *_counts_and_bytes(by, largest),
        ],
        sort_by="Used",
    )


def _owners(title: str, label: str, name: str, unnamed: str) -> Any:
    here = link("gpumem-fleet", "cluster", "node", **{name: f"__data.fields.{label}"})
    return table(
        title,
        f"The memory that processes use, and their cache, by {name}. {unnamed} Click a name to see its jobs.",
        [Column(label, heading=title[:-1], links=[("Its jobs", here)]), *_counts_and_bytes(label)],
        sort_by="Used",
        span=12,
        height=8,
    )


def _users_over_time() -> Any:
    panel = graph(
        "Used over time, by user",
        "The memory that the processes of each user use, stacked. The line without a name has the processes of unknown"
        " or hidden users.",
        (_of_owners(process_used(GPU), "user"), "{{user}}"),
        height=9,
    )
    return stacked(panel, 50)


def _wasted_over_time() -> Any:
    series = [
        (f"sum(gpumem_torch_{name}_bytes{{{WORKLOAD}}})", name, shade)
        for name, shade in (("reclaimable", "green"), ("fragmented", "orange"))
    ]
    panel = graph(
        "Cache over time",
        "Bytes of the selected workloads that PyTorch reserved and no tensor uses. Reclaimable bytes increase"
        " after a peak; fragmented bytes that keep growing show that fragmentation builds up.",
        *series,
        height=9,
    )
    return stacked(panel)


def _errors_over_the_day() -> Any:
    increase = f'increase(gpumem_events_total{{{NODE}, type="oom"}}[$__rate_interval])'
    panel = graph(
        "Out-of-memory errors in the last day, by node",
        "Errors per ten minutes in the last day, independent of the time range of the dashboard.",
        (f"sum by (cluster, instance) ({increase})", "{{instance}}"),
        unit=units.Short,
    )
    return columns(panel, "10m").time_from("24h")


def _retries_over_the_day() -> Any:
    increase = f"increase(gpumem_torch_alloc_retries_total{{{WORKLOAD}}}[$__rate_interval])"
    panel = graph(
        "Allocation retries in the last day, by workload",
        "Allocations per ten minutes in the last day that succeeded only after PyTorch flushed its cache."
        " Retries precede out-of-memory errors.",
        (f"sum by (workload) ({increase})", "{{workload}}"),
        unit=units.Short,
    )
    return columns(panel, "10m").time_from("24h")


def _silent() -> Any:
    chosen = f'{NODE}, workload=~"$workload"'
    # The sum removes the target's labels; a target in Kubernetes has another `pod`.
    silent = (
        "sum by (cluster, instance, pid, workload, rank)"
        f" (time() - gpumem_reporter_last_report_timestamp_seconds{{{chosen}}})"
        f" and {ON_PROCESS} gpumem_reporter_up{{{chosen}}} == 0"
    )
    return table(
        "Silent processes",
        "Processes that stopped reporting and are not known to have exited: they hang, are stopped, or cannot"
        " reach the exporter. Their memory counts as other processes until they report again.",
        [
            Column("cluster", heading="Cluster"),
            Column("instance", heading="Node", links=[TO_NODE]),
            Column("workload", heading="Workload", links=[TO_WORKLOAD, TO_JOB]),
            Column("rank", heading="Rank"),
            Column("pid"),
            Column("user"),
            Column("k8s_pod", heading="pod"),
            Column("command"),
            Column("Last report", with_info(silent, "command, user, k8s_pod"), heading="Silent for"),
        ],
        unit=units.Seconds,
        sort_by="Silent for",
        no_value="No process is silent.",
        span=12,
        height=9,
    )


def _held() -> Any:
    computes = f"max_over_time(gpumem_device_utilization_ratio{{{GPU}}}[$__range])"
    still = f"sum by ({DEVICE}) ({computes}) < 0.01"
    held = f"({process_used(GPU)} > 2 ^ 28) and on ({DEVICE}) ({still})"
    return table(
        "Holds memory, computes nothing",
        "Processes with memory on devices on which no kernel ran in the whole time range. On a device whose"
        " utilization the driver does not know, such as a MIG device, this is unknown.",
        [
            *_DEVICE_COLUMNS,
            Column("workload", heading="Workload", links=[TO_WORKLOAD, TO_JOB]),
            Column("pid"),
            Column("user"),
            Column("command"),
            Column("Held", with_info(held, "workload, command, user")),
        ],
        sort_by="Held",
        no_value="Every process is on a device that computes.",
        drop=("uuid",),
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
        [
            *_DEVICE_COLUMNS,
            Column("Never used", never),
            Column("Used while idle", f"{held} * (1 - {busy})"),
            Column("Used", held),
            Column("Utilization", busy, units.PercentUnit, gauge=True, limits=((None, "yellow"), (0.5, "green"))),
        ],
        sort_by="Never used",
        drop=("uuid",),
        span=12,
        height=9,
    )
