"""Workload: its ranks side by side, what grows from step to step, what is wasted, and how long it will last."""

from __future__ import annotations

from typing import Any

from grafana_foundation_sdk.builders import common, dashboard, xychart
from grafana_foundation_sdk.models import units
from grafana_foundation_sdk.models import xychart as xy
from grafana_foundation_sdk.models.common import AxisPlacement, LegendDisplayMode, LegendPlacement
from grafana_foundation_sdk.models.dashboard import DataTransformerConfig, DynamicConfigValue

from gpumem_dashboards import oom_list
from gpumem_dashboards.frame import actions_annotation, board, first_of, link, ooms_annotation, variable
from gpumem_dashboards.palette import PRESSURE, colour
from gpumem_dashboards.panels import bars, count, dashed, described, graph, number, query, stacked
from gpumem_dashboards.promql import GPU, NODE, ONE_WORKLOAD, growth, hard_used_ratio, seconds_to_full
from gpumem_dashboards.tables import Column, table

__all__ = ["workload"]

REPORTER = f'{NODE}, workload="$workload", rank=~"$rank"'
RANK = "instance, gpu, uuid, pid, rank"
LEGEND = "rank {{rank}} ({{instance}} GPU {{gpu}} pid {{pid}})"
COMPONENTS = (
    ("parameters", "dark-blue"),
    ("gradients", "orange"),
    ("optimizer_state", "purple"),
    ("other", "super-light-blue"),
)

ROOM = (
    f"sum by ({RANK}) (gpumem_torch_reclaimable_bytes{{{ONE_WORKLOAD}}}"
    f" + on (instance, uuid) group_left () gpumem_device_memory_free_bytes{{{GPU}}})"
)
"""What a rank can still get: what is free on its device, and its own cache."""
GROWTH = f"sum by ({RANK}) ({growth('gpumem_torch_allocated_bytes', ONE_WORKLOAD)})"
TIME_TO_FULL = seconds_to_full(ROOM, "gpumem_torch_allocated_bytes", ONE_WORKLOAD, RANK)
HIGHEST = f"max_over_time(gpumem_torch_allocated_bytes{{{ONE_WORKLOAD}}}[$__rate_interval])"
STEP_RATE = f"sum by ({RANK}) (deriv(gpumem_torch_step{{{ONE_WORKLOAD}}}[$__range]))"


def workload() -> Any:
    """The dashboard of one workload on all of its nodes."""
    reporters = f'gpumem_reporter_up{{{NODE}, workload="$workload"}}'
    made = (
        board(
            "GPU memory: one workload",
            "gpumem-workload",
            "The ranks of a workload side by side: what they hold, what grows, what is wasted, and for how long the"
            " memory lasts.",
            time="now-1h",
            refresh="10s",
        )
        .with_variable(variable("node", "Node", "gpumem_exporter_build_info", "instance"))
        .with_variable(variable("workload", "Workload", f"gpumem_reporter_up{{{NODE}}}", "workload", several=False))
        .with_variable(variable("rank", "Rank", reporters, "rank"))
        .with_variable(variable("gpu", "GPU", f'gpumem_torch_reserved_bytes{{{NODE}, workload="$workload"}}', "gpu"))
        .with_variable(first_of("node", f'gpumem_reporter_up{{{NODE}, workload="$workload"}}', "instance"))
        .annotation(ooms_annotation(ONE_WORKLOAD))
        .annotation(actions_annotation())
    )
    for title, panels in (
        ("Now", [*_figures(), _ranks(), _largest_ranks()]),
        ("Over time and over steps", _over_time()),
        ("Plan against reality", _plan()),
        ("What is wasted", _wasted()),
        ("Phases and components", _phases_and_components()),
        ("The allocator at work", _at_work()),
        ("Errors", [oom_list.listed(ONE_WORKLOAD, node_shown=True)]),
    ):
        made = made.with_row(dashboard.Row(title))
        for panel in panels:
            made = made.with_panel(panel)
    return made


