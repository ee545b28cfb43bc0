"""OOM post-mortem: what one out-of-memory error asked for, what there was, and what would have made room."""

from __future__ import annotations

from typing import Any

from grafana_foundation_sdk.builders import dashboard
from grafana_foundation_sdk.models import units
from grafana_foundation_sdk.models.common import BigValueTextMode

from gpumem_dashboards import oom_list
from gpumem_dashboards.frame import actions_annotation, board, first_of, link, ooms_annotation, variable
from gpumem_dashboards.palette import LEDGER, colour, words
from gpumem_dashboards.panels import bars, dashed, graph, ledger, number, stacked
from gpumem_dashboards.promql import ONE_NODE, filled, info
from gpumem_dashboards.tables import Column, table

__all__ = ["VERDICTS", "oom", "verdict"]

GPU = f'{ONE_NODE}, gpu=~"$gpu"'
CHOSEN = f'{GPU}, workload=~"$workload", rank=~"$rank", pid="$pid"'
LISTED = f'{GPU}, workload=~"$workload", rank=~"$rank"'
HAPPENED = f"last_over_time(gpumem_last_oom_timestamp_seconds{{{CHOSEN}}}[$__range])"
# As it is at the end of the time shown, at whichever earlier moment it is asked.
HAPPENED_AT_END = f"last_over_time(gpumem_last_oom_timestamp_seconds{{{CHOSEN}}}[$__range] @ end())"
ON_ITS_DEVICE = f" and on (instance, uuid) {HAPPENED_AT_END}"
RESOLUTION = "5s"

VERDICTS = {
    "1": ("There was room a moment later: something held it for an instant", "blue"),
    "2": ("Clear first: a clear on this device would have made room", "green"),
    "3": ("Fragmented: expandable segments would have fitted it in", "orange"),
    "4": ("Others on the device hold what it needed", "yellow"),
    "5": ("The device had room: the process' own memory limit stopped it", "purple"),
    "6": ("Truly too large: its tensors and the request exceed the limit", "red"),
    "0": ("Not enough is known of this error", "text"),
}
"""What `verdict` says, by value, from the cheapest remedy to none."""


def figure(name: str) -> str:
    """One figure of the chosen error, as the allocator gave it at that moment."""
    return f"last_over_time(gpumem_last_oom_{name}{{{CHOSEN}}}[$__range])"


def at_that_moment(expression: str) -> str:
    """The last value before the error of series that carry instance and uuid.

    The inner query is asked every few seconds; it has an answer only up to the error.
    """
    before = f"({HAPPENED_AT_END}) >= time()"
    return f"last_over_time((({expression}) and on (instance, uuid) ({before}))[$__range:{RESOLUTION}])"


ASKED, FREE, LIMIT = figure("requested_bytes"), figure("device_free_bytes"), figure("limit_bytes")
TENSORS, RESERVED = figure("allocated_bytes"), figure("reserved_bytes")
OWN_CACHE, FRAGMENTED = figure("reclaimable_bytes"), figure("fragmented_bytes")
OTHERS_CACHE = filled(
    FREE,
    "sum by (instance, uuid) ("
    + at_that_moment(f'gpumem_torch_reclaimable_bytes{{{ONE_NODE}, gpu=~"$gpu", pid!="$pid"}}')
    + ")",
)
ELSEWHERE = f"clamp_min({LIMIT} - {FREE} - {RESERVED}, 0)"


def verdict() -> str:
    """Which of `VERDICTS` it is: the first remedy that would have made room for the request."""
    # An allocation needs room twice: on the device, and below the process' limit. A clear of others helps with the one.
    cases = (
        (f"({FREE} >= {ASKED}) and ({RESERVED} + {ASKED} <= {LIMIT})", 1),
        (
            f"({FREE} + {OWN_CACHE} + {OTHERS_CACHE} >= {ASKED}) and ({RESERVED} - {OWN_CACHE} + {ASKED} <= {LIMIT})",
            2,
        ),
        (f"({FREE} + {OWN_CACHE} + {FRAGMENTED} >= {ASKED}) and ({TENSORS} + {ASKED} <= {LIMIT})", 3),
        (f"({FREE} + {OWN_CACHE} + {FRAGMENTED} < {ASKED}) and ({TENSORS} + {ASKED} <= {LIMIT})", 4),
        (f"({FREE} >= {ASKED}) and ({TENSORS} + {ASKED} > {LIMIT})", 5),
        (f"{TENSORS} + {ASKED} > {LIMIT}", 6),
        (HAPPENED, 0),
    )
    by = "instance, gpu, uuid, pid, workload, rank"
    return " or ".join(f"max by ({by}) (({condition}) * 0 + {value})" for condition, value in cases)


