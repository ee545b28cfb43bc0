"""Inference engines: what they are, their components, and how they use their key-value caches."""

from __future__ import annotations

from typing import Any

from grafana_foundation_sdk.models import units

from gpumem_dashboards.panels import dashed, graph, stacked
from gpumem_dashboards.promql import NODE, ON_PROCESS
from gpumem_dashboards.tables import Column, table

COMPONENTS = (
    ("weights", "weights", "blue"),
    ("kv_cache", "KV cache", "dark-purple"),
    ("cuda_graphs", "CUDA graphs", "dark-orange"),
    ("runtime", "runtime", "yellow"),
)
_STATES = (
    ("used", "used", "dark-blue"),
    ("evictable", "evictable", "green"),
    ("free", "free", "#80808030"),
)
_WHERE = "cluster, instance, gpu, uuid, pid, workload"


def listed(selector: str, links: list[tuple[str, str]], node: tuple[str, str]) -> Any:
    """Build the table of the engines of all nodes."""

    def of(expression: str) -> str:
        return f"sum by ({_WHERE}) ({expression})"

    size = f'gpumem_torch_component_bytes{{{selector}, component="kv_cache"}}'
    peak = f'gpumem_engine_kv_cache_used_peak_bytes{{{selector}, window="24h"}}'
    info = f"group by ({_WHERE}) (gpumem_torch_reserved_bytes{{{selector}}})"
    joined = f"{info} * {ON_PROCESS} group_left (engine, version, model, state) gpumem_engine_info{{{NODE}}}"
    return table(
        "Engines",
        "The inference engines that report, one row for each process and device. Their key-value cache has a fixed"
        " size; peak is the highest use by requests in 24 hours, as far as it was observed. Unused is what no request"
        " needed in that time. Sleeping memory is not on the device.",
        [
            Column("workload", heading="Workload", links=links),
            Column("Engine", joined, hidden=True),
            Column("engine", heading="Engine"),
            Column("version", heading="Version"),
            Column("model", heading="Model"),
            Column("state", heading="State"),
            Column("cluster", heading="Cluster"),
            Column("instance", heading="Node", links=[node]),
            Column("gpu", heading="GPU", width=60),
            Column("KV cache", of(size)),
            Column("Used", of(f'gpumem_engine_kv_cache_bytes{{{selector}, state="used"}}')),
            Column("Peak in 24 h", of(peak)),
            Column("Unused", f"clamp_min({of(size)} - {of(peak)}, 0)"),
            Column(
                "Observed", of(f'gpumem_engine_kv_cache_observed_seconds{{{selector}, window="24h"}}'), units.Seconds
            ),
            Column("Sleeping", of(f"gpumem_torch_unmapped_bytes{{{selector}}} > 0")),
        ],
        sort_by="Unused",
        drop=("uuid", "pid"),
        no_value="no engine reports",
    )


def of_workload(selector: str) -> list[Any]:
    """Build the panels of the engines of one workload."""

    def total(metric: str, label: str, value: str) -> str:
        return f'sum({metric}{{{selector}, {label}="{value}"}})'

    cache = graph(
        "KV cache by use",
        "The key-value cache of all engines of the workload: used by running requests, evictable (prefix cache: kept"
        " for later requests with the same start, usable at once), and free. The dashed line is the sum of the highest"
        " uses of each process in 24 hours; a cache of 1.5 times that would be enough.",
        *((total("gpumem_engine_kv_cache_bytes", "state", state), name, shade) for state, name, shade in _STATES),
        (total("gpumem_engine_kv_cache_used_peak_bytes", "window", "24h"), "peak of 24 h"),
    )
    asleep = graph(
        "Unmapped, by component",
        "Memory that sleeping engines have released to the driver and map again when they wake. It is not on the"
        " device.",
        (f"sum by (component) (gpumem_torch_component_unmapped_bytes{{{selector}}})", "{{component}}"),
    )
    return [stacked(cache).override_by_name(*dashed("peak of 24 h", "red")), stacked(asleep)]