def _figures() -> list[Any]:
    return [
        number(
            "Processes",
            "Processes of the workload that report, and those that fell silent and are not known to have ended.",
            units.Short,
            [
                (f"sum(gpumem_reporter_up{{{REPORTER}}})", "report"),
                (f"sum(1 - gpumem_reporter_up{{{REPORTER}}})", "silent"),
            ],
            span=3,
        ),
        number(
            "Pressure",
            "Of the device that is pressed most of those that the workload is on: the share that is neither free nor"
            " would come back by a clear.",
            units.PercentUnit,
            f"max(({hard_used_ratio(GPU)}) and on (instance, uuid) gpumem_torch_reserved_bytes{{{ONE_WORKLOAD}}})",
            limits=PRESSURE,
            span=3,
        ),
        number(
            "Time to full",
            "How long the tightest rank lasts if its tensors grow as they did over the time shown, with what is free on"
            " its device and in its own cache. Nothing within a week: it does not grow, or goes up and down by more"
            " than it grows, or grows so slowly that it does not matter. A start-up looks like growth: choose a time"
            " after it.",
            units.Seconds,
            f"min({TIME_TO_FULL})",
            limits=((None, "red"), (1800, "orange"), (4 * 3600, "green")),
            no_value="not within a week",
            span=3,
        ),
        number(
            "Leak slope",
            "By how much the floor of the tensors' bytes rose a second, over the time shown, in the rank where it rose"
            " most. The floor: what is left between the peaks of the steps. Steady training has none.",
            units.BytesPerSecondIEC,
            f"max({GROWTH})",
            span=3,
        ),
        number(
            "Imbalance of ranks",
            "The rank with most bytes in tensors less the one with least, by their peaks. The fullest rank decides"
            " whether the job fits.",
            units.BytesIEC,
            f"max({HIGHEST}) - min({HIGHEST})",
            span=3,
        ),
        number(
            "A clear would give back",
            "Bytes that torch.cuda.empty_cache() in every process of the workload would return to the driver now.",
            units.BytesIEC,
            f"sum(gpumem_torch_reclaimable_bytes{{{ONE_WORKLOAD}}})",
            span=3,
        ),
        count(
            "Out-of-memory errors",
            "Errors that the allocators of the workload's processes raised in the time shown, caught ones included. A"
            " process that dies of its first one is in the list below only.",
            f"round(sum(increase(gpumem_torch_ooms_total{{{ONE_WORKLOAD}}}[$__range])))",
            span=3,
        ),
        count(
            "Allocation retries",
            "Allocations that found no memory until PyTorch had flushed its cache, in the time shown: each stalls a"
            " step.",
            f"round(sum(increase(gpumem_torch_alloc_retries_total{{{ONE_WORKLOAD}}}[$__range])))",
            bad="orange",
            span=3,
        ),
    ]


def _ranks() -> Any:
    def figure(name: str) -> str:
        return f"sum by ({RANK}) (gpumem_torch_{name}{{{ONE_WORKLOAD}}})"

    def of_process(expression: str) -> str:
        here = f"group by ({RANK}) (gpumem_torch_reserved_bytes{{{ONE_WORKLOAD}}})"
        return f"{here} * on (instance, pid) group_left () ({expression})"

    node = link("gpumem-node", node="__data.fields.instance", gpu="__data.fields.gpu", workload="workload")
    sampled = f"time() - gpumem_reporter_sample_timestamp_seconds{{{REPORTER}}}"
    shown = "command, torch_version, allocator_settings, k8s_pod"
    who = f"group by ({RANK}) (gpumem_torch_reserved_bytes{{{ONE_WORKLOAD}}}) * on (instance, pid) group_left ({shown})"
    return table(
        "Ranks side by side",
        "One row for each process on each device. A rank that differs from the others in what its tensors take is an"
        " imbalance; one that is behind in steps holds up the rest. Peaks are since whoever last reset them. Click a"
        " node to see the device.",
        units.BytesIEC,
        [
            Column("rank", heading="Rank", width=70),
            Column("instance", heading="Node", link=("This device", node)),
            Column("gpu", heading="GPU", width=60),
            Column("Who", f"{who} gpumem_process_info{{{NODE}}}", hidden=True),
            Column("Step", figure("step"), units.NoUnit, width=80),
            Column("In tensors", figure("allocated_bytes")),
            Column("Highest in tensors", figure("allocated_peak_bytes")),
            Column("Reserved", figure("reserved_bytes")),
            Column("Highest reserved", figure("reserved_peak_bytes")),
            Column("A clear gives back", figure("reclaimable_bytes")),
            Column("Fragmented", figure("fragmented_bytes")),
            Column("Grows by", GROWTH, units.BytesPerSecondIEC, width=100),
            Column("Full in", TIME_TO_FULL, units.Seconds, width=90),
            Column("Sample's age", of_process(sampled), units.Seconds, width=110),
            Column("pid", width=90),
            Column("k8s_pod", heading="Pod"),
            Column("torch_version", heading="PyTorch"),
            Column("allocator_settings", heading="Allocator settings"),
            Column("command", heading="Command"),
        ],
        sort_by="Rank",
        descending=False,
        drop=("uuid",),
        height=9,
    )


