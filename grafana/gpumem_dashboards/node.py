"""Node: the memory of each device by category and by process."""

from __future__ import annotations

from typing import Any

from grafana_foundation_sdk.builders import dashboard
from grafana_foundation_sdk.models import units
from grafana_foundation_sdk.models.common import BigValueTextMode

from gpumem_dashboards.frame import board, collapsed_row, link, live_page, with_live_page, with_rows
from gpumem_dashboards.palette import PRESSURE, UP
from gpumem_dashboards.panels import bars, count, graph, idle_cache, ledger, number, share_reported, stacked
from gpumem_dashboards.promql import (
    CLUSTER,
    DEVICE,
    ON_PROCESS,
    ONE_NODE,
    above_seconds,
    hard_used_ratio,
    process_used,
    seconds_to_full,
    with_info,
)
from gpumem_dashboards.tables import Column, table

GPU = f'{ONE_NODE}, gpu=~"$gpu"'
OF_PROCESSES = 'workload=~"$workload", rank=~"$rank"'
TORCH = f"{GPU}, {OF_PROCESSES}"
LEGEND = "GPU {{gpu}} {{workload}} {{rank}} (pid {{pid}})"
TO_WORKLOAD = (
    "This workload",
    link("gpumem-workload", "cluster", "gpu", node="node", workload="__data.fields.workload"),
)
TO_JOB = ("This job on the live page", live_page("node", workload="__data.fields.workload"))
TO_DEVICE = ("This device on the live page", live_page("node", gpu="__data.fields.gpu"))
TO_THIS_WORKLOAD = link("gpumem-workload", "cluster", node="node", workload="__field.labels.workload")


def node() -> Any:
    """Build the dashboard of one node, with a collapsed row for each device: a node may have sixteen."""
    made = board(
        "GPU memory: one node",
        "gpumem-node",
        "The GPU memory of one node by category and by process, and how much of it is reclaimable.",
        time="now-1h",
        refresh="10s",
        variables=[
            ("node", "Node", f"gpumem_exporter_build_info{{{CLUSTER}}}", "instance"),
            ("gpu", "GPU", f"gpumem_device_up{{{ONE_NODE}}}", "gpu"),
            ("workload", "Workload", f"gpumem_reporter_up{{{ONE_NODE}}}", "workload"),
            ("rank", "Rank", f'gpumem_reporter_up{{{ONE_NODE}, workload=~"$workload"}}', "rank"),
        ],
        first=[("workload", f'gpumem_reporter_up{{{ONE_NODE}, workload=~"$workload"}}', "workload")],
        ooms=TORCH,
        actions=ONE_NODE,
    )
    made = with_rows(made, ("Node", [*_overview(), _devices(), _processes()]))
    made = made.with_row(collapsed_row("GPU $gpu", (_ledger(), _clear(), _holders())).repeat("gpu"))
    return with_rows(with_live_page(made), ("Over time", _over_time()))


def _overview() -> list[Any]:
    return [
        number(
            "Devices up and down",
            "Devices that the driver can read (up) and devices that it cannot read (down). A device that is"
            " down has no memory values.",
            (f"sum(gpumem_device_up{{{GPU}}})", "up"),
            (f"sum(1 - gpumem_device_up{{{GPU}}})", "down"),
            unit=units.Short,
            span=3,
        ),
        number(
            "Highest pressure",
            "The pressure of the fullest device: the share of its memory that is neither free nor reclaimable.",
            f"max({hard_used_ratio(GPU)})",
            unit=units.PercentUnit,
            limits=PRESSURE,
            span=3,
        ),
        share_reported(ONE_NODE),
        idle_cache("reporting process", GPU, f'gpumem_ledger_bytes{{{GPU}, category="torch_reclaimable"}}'),
        number(
            "Fragmented",
            "Bytes of PyTorch's cache that torch.cuda.empty_cache() cannot release.",
            f'sum(gpumem_ledger_bytes{{{GPU}, category="torch_fragmented"}})',
        ),
        count(
            "Out-of-memory errors",
            "Out-of-memory errors that processes of this node reported in the time range, including errors that"
            " the program caught.",
            f'round(sum(increase(gpumem_events_total{{{ONE_NODE}, type="oom"}}[$__range])))',
            span=3,
        ),
        number(
            "Source",
            "nvml: real devices. demo: simulated devices and processes.",
            (f"gpumem_exporter_build_info{{{ONE_NODE}}}", "{{source}} {{version}}"),
            unit=units.NoUnit,
        ).text_mode(BigValueTextMode.NAME),
    ]