def oom() -> Any:
    """The dashboard of one error."""
    known = f"gpumem_last_oom_timestamp_seconds{{{GPU}}}"
    chosen = f'gpumem_last_oom_timestamp_seconds{{{GPU}, workload=~"$workload", rank=~"$rank"}}'
    made = (
        board(
            "GPU memory: OOM post-mortem",
            "gpumem-oom",
            "One out-of-memory error: what was asked for, what there was and whose the rest was, what would have made"
            " room, and the minutes before.",
            time="now-30m",
            refresh="1m",
        )
        .with_variable(variable("node", "Node", "gpumem_last_oom_timestamp_seconds", "instance", several=False))
        .with_variable(variable("gpu", "GPU", f"gpumem_last_oom_timestamp_seconds{{{ONE_NODE}}}", "gpu"))
        .with_variable(variable("workload", "Workload", known, "workload"))
        .with_variable(variable("rank", "Rank", f'{known[:-1]}, workload=~"$workload"}}', "rank"))
        .with_variable(variable("pid", "Process", chosen, "pid", several=False))
        .with_variable(first_of("workload", f'{known[:-1]}, workload=~"$workload"}}', "workload"))
        .annotation(ooms_annotation(LISTED))
        .annotation(actions_annotation(ONE_NODE))
    )
    for title, panels in (
        ("What happened", [_verdict(), _when(), _who(), *_figures()]),
        ("The device at that moment", [_room(), _ledger_then(), _processes_then()]),
        ("The minutes before", _before()),
        ("Other errors of this node", [oom_list.listed(LISTED, node_shown=False)]),
    ):
        made = made.with_row(dashboard.Row(title))
        for panel in panels:
            made = made.with_panel(panel)
    return made


def _verdict() -> Any:
    return (
        number(
            "What the figures say",
            "The cheapest thing that would have made room for the request, worked out from the figures below: on the"
            " device, and below the process' own limit. In this order: nothing, a moment later; a clear, of this"
            " process or of others on the device; expandable segments, for bytes that are free but in pieces; fewer"
            " processes on the device; a higher limit (set_per_process_memory_fraction). Else it takes a smaller batch,"
            " a smaller model or a larger device.",
            units.NoUnit,
            verdict(),
            limits=((None, "text"),),
            no_value="No error is chosen",
            span=12,
            height=5,
        )
        .mappings([words(VERDICTS)])
        .text_mode(BigValueTextMode.VALUE)
    )


def _when() -> Any:
    return number(
        "When",
        "The moment of the error, by the exporter's clock. Choose a time that ends after it.",
        units.DatetimeISO,
        f"({HAPPENED}) * 1000",
        span=6,
        height=5,
    )


def _who() -> Any:
    workload = link("gpumem-workload", node="node", workload="__field.labels.workload")
    return (
        number(
            "Whose",
            "Workload, rank and process of the error, and its device. Click to see the workload.",
            units.NoUnit,
            [(HAPPENED, "{{workload}} {{rank}} (pid {{pid}}), GPU {{gpu}}")],
            span=6,
            height=5,
        )
        .text_mode(BigValueTextMode.NAME)
        .data_links([dashboard.DashboardLink("This workload").url(workload)])
    )


def _room() -> Any:
    queries = (
        (ASKED, "asked for", "red"),
        (FREE, "free on the device", "#808080"),
        (OWN_CACHE, "own cache that a clear gives back", "green"),
        (OTHERS_CACHE, "cache of other processes that a clear gives back", "dark-green"),
        (FRAGMENTED, "own cache in pieces", "orange"),
        (ELSEWHERE, "held outside its allocator: other processes, its context", "yellow"),
        (TENSORS, "its own tensors", "dark-blue"),
    )
    panel = bars(
        "What was asked for, and where the rest was",
        "Red is the request, rounded up to a segment as PyTorch asks the driver for it. Where one of the bars below it,"
        " with the grey one, is as long, that one would have made room. PyTorch had flushed the process' own cache"
        " before it gave up, so green is small but for pools and limits.",
        units.BytesIEC,
        [(f"max by (gpu) ({expression})", name) for expression, name, _ in queries],
        no_value="unknown",
        span=12,
        height=10,
    )
    for _, name, shade in queries:
        panel = panel.override_by_name(name, [colour(shade)])
    return panel