def _largest_ranks() -> Any:
    peaks = f"max by ({RANK}) (max_over_time(gpumem_torch_allocated_bytes{{{ONE_WORKLOAD}}}[$__range]))"
    return bars(
        "Highest in tensors, by rank",
        "The most that each rank had in tensors in the time shown, the fullest first. Bars of one length: a balanced"
        " job.",
        units.BytesIEC,
        [(f"sort_desc(topk(24, {peaks}))", LEGEND)],
        limits=((None, "dark-blue"),),
        span=24,
    )


def _over_time() -> list[Any]:
    figures = (
        ("allocated_bytes", "in tensors", "dark-blue"),
        ("reserved_bytes", "reserved", "green"),
        ("allocated_peak_bytes", "highest in tensors", "orange"),
        ("reserved_peak_bytes", "highest reserved", "red"),
    )
    totals = [(f"max(gpumem_torch_{name}{{{ONE_WORKLOAD}}})", title) for name, title, _ in figures]
    together = graph(
        "In tensors, reserved and peaks, of the fullest rank",
        "Blue under green: what tensors take of what PyTorch holds. The gap is cache. The peaks are PyTorch's own,"
        " since whoever last reset them, so they catch what falls between two scrapes. The grey line counts steps, on"
        " the right.",
        units.BytesIEC,
        [*totals, (f"max(gpumem_torch_step{{{ONE_WORKLOAD}}})", "step")],
    ).min(0)
    for _, title, shade in figures:
        together = together.override_by_name(title, [colour(shade)])
    step = [
        DynamicConfigValue("unit", units.NoUnit),
        DynamicConfigValue("custom.axisPlacement", AxisPlacement.RIGHT),
        DynamicConfigValue("custom.fillOpacity", 0),
        colour("#80808080"),
    ]
    return [
        together.override_by_name("step", step),
        _over_steps(),
        graph(
            "In tensors, by rank",
            "A steady loop draws a level band; one that rises from step to step keeps tensors that it no longer needs.",
            units.BytesIEC,
            [(f"gpumem_torch_allocated_bytes{{{ONE_WORKLOAD}}}", LEGEND)],
        ).min(0),
        graph(
            "Imbalance: the fullest rank, the emptiest, and the difference",
            "By the peaks of each interval, so that ranks that are at different points of a step do not look unequal.",
            units.BytesIEC,
            [
                (f"max({HIGHEST})", "fullest"),
                (f"min({HIGHEST})", "emptiest"),
                (f"max({HIGHEST}) - min({HIGHEST})", "difference"),
            ],
        )
        .min(0)
        .override_by_name("difference", [colour("red")]),
        graph(
            "Growth a step, by rank",
            "By how many bytes the floor of the tensors rises with each step, over the time shown until each point: a"
            " leak, in the unit in which it is looked for. Absent where steps are not counted.",
            units.BytesIEC,
            [(f"({GROWTH}) / ({STEP_RATE} > 0)", LEGEND)],
        ),
        graph(
            "Steps a second, by rank",
            "The pace of training. It falls when retries and flushes stall the steps.",
            units.CountsPerSecond,
            [(f"deriv(gpumem_torch_step{{{ONE_WORKLOAD}}}[$__rate_interval]) >= 0", LEGEND)],
        ).min(0),
    ]


