"""Workload: the memory of its ranks, its growth, the cache, and the time until the memory is full."""

from __future__ import annotations

from typing import Any

from grafana_foundation_sdk.builders import xychart
from grafana_foundation_sdk.models import units
from grafana_foundation_sdk.models import xychart as xy
from grafana_foundation_sdk.models.common import AxisPlacement
from grafana_foundation_sdk.models.dashboard import DataTransformerConfig, DynamicConfigValue

from gpumem_dashboards import engines, oom_list
from gpumem_dashboards.frame import board, link, live_page, with_rows
from gpumem_dashboards.palette import PRESSURE, color
from gpumem_dashboards.panels import bars, count, dashed, described, graph, idle_cache, legend, number, query, stacked
from gpumem_dashboards.promql import (
    CLUSTER,
    GPU,
    NODE,
    ON_DEVICE,
    ON_PROCESS,
    ONE_WORKLOAD,
    growth,
    hard_used_ratio,
    seconds_to_full,
)
from gpumem_dashboards.tables import Column, table

REPORTER = f'{NODE}, workload="$workload", rank=~"$rank"'
RANK = "cluster, instance, gpu, uuid, pid, rank"
LEGEND = "rank {{rank}} ({{instance}} GPU {{gpu}} pid {{pid}})"
COMPONENTS = (
    ("parameters", "parameters", "dark-blue"),
    ("gradients", "gradients", "orange"),
    ("optimizer_state", "optimizer state", "purple"),
    *engines.COMPONENTS,
    ("other", "other", "super-light-blue"),
)

ROOM = (
    f"sum by ({RANK}) (gpumem_torch_reclaimable_bytes{{{ONE_WORKLOAD}}}"
    f" + {ON_DEVICE} group_left () gpumem_device_memory_free_bytes{{{GPU}}})"
)
"""The bytes that a rank can still get: the free bytes of its device and its own reclaimable cache."""
GROWTH = f"sum by ({RANK}) ({growth('gpumem_torch_allocated_bytes', ONE_WORKLOAD)})"
TIME_TO_FULL = seconds_to_full(ROOM, "gpumem_torch_allocated_bytes", ONE_WORKLOAD, RANK)
HIGHEST = f"max_over_time(gpumem_torch_allocated_bytes{{{ONE_WORKLOAD}}}[$__rate_interval])"
STEP_RATE = f"sum by ({RANK}) (deriv(gpumem_torch_step{{{ONE_WORKLOAD}}}[$__range]))"


def workload() -> Any:
    """Build the dashboard of one workload on all of its nodes."""
    reporters = f'gpumem_reporter_up{{{NODE}, workload="$workload"}}'
    made = board(
        "GPU memory: one workload",
        "gpumem-workload",
        "The ranks of one workload: their memory, its growth, the cache, and the time until the memory is full.",
        time="now-1h",
        refresh="10s",
        variables=[
            ("node", "Node", f"gpumem_exporter_build_info{{{CLUSTER}}}", "instance"),
            ("workload", "Workload", f"gpumem_reporter_up{{{NODE}}}", "workload"),
            ("rank", "Rank", reporters, "rank"),
            ("gpu", "GPU", f'gpumem_torch_reserved_bytes{{{NODE}, workload="$workload"}}', "gpu"),
        ],
        first=[("node", f'gpumem_reporter_up{{{NODE}, workload="$workload"}}', "instance")],
        ooms=ONE_WORKLOAD,
        actions=NODE,
    )
    return with_rows(
        made,
        ("Now", [*_overview(), _ranks(), _largest_ranks()]),
        ("Over time and over steps", _over_time()),
        ("Plan", _plan()),
        ("Cache and fragmentation", _wasted()),
        ("Phases and components", _phases_and_components()),
        ("Engines", engines.of_workload(ONE_WORKLOAD)),
        ("Allocator activity", _at_work()),
        ("Errors", [oom_list.listed(ONE_WORKLOAD, node_shown=True)]),
        open_rows=2,
    )