def _figures() -> list[Any]:
    shown = (
        ("Asked for", "Bytes that PyTorch asked the driver for: the request, rounded up to a segment.", ASKED),
        ("Free on the device", "Bytes that nobody held at that moment, as the driver said.", FREE),
        (
            "Missing",
            "What was asked for less what was free. Nothing is missing where the process' own limit stopped it.",
            f"clamp_min({ASKED} - {FREE}, 0)",
        ),
        ("Limit", "The device's memory, or what the process' memory fraction leaves of it.", LIMIT),
        ("In tensors", "Bytes in the process' tensors at that moment.", TENSORS),
        ("Reserved", "Bytes that PyTorch held in the process, after it had flushed its cache.", RESERVED),
    )
    return [
        number(title, description, units.BytesIEC, f"max by (gpu) ({expression})", span=4)
        for title, description, expression in shown
    ]


def _ledger_then() -> Any:
    queries = [
        ("max by (gpu) (" + at_that_moment(f'gpumem_ledger_bytes{{{GPU}, category="{category}"}}') + ")", name)
        for category, name, _ in LEDGER
    ]
    panel = bars(
        "The ledger at that moment",
        "Where every byte of the device was at the last scrape before the error.",
        units.BytesIEC,
        queries,
        no_value="no scrape before the error in the time shown",
        span=12,
        height=10,
    )
    for _, name, shade in LEDGER:
        panel = panel.override_by_name(name, [colour(shade)])
    return panel


def _processes_then() -> Any:
    by = "instance, gpu, pid"

    def then(metric: str) -> str:
        return f"sum by ({by}) (" + at_that_moment(f"{metric}{{{GPU}}}") + ")"

    # Whoever has ended since has no info series any more, only a last one.
    names = f"last_over_time(gpumem_process_info{{{ONE_NODE}}}[$__range])"
    shown = "workload, rank, command, user, k8s_pod"
    newest = f"topk by (instance, pid) (1, {names})"
    used = then("gpumem_process_memory_used_bytes")
    return table(
        "Who was on the device at that moment",
        "The processes at the last scrape before the error, also those that have ended since, the largest first. What a"
        " clear of the others would have given back is what could have been asked of them.",
        units.BytesIEC,
        [
            Column("workload", heading="Workload"),
            Column("rank", heading="Rank", width=70),
            Column("user", heading="User"),
            Column("k8s_pod", heading="Pod"),
            Column("Used", f"{used} * on (instance, pid) group_left ({shown}) {newest}"),
            Column("In tensors", then("gpumem_torch_allocated_bytes")),
            Column("A clear gives back", then("gpumem_torch_reclaimable_bytes")),
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
        "What its tensors took and what PyTorch held, against what it could have had at most. The error is the red"
        " mark; the red line is what it asked for on top of its tensors.",
        units.BytesIEC,
        [
            (f"max({own('allocated_bytes')})", "in tensors"),
            (f"max({own('reserved_bytes')})", "reserved"),
            (f"max({own('fragmented_bytes')})", "fragmented"),
            (f"max(last_over_time(gpumem_last_oom_limit_bytes{{{CHOSEN}}}[$__range] @ end()))", "limit"),
            (
                f"max(last_over_time(gpumem_last_oom_allocated_bytes{{{CHOSEN}}}[$__range] @ end())"
                f" + last_over_time(gpumem_last_oom_requested_bytes{{{CHOSEN}}}[$__range] @ end()))",
                "tensors and request",
            ),
        ],
        height=10,
    ).min(0)
    for name, shade in (("in tensors", "dark-blue"), ("reserved", "green"), ("fragmented", "orange")):
        process = process.override_by_name(name, [colour(shade)])
    for name, shade in (("limit", "text"), ("tensors and request", "red")):
        process = process.override_by_name(*dashed(name, shade))
    holders = stacked(
        graph(
            "Whose memory it was",
            "What each process on the device held, stacked, as the driver counts it. Who grew before the error need not"
            " be who met it.",
            units.BytesIEC,
            [
                (
                    f"(sum by (instance, gpu, pid) (gpumem_process_memory_used_bytes{{{GPU}}}{ON_ITS_DEVICE}))"
                    f" {info('workload, rank, command', ONE_NODE)}",
                    "{{workload}} {{rank}} {{command}} (pid {{pid}})",
                )
            ],
        ),
        50,
    )
    return [
        ledger(
            "The device before the error",
            "Where every byte of the device was. Free that shrinks to nothing: the device filled up. Free that stays:"
            " the request was larger than any piece, or the process has a limit.",
            GPU,
            ON_ITS_DEVICE,
            span=12,
        ),
        process,
        holders.min(0),
        graph(
            "Retries before the error, on its device",
            "Allocations a second that succeeded only after a flush, of every process on the device: a warning that"
            " came before.",
            units.CountsPerSecond,
            [
                (
                    f"rate(gpumem_torch_alloc_retries_total{{{GPU}}}[$__rate_interval]){ON_ITS_DEVICE}",
                    "{{workload}} {{rank}} (pid {{pid}})",
                )
            ],
        ).min(0),
    ]
