"""OOM post-mortem: the request of one out-of-memory error, the available memory, and the cheapest remedy."""

from __future__ import annotations

from typing import Any

from grafana_foundation_sdk.builders import dashboard
from grafana_foundation_sdk.models import units
from grafana_foundation_sdk.models.common import BigValueTextMode

from gpumem_dashboards import oom_list
from gpumem_dashboards.frame import board, link, live_page, with_live_page, with_rows
from gpumem_dashboards.palette import LEDGER, words
from gpumem_dashboards.panels import bars, dashed, graph, ledger, number, stacked
from gpumem_dashboards.promql import CLUSTER, ON_DEVICE, ON_PROCESS, ONE_NODE, filled, info
from gpumem_dashboards.tables import Column, table

GPU = f'{ONE_NODE}, gpu=~"$gpu"'
CHOSEN = f'{GPU}, workload=~"$workload", rank=~"$rank", pid="$pid"'
LISTED = f'{GPU}, workload=~"$workload", rank=~"$rank"'
HAPPENED = f"last_over_time(gpumem_last_oom_timestamp_seconds{{{CHOSEN}}}[$__range])"
# The value at the end of the time range, also when it is evaluated at an earlier time.
HAPPENED_AT_END = f"last_over_time(gpumem_last_oom_timestamp_seconds{{{CHOSEN}}}[$__range] @ end())"
ON_ITS_DEVICE = f" and {ON_DEVICE} {HAPPENED_AT_END}"
RESOLUTION = "5s"

VERDICTS = {
    "1": ("Memory was free a moment later: another allocation was temporary", "blue"),
    "2": ("Clear first: a clear on this device would have released enough", "green"),
    "3": ("Fragmented: expandable segments would have been sufficient", "orange"),
    "4": ("Other processes on the device use the memory", "yellow"),
    "5": ("The process's own memory limit was reached", "purple"),
    "6": ("Too large: allocated bytes plus the request exceed the limit", "red"),
    "0": ("Not enough values are known", "text"),
}
"""The texts of `verdict` by value, from the cheapest remedy to none."""


def value_of(name: str) -> str:
    """Return the query for one value of the selected error."""
    return f"last_over_time(gpumem_last_oom_{name}{{{CHOSEN}}}[$__range])"


def at_that_moment(expression: str) -> str:
    """Return the query for the last value before the error, of series with the labels cluster, instance and uuid.

    The inner query is evaluated every few seconds and has a result only before the error.
    """
    before = f"({HAPPENED_AT_END}) >= time()"
    return f"last_over_time((({expression}) and {ON_DEVICE} ({before}))[$__range:{RESOLUTION}])"


ASKED, FREE, LIMIT = value_of("requested_bytes"), value_of("device_free_bytes"), value_of("limit_bytes")
TENSORS, RESERVED = value_of("allocated_bytes"), value_of("reserved_bytes")
OWN_CACHE, FRAGMENTED = value_of("reclaimable_bytes"), value_of("fragmented_bytes")
OTHERS_CACHE = filled(
    FREE,
    "sum by (cluster, instance, uuid) ("
    + at_that_moment(f'gpumem_torch_reclaimable_bytes{{{ONE_NODE}, gpu=~"$gpu", pid!="$pid"}}')
    + ")",
)
ELSEWHERE = f"clamp_min({LIMIT} - {FREE} - {RESERVED}, 0)"


def verdict() -> str:
    """Return the query for the first of `VERDICTS` whose remedy would have been sufficient."""
    # An allocation must fit on the device and below the process's limit. A clear of others helps only on the device.
    cases = (
        (f"({FREE} >= {ASKED}) and ({RESERVED} + {ASKED} <= {LIMIT})", 1),
        (f"({FREE} + {OWN_CACHE} + {OTHERS_CACHE} >= {ASKED}) and ({RESERVED} - {OWN_CACHE} + {ASKED} <= {LIMIT})", 2),
        (f"({FREE} + {OWN_CACHE} + {FRAGMENTED} >= {ASKED}) and ({TENSORS} + {ASKED} <= {LIMIT})", 3),
        (f"({FREE} + {OWN_CACHE} + {FRAGMENTED} < {ASKED}) and ({TENSORS} + {ASKED} <= {LIMIT})", 4),
        (f"({FREE} >= {ASKED}) and ({TENSORS} + {ASKED} > {LIMIT})", 5),
        (f"{TENSORS} + {ASKED} > {LIMIT}", 6),
        (HAPPENED, 0),
    )
    by = "cluster, instance, gpu, uuid, pid, workload, rank"
    return " or ".join(f"max by ({by}) (({condition}) * 0 + {value})" for condition, value in cases)