def _overview() -> list[Any]:
    return [
        number(
            "Processes",
            "Processes of the workload that report, and processes that stopped reporting and are not known to"
            " have exited.",
            (f"sum(gpumem_reporter_up{{{REPORTER}}})", "report"),
            (f"sum(1 - gpumem_reporter_up{{{REPORTER}}})", "silent"),
            unit=units.Short,
            span=3,
        ),
        number(
            "Pressure",
            "The pressure of the fullest device of the workload: the share that is neither free nor reclaimable.",
            f"max(({hard_used_ratio(GPU)}) and {ON_DEVICE} gpumem_torch_reserved_bytes{{{ONE_WORKLOAD}}})",
            unit=units.PercentUnit,
            limits=PRESSURE,
            span=3,
        ),
        number(
            "Time to full",
            "The time until the first rank is full, if its allocated bytes grow as in the time range and it can"
            " use the free bytes of its device and its own cache. Empty if the rank does not grow, varies more"
            " than it grows, or needs more than a week. A start looks like growth, so choose a time range after"
            " it.",
            f"min({TIME_TO_FULL})",
            unit=units.Seconds,
            limits=((None, "red"), (3600, "orange"), (4 * 3600, "green")),
            no_value="not within a week",
            span=3,
        ),
        number(
            "Leak slope",
            "The growth per second of the low mark of the allocated bytes in the time range, in the rank with"
            " the highest growth. The low mark is the memory between the peaks of the steps. Steady training has"
            " no growth.",
            f"max({GROWTH})",
            unit=units.BytesPerSecondIEC,
            span=3,
        ),
        number(
            "Imbalance of ranks",
            "The difference between the ranks with the highest and the lowest peak of allocated bytes. The"
            " fullest rank decides whether the job fits.",
            f"max({HIGHEST}) - min({HIGHEST})",
            span=3,
        ),
        idle_cache(
            "process of the workload", ONE_WORKLOAD, f"gpumem_torch_reclaimable_bytes{{{ONE_WORKLOAD}}}", span=3
        ),
        count(
            "Out-of-memory errors",
            "Errors that the allocators of the workload counted in the time range, including errors that the"
            " program caught. If the first error ended the process, it is only in the list below.",
            f"round(sum(increase(gpumem_torch_ooms_total{{{ONE_WORKLOAD}}}[$__range])))",
            span=3,
        ),
        count(
            "Allocation retries",
            "Allocations in the time range that succeeded only after PyTorch flushed its cache. Each retry"
            " stalls a step.",
            f"round(sum(increase(gpumem_torch_alloc_retries_total{{{ONE_WORKLOAD}}}[$__range])))",
            span=3,
        ),
    ]