def _devices() -> Any:
    def of(category: str) -> str:
        return f'sum by ({DEVICE}) (gpumem_ledger_bytes{{{GPU}, category="{category}"}})'

    def value_of(name: str) -> str:
        return f"sum by ({DEVICE}) (gpumem_device_{name}{{{GPU}}})"

    free = f'sum by ({DEVICE}) (gpumem_ledger_bytes{{{GPU}, category=~"free|torch_reclaimable"}})'
    full = seconds_to_full(free, "gpumem_device_memory_used_bytes", GPU, DEVICE)
    return table(
        "Devices",
        "One row per device. Pressure is the share that is neither free nor reclaimable. Used, free and driver"
        " reserved are the driver's values and add up to the total. Allocatable is free plus the idle cache that a"
        " clear makes free. Unattributed is used memory of no listed"
        " process: it is signed, and near zero on a healthy node. An empty cell means unknown, not zero.",
        [
            Column("gpu", heading="GPU", width=60),
            Column("name", heading="Device", links=[TO_DEVICE]),
            Column("mig_profile", heading="MIG", width=90),
            Column(
                "What",
                f"group by ({DEVICE}, name, mig_profile, driver_version) (gpumem_device_info{{{GPU}}})",
                hidden=True,
            ),
            Column("Up", f"sum by ({DEVICE}) (gpumem_device_up{{{GPU}}})", units.Short, UP, width=60),
            Column("Pressure", hard_used_ratio(GPU), units.PercentUnit, PRESSURE, gauge=True, width=160),
            Column("Above 90 % for", above_seconds(GPU), units.Seconds, width=120),
            Column("Full in", full, units.Seconds, width=90),
            Column("Utilization", value_of("utilization_ratio"), units.PercentUnit, width=70),
            Column("Total", value_of("memory_total_bytes")),
            Column("Used", value_of("memory_used_bytes")),
            Column("Free", value_of("memory_free_bytes")),
            Column("Allocatable", value_of("allocatable_bytes")),
            Column("Driver reserved", value_of("memory_reserved_bytes")),
            Column("Idle cache", f"sum by ({DEVICE}) (gpumem_torch_idle_cache_bytes{{{GPU}}})"),
            Column("Reclaimable", of("torch_reclaimable")),
            Column("Fragmented", of("torch_fragmented")),
            Column("Unattributed", of("unattributed")),
            Column("driver_version", heading="Driver", width=110),
        ],
        sort_by="GPU",
        descending=False,
        drop=("instance", "uuid"),
        height=9,
    )


def _processes() -> Any:
    by = "cluster, instance, gpu, pid"
    shown = "workload, rank, command, user, k8s_namespace, k8s_pod, reporting"
    # Only the info series is filtered by workload and rank; the other columns are joined to its rows.
    listed = f"group by ({by}) ({process_used(GPU)})"
    known = f"gpumem_process_info{{{ONE_NODE}, {OF_PROCESSES}}}"

    def value_of(name: str) -> str:
        return f"sum by ({by}) (gpumem_torch_{name}{{{TORCH}}})"

    reported = f"group by ({by}) (gpumem_torch_reserved_bytes{{{TORCH}}})"
    age = f"time() - gpumem_reporter_last_report_timestamp_seconds{{{ONE_NODE}, {OF_PROCESSES}}}"
    inactive = f"time() - gpumem_process_last_activity_timestamp_seconds{{{ONE_NODE}}}"
    return table(
        "Processes",
        "Each process on each device, the largest first. For a process without a reporter, only the driver's"
        " value is known; an empty cell means unknown, not zero. Non-torch is the driver's value minus PyTorch's"
        " reserved bytes: CUDA context, NCCL, libraries; the column NCCL is NCCL's part. Unmapped is what PyTorch"
        " counts and no device has: the engine sleeps. Inactive is the time without a step, an allocation, a request or"
        " utilization. Click a workload to see its ranks.",
        [
            Column("gpu", heading="GPU", width=60),
            Column("workload", heading="Workload", links=[TO_WORKLOAD, TO_JOB]),
            Column("rank", heading="Rank", width=70),
            Column("user", heading="User"),
            Column("k8s_pod", heading="Pod"),
            Column("Who", f"{listed} * {ON_PROCESS} group_left ({shown}) {known}", hidden=True),
            Column("Used", f"sum by ({by}) (gpumem_process_memory_used_bytes{{{GPU}}}) and {ON_PROCESS} {known}"),
            Column("Limit", f"sum by ({by}) (gpumem_process_memory_limit_bytes{{{GPU}}}) and {ON_PROCESS} {known}"),
            Column("Allocated", value_of("allocated_bytes")),
            Column("Reserved", value_of("reserved_bytes")),
            Column("Idle cache", value_of("idle_cache_bytes")),
            Column("Reclaimable", value_of("reclaimable_bytes")),
            Column("Fragmented", value_of("fragmented_bytes")),
            Column("Non-torch", value_of("non_torch_bytes")),
            Column("NCCL", value_of("nccl_bytes")),
            Column("Unmapped", f"{value_of('unmapped_bytes')} > 0"),
            Column(
                "Inactive",
                f"({listed} or {reported}) * {ON_PROCESS} group_left () ({inactive}) and {ON_PROCESS} {known}",
                units.Seconds,
                width=90,
            ),
            Column(
                "Last report",
                f"{reported} * {ON_PROCESS} group_left () ({age})",
                units.Seconds,
                ((None, "transparent"), (5, "yellow"), (15, "orange")),
                width=110,
            ),
            Column("pid", width=90),
            Column("command", heading="Command"),
            Column("k8s_namespace", heading="Namespace"),
            Column("reporting", heading="Reports", width=80),
        ],
        sort_by="Used",
        drop=("instance",),
        height=12,
    )