def _over_steps() -> Any:
    series = (
        ("allocated_bytes", "in tensors"),
        ("reserved_bytes", "reserved"),
        ("allocated_peak_bytes", "highest in tensors"),
    )
    panel = (
        described(
            xychart.Panel(),
            "In tensors, reserved and peak over steps",
            "The same by step instead of time, of the fullest rank: bytes that rise with the steps are a leak, however"
            " often the job paused. A restart begins at the left again.",
            units.BytesIEC,
        )
        .mapping(xy.SeriesMapping.AUTO)
        .show(xy.XYShowMode.POINTS)
        .point_size(xychart.XychartFieldConfigPointSize().fixed(3))
        .legend(
            common.VizLegendOptions()
            .show_legend(True)
            .display_mode(LegendDisplayMode.LIST)
            .placement(LegendPlacement.BOTTOM)
        )
        .height(8)
        .span(12)
        .with_target(query(f"max(gpumem_torch_step{{{ONE_WORKLOAD}}})", "step"))
        .override_by_name("step", [DynamicConfigValue("unit", units.Short)])
    )
    for letter, (name, title) in zip("BCD", series, strict=True):
        panel = panel.with_target(query(f"max(gpumem_torch_{name}{{{ONE_WORKLOAD}}})", title, letter))
    # The first number of the joined frame is x, each other one a series: time must go.
    join = DataTransformerConfig(id_val="joinByField", options={"byField": "Time", "mode": "outer"})
    drop = DataTransformerConfig(
        id_val="organize",
        options={
            "excludeByName": {"Time": True},
            "indexByName": {name: at for at, name in enumerate(("step", *(title for _, title in series)))},
            "renameByName": {},
        },
    )
    return panel.with_transformation(join).with_transformation(drop)


def _plan() -> list[Any]:
    return [
        graph(
            "Highest reserved against the plan, by rank",
            "The dashed line is the peak that the plan of the job expects of each process (gpumem-exporter plan), where"
            " it was told of one; the others are the peaks that there were. A rank above it needs more than was"
            " planned.",
            units.BytesIEC,
            [
                (f"gpumem_torch_reserved_peak_bytes{{{ONE_WORKLOAD}}}", LEGEND),
                (f"max(gpumem_torch_planned_reserved_peak_bytes{{{ONE_WORKLOAD}}})", "planned"),
            ],
        )
        .min(0)
        .override_by_name(*dashed("planned", "text")),
        graph(
            "Error of the plan, by rank",
            "How much more the plan expected than the process reserved at its highest; below 0, how much less. Absent"
            " without a plan, and until two steps have ended.",
            units.PercentUnit,
            [(f"gpumem_torch_plan_error_ratio{{{ONE_WORKLOAD}}}", LEGEND)],
        ),
    ]