def _ranks() -> Any:
    def value_of(name: str) -> str:
        return f"sum by ({RANK}) (gpumem_torch_{name}{{{ONE_WORKLOAD}}})"

    def of_process(expression: str) -> str:
        here = f"group by ({RANK}) (gpumem_torch_reserved_bytes{{{ONE_WORKLOAD}}})"
        return f"{here} * {ON_PROCESS} group_left () ({expression})"

    node = link(
        "gpumem-node",
        cluster="__data.fields.cluster",
        node="__data.fields.instance",
        gpu="__data.fields.gpu",
        workload="workload",
    )
    page = live_page("__data.fields.instance", workload="workload")
    sampled = f"time() - gpumem_reporter_sample_timestamp_seconds{{{REPORTER}}}"
    shown = "command, torch_version, allocator_settings, k8s_pod"
    who = f"group by ({RANK}) (gpumem_torch_reserved_bytes{{{ONE_WORKLOAD}}}) * {ON_PROCESS} group_left ({shown})"
    return table(
        "Ranks side by side",
        "One row for each process on each device. A rank whose allocated bytes differ from the others is an"
        " imbalance; a rank with fewer steps delays the others. A peak counts since the last reset. Click a"
        " node to see the device.",
        [
            Column("rank", heading="Rank", width=70),
            Column("cluster", heading="Cluster"),
            Column("instance", heading="Node", links=[("This device", node), ("This job on the live page", page)]),
            Column("gpu", heading="GPU", width=60),
            Column("Who", f"{who} gpumem_process_info{{{NODE}}}", hidden=True),
            Column("Step", value_of("step"), units.NoUnit, width=80),
            Column("Allocated", value_of("allocated_bytes")),
            Column("Peak allocated", value_of("allocated_peak_bytes")),
            Column("Reserved", value_of("reserved_bytes")),
            Column("Peak reserved", value_of("reserved_peak_bytes")),
            Column("Idle cache", value_of("idle_cache_bytes")),
            Column("Reclaimable", value_of("reclaimable_bytes")),
            Column("Fragmented", value_of("fragmented_bytes")),
            Column("Unmapped", f"{value_of('unmapped_bytes')} > 0"),
            Column("Growth", GROWTH, units.BytesPerSecondIEC, width=100),
            Column("Full in", TIME_TO_FULL, units.Seconds, width=90),
            Column("Sample age", of_process(sampled), units.Seconds, width=110),
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
        "Peak allocated, by rank",
        "The highest allocated bytes of each rank in the time range, the fullest first. In a balanced job the"
        " bars have the same length.",
        (f"sort_desc(topk(24, {peaks}))", LEGEND),
        limits=((None, "dark-blue"),),
        span=24,
    )


def _over_time() -> list[Any]:
    def highest(name: str) -> str:
        return f"max(gpumem_torch_{name}{{{ONE_WORKLOAD}}})"

    together = graph(
        "Allocated, reserved and peaks of the fullest rank",
        "Allocated and reserved bytes; the difference is cache. The peaks are PyTorch's values since the last"
        " reset, so they include peaks between two scrapes. The gray line counts steps, on the right axis.",
        (highest("allocated_bytes"), "allocated", "dark-blue"),
        (highest("reserved_bytes"), "reserved", "green"),
        (highest("allocated_peak_bytes"), "peak allocated", "orange"),
        (highest("reserved_peak_bytes"), "peak reserved", "red"),
        (highest("step"), "step"),
    )
    step = [
        DynamicConfigValue("unit", units.NoUnit),
        DynamicConfigValue("custom.axisPlacement", AxisPlacement.RIGHT),
        DynamicConfigValue("custom.fillOpacity", 0),
        color("#80808080"),
    ]
    return [
        together.override_by_name("step", step),
        _over_steps(),
        graph(
            "Allocated, by rank",
            "In steady training the band is level. A band that rises from step to step shows tensors that the"
            " program no longer needs.",
            (f"gpumem_torch_allocated_bytes{{{ONE_WORKLOAD}}}", LEGEND),
        ),
        graph(
            "Imbalance: fullest rank, emptiest rank and difference",
            "The peaks of each interval are compared, so ranks at different points of a step do not look unequal.",
            (f"max({HIGHEST})", "fullest"),
            (f"min({HIGHEST})", "emptiest"),
            (f"max({HIGHEST}) - min({HIGHEST})", "difference", "red"),
        ),
        graph(
            "Growth per step, by rank",
            "The growth of the low mark of the allocated bytes per step, over the time range before each point."
            " A leak is constant in this unit. Absent without counted steps.",
            (f"({GROWTH}) / ({STEP_RATE} > 0)", LEGEND),
            low=None,
        ),
        graph(
            "Steps per second, by rank",
            "The speed of training. It decreases when retries and flushes stall the steps.",
            (f"deriv(gpumem_torch_step{{{ONE_WORKLOAD}}}[$__rate_interval]) >= 0", LEGEND),
            unit=units.CountsPerSecond,
        ),
    ]


def _over_steps() -> Any:
    series = (
        ("allocated_bytes", "allocated"),
        ("reserved_bytes", "reserved"),
        ("allocated_peak_bytes", "peak allocated"),
    )
    panel = (
        described(
            xychart.Panel(),
            "Allocated, reserved and peak over steps",
            "The values of the fullest rank by step instead of time. Bytes that rise with the steps are a leak,"
            " independent of pauses. After a restart the points start at the left again.",
            units.BytesIEC,
        )
        .mapping(xy.SeriesMapping.AUTO)
        .show(xy.XYShowMode.POINTS)
        .point_size(xychart.XychartFieldConfigPointSize().fixed(3))
        .legend(legend())
        .height(8)
        .span(12)
        .with_target(query(f"max(gpumem_torch_step{{{ONE_WORKLOAD}}})", "step"))
        .override_by_name("step", [DynamicConfigValue("unit", units.Short)])
    )
    for letter, (name, title) in zip("BCD", series, strict=True):
        panel = panel.with_target(query(f"max(gpumem_torch_{name}{{{ONE_WORKLOAD}}})", title, letter))
    # The first number of the joined frame is x and every other one is a series, so time is removed.
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
            "Peak reserved and plan, by rank",
            "The dashed line is the peak that the plan of the job (gpumem-exporter plan) expects of each"
            " process. The other lines are the measured peaks. A rank above the dashed line needs more than"
            " planned.",
            (f"gpumem_torch_reserved_peak_bytes{{{ONE_WORKLOAD}}}", LEGEND),
            (f"max(gpumem_torch_planned_reserved_peak_bytes{{{ONE_WORKLOAD}}})", "planned"),
        ).override_by_name(*dashed("planned", "text")),
        graph(
            "Plan error, by rank",
            "The planned peak relative to the measured peak: above 0, the plan expects more; below 0, less."
            " Absent without a plan and before the second step ends.",
            (f"gpumem_torch_plan_error_ratio{{{ONE_WORKLOAD}}}", LEGEND),
            unit=units.PercentUnit,
            low=None,
        ),
    ]