def oom() -> Any:
    """Build the dashboard of one error."""
    known = f"gpumem_last_oom_timestamp_seconds{{{GPU}}}"
    chosen = f'gpumem_last_oom_timestamp_seconds{{{GPU}, workload=~"$workload", rank=~"$rank"}}'
    made = board(
        "GPU memory: OOM post-mortem",
        "gpumem-oom",
        "One out-of-memory error: the request, the available memory, the use of the rest, and the minutes before.",
        time="now-30m",
        refresh="1m",
        variables=[
            ("node", "Node", f"gpumem_last_oom_timestamp_seconds{{{CLUSTER}}}", "instance"),
            ("gpu", "GPU", f"gpumem_last_oom_timestamp_seconds{{{ONE_NODE}}}", "gpu"),
            ("workload", "Workload", known, "workload"),
            ("rank", "Rank", f'{known[:-1]}, workload=~"$workload"}}', "rank"),
            ("pid", "Process", chosen, "pid"),
        ],
        first=[("workload", f'{known[:-1]}, workload=~"$workload"}}', "workload")],
        ooms=LISTED,
        actions=ONE_NODE,
    )
    return with_rows(
        with_live_page(made),
        ("What happened", [_verdict(), _when(), _who(), *_overview()]),
        ("The device before the error", [_room(), _ledger_then(), _processes_then()]),
        ("The minutes before", _before()),
        ("Other errors of this node", [oom_list.listed(LISTED, node_shown=False)]),
    )


def _verdict() -> Any:
    return (
        number(
            "Verdict",
            "The cheapest remedy that would have made the request succeed, computed from the values below. The"
            " order is: a retry; a clear of this or another process on the device; expandable segments; fewer"
            " processes on the device; a higher limit (set_per_process_memory_fraction). Otherwise use a smaller"
            " batch, a smaller model or a larger device.",
            verdict(),
            unit=units.NoUnit,
            limits=((None, "text"),),
            no_value="No error is selected",
            span=12,
            height=5,
        )
        .mappings([words(VERDICTS)])
        .text_mode(BigValueTextMode.VALUE)
    )


def _when() -> Any:
    return number(
        "When",
        "The time of the error, on the exporter's clock. The time range must end after it.",
        f"({HAPPENED}) * 1000",
        unit=units.DatetimeISO,
        span=6,
        height=5,
    )


def _who() -> Any:
    workload = link("gpumem-workload", "cluster", node="node", workload="__field.labels.workload")
    page = live_page("node", workload="__field.labels.workload")
    return (
        number(
            "Process",
            "Workload, rank and process of the error, and its device. Click to see the workload.",
            (HAPPENED, "{{workload}} {{rank}} (pid {{pid}}), GPU {{gpu}}"),
            unit=units.NoUnit,
            span=6,
            height=5,
        )
        .text_mode(BigValueTextMode.NAME)
        .data_links(
            [
                dashboard.DashboardLink("This workload").url(workload),
                dashboard.DashboardLink("This job on the live page").url(page),
            ]
        )
    )


def _room() -> Any:
    queries = (
        (ASKED, "requested", "red"),
        (FREE, "free on the device", "#808080"),
        (OWN_CACHE, "reclaimable, of the process", "green"),
        (OTHERS_CACHE, "reclaimable, of other processes", "dark-green"),
        (FRAGMENTED, "fragmented, of the process", "orange"),
        (ELSEWHERE, "non-torch and other processes", "yellow"),
        (TENSORS, "allocated, of the process", "dark-blue"),
    )
    return bars(
        "Requested and available memory",
        "The request is rounded up to a segment, as PyTorch requests it from the driver. If the bar of the free"
        " bytes and one other bar together are as long, that memory would have been sufficient. PyTorch flushes"
        " the process's own cache before it raises the error, so its reclaimable bytes are small except with"
        " pools and limits.",
        *((f"max by (gpu) ({expression})", name, shade) for expression, name, shade in queries),
        no_value="unknown",
        span=12,
        height=10,
    )


def _overview() -> list[Any]:
    shown = (
        ("Requested", "Bytes that PyTorch requested from the driver: the allocation rounded up to a segment.", ASKED),
        ("Free on the device", "The driver's free bytes at the time of the error.", FREE),
        (
            "Missing",
            "The requested minus the free bytes. Zero if the process's own limit was the cause.",
            f"clamp_min({ASKED} - {FREE}, 0)",
        ),
        ("Limit", "The memory of the device, or the part that the process's memory fraction allows.", LIMIT),
        ("Allocated", "Bytes in the tensors of the process at the time of the error.", TENSORS),
        ("Reserved", "Bytes that PyTorch reserved in the process, after it flushed its cache.", RESERVED),
    )
    return [
        number(title, description, f"max by (gpu) ({expression})", span=4) for title, description, expression in shown
    ]