def _wasted() -> list[Any]:
    def by_rank(name: str) -> list[tuple[str, str]]:
        return [(f"gpumem_torch_{name}{{{ONE_WORKLOAD}}}", LEGEND)]

    def total(name: str) -> str:
        return f"sum(gpumem_torch_{name}{{{ONE_WORKLOAD}}})"

    parts = (
        (total("requested_bytes"), "asked for by the program", "dark-blue"),
        (f"{total('allocated_bytes')} - {total('requested_bytes')}", "rounding", "super-light-blue"),
        (total("reclaimable_bytes"), "cached, a clear gives it back", "green"),
        (total("fragmented_bytes"), "cached, a clear cannot give it back", "orange"),
    )
    anatomy = stacked(
        graph(
            "What the reserved bytes are",
            "All that the workload's processes reserved, stacked up to the dashed line. Rounding is what the allocator"
            " adds to requests.",
            units.BytesIEC,
            [*((expression, name) for expression, name, _ in parts), (total("reserved_bytes"), "reserved")],
            height=9,
        )
    )
    for _, name, shade in parts:
        anatomy = anatomy.override_by_name(name, [colour(shade)])
    return [
        anatomy.override_by_name(*dashed("reserved", "text")),
        graph(
            "Fragmentation, by rank",
            "Share of what PyTorch reserved that is in no tensor and that a clear cannot give back. Above a quarter,"
            " expandable segments are worth a try.",
            units.PercentUnit,
            by_rank("fragmentation_ratio"),
            height=9,
        )
        .min(0)
        .max(1),
        graph(
            "Split and free, by rank",
            "Free bytes in segments that also hold live blocks (PyTorch's inactive split): the classic allocator's"
            " fragmentation. Always 0 with expandable segments.",
            units.BytesIEC,
            by_rank("inactive_split_bytes"),
            span=8,
        ).min(0),
        graph(
            "Private pools, by rank",
            "What CUDA graphs and pools of the program's own hold: no clear touches it while they live.",
            units.BytesIEC,
            by_rank("private_pools_bytes"),
            span=8,
        ).min(0),
        graph(
            "Freed, awaited by another stream, by rank",
            "Bytes in no tensor that PyTorch cannot use yet, since another CUDA stream still reads them: part of the"
            " cache.",
            units.BytesIEC,
            [
                (
                    f"gpumem_torch_active_bytes{{{ONE_WORKLOAD}}} - gpumem_torch_allocated_bytes{{{ONE_WORKLOAD}}}",
                    LEGEND,
                )
            ],
            span=8,
        ).min(0),
    ]


def _phases_and_components() -> list[Any]:
    components = stacked(
        graph(
            "What the tensors are for",
            "Bytes of all ranks by component, where the program tells: parameters and optimizer state are level,"
            " gradients and activations (in other) come and go with each step.",
            units.BytesIEC,
            [
                (f'sum(gpumem_torch_component_bytes{{{ONE_WORKLOAD}, component="{name}"}})', name.replace("_", " "))
                for name, _ in COMPONENTS
            ],
        )
    )
    for name, shade in COMPONENTS:
        components = components.override_by_name(name.replace("_", " "), [colour(shade)])
    return [
        components.min(0),
        bars(
            "Peak of each phase",
            "The most that was in tensors within each phase that the program names, in the fullest rank. The longest"
            " bar is the phase that decides whether the job fits.",
            units.BytesIEC,
            [(f"sort_desc(max by (phase) (gpumem_torch_phase_peak_bytes{{{ONE_WORKLOAD}}}))", "{{phase}}")],
            limits=((None, "dark-blue"),),
            no_value="the program names no phases",
            span=12,
        ),
    ]


def _at_work() -> list[Any]:
    def by_rate(name: str) -> str:
        return f"rate(gpumem_torch_{name}{{{ONE_WORKLOAD}}}[$__rate_interval])"

    return [
        graph(
            "Allocation retries, by rank",
            "Allocations a second that failed at first, upon which PyTorch flushed its cache and tried again.",
            units.CountsPerSecond,
            [(by_rate("alloc_retries_total"), LEGEND)],
        ).min(0),
        graph(
            "Cache flushes, by rank",
            "Times a second that the allocator waited for all streams to flush its cache: asked for by"
            " torch.cuda.empty_cache(), or forced by a retry.",
            units.CountsPerSecond,
            [(by_rate("cache_flushes_total"), LEGEND)],
        ).min(0),
        graph(
            "Segments taken and given back",
            "Segments a second, of all ranks, that went from the driver to PyTorch and back. Near zero in a steady"
            " loop: else the cache does not hold, and each one waits for the device.",
            units.CountsPerSecond,
            [
                (f"sum({by_rate('segments_allocated_total')})", "taken"),
                (f"sum({by_rate('segments_freed_total')})", "given back"),
            ],
        ).min(0),
        graph(
            "Resets of peaks, by rank",
            "Times a second that the peaks were seen to have been reset, by the program, a library or an action. Peaks"
            " say nothing of the time before.",
            units.CountsPerSecond,
            [(by_rate("peak_resets_total"), LEGEND)],
        ).min(0),
    ]