def _wasted() -> list[Any]:
    def by_rank(name: str) -> tuple[str, str]:
        return f"gpumem_torch_{name}{{{ONE_WORKLOAD}}}", LEGEND

    def total(name: str) -> str:
        return f"sum(gpumem_torch_{name}{{{ONE_WORKLOAD}}})"

    anatomy = stacked(
        graph(
            "Reserved bytes by use",
            "All reserved bytes of the workload, stacked up to the dashed line. Rounding is the difference"
            " between the requested size and the size of the block.",
            (total("requested_bytes"), "requested", "dark-blue"),
            (f"{total('allocated_bytes')} - {total('requested_bytes')}", "rounding", "super-light-blue"),
            (total("reclaimable_bytes"), "cached, a clear releases it", "green"),
            (total("fragmented_bytes"), "cached, a clear cannot release it", "orange"),
            (total("reserved_bytes"), "reserved"),
            low=None,
            height=9,
        )
    )
    return [
        anatomy.override_by_name(*dashed("reserved", "text")),
        graph(
            "Fragmentation, by rank",
            "The share of the reserved bytes that is in no tensor and that torch.cuda.empty_cache() cannot"
            " release. Above a quarter, try expandable segments.",
            by_rank("fragmentation_ratio"),
            unit=units.PercentUnit,
            height=9,
            high=1,
        ),
        graph(
            "Inactive split, by rank",
            "Free bytes in segments that also have live blocks: the fragmentation of classic segments. Always 0"
            " with expandable segments.",
            by_rank("inactive_split_bytes"),
            span=8,
        ),
        graph(
            "Private pools, by rank",
            "Memory of CUDA graphs and of the program's own pools. A clear does not release it while they exist.",
            by_rank("private_pools_bytes"),
            span=8,
        ),
        graph(
            "Freed and used by another stream, by rank",
            "Freed bytes that PyTorch cannot reuse yet, because another CUDA stream still uses them. They are"
            " part of the cache.",
            (f"gpumem_torch_active_bytes{{{ONE_WORKLOAD}}} - gpumem_torch_allocated_bytes{{{ONE_WORKLOAD}}}", LEGEND),
            span=8,
        ),
    ]


def _phases_and_components() -> list[Any]:
    components = stacked(
        graph(
            "Allocated, by component",
            "Allocated bytes of all ranks by component, if the program names components or runs an inference engine."
            " Parameters and optimizer state are constant; gradients and activations (in other) change in each step.",
            *(
                (f'sum(gpumem_torch_component_bytes{{{ONE_WORKLOAD}, component="{component}"}})', name, shade)
                for component, name, shade in COMPONENTS
            ),
        )
    )
    return [
        components,
        bars(
            "Peak of each phase",
            "The highest allocated bytes in each phase that the program names, in the fullest rank. The longest"
            " bar is the phase that decides whether the job fits.",
            (f"sort_desc(max by (phase) (gpumem_torch_phase_peak_bytes{{{ONE_WORKLOAD}}}))", "{{phase}}"),
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
            "Allocations per second that failed at first, so that PyTorch flushed its cache and retried.",
            (by_rate("alloc_retries_total"), LEGEND),
            unit=units.CountsPerSecond,
        ),
        graph(
            "Cache flushes, by rank",
            "Cache flushes per second, requested by torch.cuda.empty_cache() or forced by a retry. Each flush"
            " waits for all streams.",
            (by_rate("cache_flushes_total"), LEGEND),
            unit=units.CountsPerSecond,
        ),
        graph(
            "Segments allocated and freed",
            "Segments per second of all ranks that PyTorch allocated from the driver and freed. Near zero in a"
            " steady loop; otherwise the cache does not suffice, and each allocation waits for the device.",
            (f"sum({by_rate('segments_allocated_total')})", "allocated"),
            (f"sum({by_rate('segments_freed_total')})", "freed"),
            unit=units.CountsPerSecond,
        ),
        graph(
            "Peak resets, by rank",
            "Resets of the peak statistics per second, by the program, a library or an action. A peak does not"
            " include the time before its reset.",
            (by_rate("peak_resets_total"), LEGEND),
            unit=units.CountsPerSecond,
        ),
    ]