def _ledger_then() -> Any:
    queries = (
        ("max by (gpu) (" + at_that_moment(f'gpumem_ledger_bytes{{{GPU}, category="{category}"}}') + ")", name, shade)
        for category, name, shade in LEDGER
    )
    return bars(
        "Ledger at the last scrape",
        "The categories of the device's memory at the last scrape before the error.",
        *queries,
        no_value="no scrape before the error in the time range",
        span=12,
        height=10,
    )


def _processes_then() -> Any:
    by = "cluster, instance, gpu, pid"

    def then(metric: str) -> str:
        return f"sum by ({by}) (" + at_that_moment(f"{metric}{{{GPU}}}") + ")"

    # A process that has exited since has only a last value of its info series.
    names = f"last_over_time(gpumem_process_info{{{ONE_NODE}}}[$__range])"
    shown = "workload, rank, command, user, k8s_pod"
    newest = f"topk by (cluster, instance, pid) (1, {names})"
    used = then("gpumem_process_memory_used_bytes")
    return table(
        "Processes at the last scrape",
        "The processes at the last scrape before the error, including processes that have exited since, the"
        " largest first. A clear of the other processes would have released their reclaimable bytes.",
        [
            Column("workload", heading="Workload"),
            Column("rank", heading="Rank", width=70),
            Column("user", heading="User"),
            Column("k8s_pod", heading="Pod"),
            Column("Used", f"{used} * {ON_PROCESS} group_left ({shown}) {newest}"),
            Column("Allocated", then("gpumem_torch_allocated_bytes")),
            Column("Reclaimable", then("gpumem_torch_reclaimable_bytes")),
            Column("Fragmented", then("gpumem_torch_fragmented_bytes")),
            Column("command", heading="Command"),
            Column("pid", width=90),
        ],
        sort_by="Used",
        drop=("instance", "gpu"),
        height=8,
    )


def _before() -> list[Any]:
    def own(name: str) -> str:
        return f"gpumem_torch_{name}{{{CHOSEN}}}"

    process = graph(
        "The process before the error",
        "The allocated and reserved bytes of the process and its limit. The annotation marks the error; the red"
        " line is the request on top of the allocated bytes.",
        (f"max({own('allocated_bytes')})", "allocated", "dark-blue"),
        (f"max({own('reserved_bytes')})", "reserved", "green"),
        (f"max({own('fragmented_bytes')})", "fragmented", "orange"),
        (f"max(last_over_time(gpumem_last_oom_limit_bytes{{{CHOSEN}}}[$__range] @ end()))", "limit"),
        (
            f"max(last_over_time(gpumem_last_oom_allocated_bytes{{{CHOSEN}}}[$__range] @ end())"
            f" + last_over_time(gpumem_last_oom_requested_bytes{{{CHOSEN}}}[$__range] @ end()))",
            "allocated and requested",
        ),
        height=10,
    )
    for name, shade in (("limit", "text"), ("allocated and requested", "red")):
        process = process.override_by_name(*dashed(name, shade))
    holders = stacked(
        graph(
            "Used on the device, by process",
            "The driver's value of each process on the device, stacked. The process that grew before the error"
            " may be a different one than the process with the error.",
            (
                f"(sum by (cluster, instance, gpu, pid) (gpumem_process_memory_used_bytes{{{GPU}}}{ON_ITS_DEVICE}))"
                f" {info('workload, rank, command', ONE_NODE)}",
                "{{workload}} {{rank}} {{command}} (pid {{pid}})",
            ),
        ),
        50,
    )
    return [
        ledger(
            "Ledger before the error",
            "The categories of the device's memory. If free decreases to zero, the device filled up. If free"
            " stays, the request was larger than any free piece, or the process has a limit.",
            GPU,
            ON_ITS_DEVICE,
            span=12,
        ),
        process,
        holders,
        graph(
            "Allocation retries on the device",
            "Allocations per second that succeeded only after a flush, of every process on the device: an early"
            " warning.",
            (
                f"rate(gpumem_torch_alloc_retries_total{{{GPU}}}[$__rate_interval]){ON_ITS_DEVICE}",
                "{{workload}} {{rank}} (pid {{pid}})",
            ),
            unit=units.CountsPerSecond,
        ),
    ]