def _ledger() -> Any:
    return ledger(
        "Ledger of GPU $gpu",
        "The categories add up to the device's total, the dashed line, in every scrape. Unattributed is signed:"
        " it is negative while a report is newer than the driver's last reading.",
        GPU,
    )


def _clear() -> Any:
    return bars(
        "Idle cache on GPU $gpu",
        "The bytes of each process that torch.cuda.empty_cache() would release for good: the cache that it did not"
        " need in the last minute. The fifteen largest processes.",
        (f"sort_desc(topk(15, gpumem_torch_idle_cache_bytes{{{GPU}}}))", "{{workload}} {{rank}} (pid {{pid}})"),
        no_value="no process reports",
        height=10,
    ).data_links([dashboard.DashboardLink("This workload").url(TO_THIS_WORKLOAD)])


def _holders() -> Any:
    held = with_info(process_used(GPU), "workload, rank, command", ONE_NODE)
    panel = graph(
        "Used on GPU $gpu, by process",
        "The driver's value of each process, stacked. A process without a reporter is shown with its command."
        " The upper edge is the used memory of the device without the unattributed bytes.",
        (held, "{{workload}} {{rank}} {{command}} (pid {{pid}})"),
        span=24,
    )
    return stacked(panel, 50)


def _over_time() -> list[Any]:
    def of_torch(name: str) -> tuple[str, str]:
        return f"gpumem_torch_{name}{{{TORCH}}}", LEGEND

    return [
        graph(
            "Pressure, by device",
            "The share of the device's memory that is neither free nor reclaimable.",
            (hard_used_ratio(GPU), "GPU {{gpu}}"),
            unit=units.PercentUnit,
            high=1,
        ),
        graph(
            "Utilization, by device",
            "The share of time in which at least one kernel ran. It does not say how much of the chip the"
            " kernels used.",
            (f"gpumem_device_utilization_ratio{{{GPU}}}", "GPU {{gpu}}"),
            unit=units.PercentUnit,
            high=1,
        ),
        graph(
            "Allocated, by process",
            "Bytes in tensors. In steady training the band is level. A band that rises from step to step shows"
            " tensors that the program no longer needs.",
            of_torch("allocated_bytes"),
        ),
        graph(
            "Non-torch, by process",
            "The driver's value of a process minus PyTorch's reserved bytes: CUDA context, NCCL, libraries. It"
            " is constant after the start; growth is a leak outside PyTorch. It is negative while the report is"
            " newer than the driver's reading.",
            of_torch("non_torch_bytes"),
            (f"gpumem_torch_nccl_bytes{{{TORCH}}}", f"NCCL of {LEGEND}"),
            low=None,
        ),
        graph(
            "Fragmentation, by process",
            "The share of the reserved bytes that is in no tensor and that torch.cuda.empty_cache() cannot release.",
            of_torch("fragmentation_ratio"),
            unit=units.PercentUnit,
            high=1,
        ),
        graph(
            "Slack, by process",
            "The share of the reserved bytes that is in no tensor: reclaimable and fragmented cache. It is high"
            " after a peak, and harmless until another process on the device needs the memory.",
            of_torch("slack_ratio"),
            unit=units.PercentUnit,
            high=1,
        ),
        graph(
            "Allocation retries, by process",
            "Allocations per second that failed at first, so that PyTorch flushed its cache and retried. Each"
            " retry stalls the program and often precedes an out-of-memory error.",
            (f"rate(gpumem_torch_alloc_retries_total{{{TORCH}}}[$__rate_interval])", LEGEND),
            unit=units.CountsPerSecond,
        ),
        graph(
            "Pinned host memory, by process",
            "Host memory that PyTorch keeps pinned for copies. It is on no device, and not available to other"
            " programs on the node.",
            (f"gpumem_torch_pinned_host_bytes{{{ONE_NODE}, {OF_PROCESSES}}}", "{{workload}} {{rank}} (pid {{pid}})"),
        ),
    ]
