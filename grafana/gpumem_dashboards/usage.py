"""Usage: who held how much memory for how long, and how much of it lay idle. Needs the recording rules."""

from __future__ import annotations

from typing import Any

from grafana_foundation_sdk.models import units

from gpumem_dashboards.frame import board, link, with_rows
from gpumem_dashboards.palette import shares
from gpumem_dashboards.panels import columns, graph, number, stacked
from gpumem_dashboards.promql import CLUSTER
from gpumem_dashboards.tables import Column, table

HELD = "owner:gpumem_process_memory_used_bytes:mean1m"
REPORTED = "owner:gpumem_process_memory_used_bytes:reported_mean1m"
IDLE = "owner:gpumem_torch_idle_cache_bytes:mean1m"
INACTIVE = "owner:gpumem_process_memory_used_bytes:inactive_mean1m"
UNUSED = "owner:gpumem_engine_kv_cache_bytes:unused_mean1m"
OWNERS = f'{CLUSTER}, user=~"$user", k8s_namespace=~"$namespace", slurm_account=~"$account"'
GIB_HOURS = "suffix: GiB h"
SHOWN = 50
"""The maximum number of rows of a table."""

_IDLE_LIMITS = shares(0.2, 0.4)
_NOTE = (
    " A GiB hour is one GiB held for one hour. Idle cache is the part that PyTorch cached and no process needed for a"
    " minute, and the key-value cache of inference engines that no request used for an hour. It is known for processes"
    " that report, and its share is of their memory. Held by idle jobs is all memory of processes that have been"
    " inactive for an hour, with their idle cache."
)


def usage() -> Any:
    """Build the dashboard of the memory-hours by owner."""
    made = board(
        "GPU memory: usage",
        "gpumem-usage",
        "Who held how much GPU memory for how long, and how much of it lay idle: by user, namespace, workload and"
        " Slurm account. It needs the recording rules of gpumem_exporter.",
        time="now-7d",
        refresh="5m",
        variables=[
            ("user", "User", f"{HELD}{{{CLUSTER}}}", "user"),
            ("namespace", "Namespace", f"{HELD}{{{CLUSTER}}}", "k8s_namespace"),
            ("account", "Slurm account", f"{HELD}{{{CLUSTER}}}", "slurm_account"),
        ],
    )
    by_name = (
        _owners("Users", "user", "user", span=12),
        _owners("Namespaces", "k8s_namespace", "namespace", span=12),
        _workloads(),
        _owners("Slurm accounts", "slurm_account", "account", span=24),
    )
    return with_rows(made, ("In the time range", [*_overview(), _by_day(), _over_time()]), ("Owners", by_name))


def _gib_hours(metric: str, by: str = "") -> str:
    """Return the query for the GiB hours of the time range; a sample stands for a minute."""
    grouping = f" by ({by})" if by else ""

    def total(name: str) -> str:
        return f"sum{grouping} (sum_over_time({name}{{{OWNERS}}}[$__range]))"

    if metric == IDLE:  # most owners have no inference engine
        return f"({total(IDLE)} + ({total(UNUSED)} or 0 * {total(IDLE)})) / {60 * 2**30}"
    if metric == INACTIVE:  # most owners have no idle job
        return f"({total(INACTIVE)} or 0 * {total(HELD)}) / {60 * 2**30}"
    return f"{total(metric)} / {60 * 2**30}"


def _overview() -> list[Any]:
    return [
        number(
            "Held",
            "The memory that processes held in the time range." + _NOTE,
            _gib_hours(HELD),
            unit=GIB_HOURS,
            span=5,
        ),
        number(
            "Idle cache",
            "The cache that processes held without using it. At least: of processes that do not report it is unknown."
            + _NOTE,
            _gib_hours(IDLE),
            unit=GIB_HOURS,
            span=5,
        ),
        number(
            "Held by idle jobs",
            "The memory of processes that had been inactive for an hour. At least: a process whose activity is unknown"
            " does not count." + _NOTE,
            _gib_hours(INACTIVE),
            unit=GIB_HOURS,
            span=5,
        ),
        number(
            "Idle cache share",
            "The idle cache in the memory that reporting processes held. A clear, or a policy on idle cache, makes it"
            " available to others.",
            f"{_gib_hours(IDLE)} / ({_gib_hours(REPORTED)})",
            unit=units.PercentUnit,
            limits=_IDLE_LIMITS,
            span=5,
        ),
        number(
            "Reported share",
            "The part of the held memory that belonged to processes that report. What the other processes did is"
            " unknown.",
            f"{_gib_hours(REPORTED)} / ({_gib_hours(HELD)})",
            unit=units.PercentUnit,
            span=4,
        ),
    ]


def _by_day() -> Any:
    panel = graph(
        "Held by day, by user",
        "GiB hours of each day, stacked. The column without a name has the processes of unknown or hidden users.",
        (f"sum by (user) (sum_over_time({HELD}{{{OWNERS}}}[$__rate_interval])) / {60 * 2**30}", "{{user}}"),
        unit=GIB_HOURS,
        height=9,
    )
    return columns(panel, "1d")


def _over_time() -> Any:
    panel = graph(
        "Held over time, by user",
        "The memory that each user held, stacked. The line without a name has the processes of unknown or hidden"
        " users.",
        (f"sum by (user) ({HELD}{{{OWNERS}}})", "{{user}}"),
        height=9,
    )
    return stacked(panel, 50)


def _values(by: str, only: str = "") -> list[Column]:
    """Return the columns of the memory-hours by labels; `only` restricts the rows."""

    def of(metric: str) -> str:
        return f"({_gib_hours(metric, by)})"

    return [
        Column("Held", of(HELD) + only, width=130),
        Column(
            "Idle cache share",
            f"{of(IDLE)} / {of(REPORTED)}{only}",
            units.PercentUnit,
            _IDLE_LIMITS,
            gauge=True,
            width=160,
        ),
        Column("Idle cache", of(IDLE) + only, width=110),
        Column("Held by idle jobs", of(INACTIVE) + only, width=140),
        Column("Reported", f"{of(REPORTED)} / {of(HELD)}{only}", units.PercentUnit, width=110),
    ]


def _owners(title: str, label: str, name: str, *, span: int) -> Any:
    links = (
        [] if name == "account" else [("Its jobs", link("gpumem-fleet", "cluster", **{name: f"__data.fields.{label}"}))]
    )
    return table(
        title,
        f"The memory-hours of the time range by {name}. The row without a name has all processes without one." + _NOTE,
        [Column(label, heading=title[:-1], links=links), *_values(label)],
        unit=GIB_HOURS,
        sort_by="Held",
        span=span,
        height=9,
    )


def _workloads() -> Any:
    by = "cluster, workload, user, k8s_namespace"
    largest = f" and on ({by}) topk({SHOWN}, {_gib_hours(HELD, by)})"
    to_workload = link("gpumem-workload", cluster="__data.fields.cluster", workload="__data.fields.workload")
    return table(
        "Workloads",
        f"The {SHOWN} workloads with the most memory-hours in the time range. The processes of a user without a"
        " workload are one row." + _NOTE,
        [
            Column("workload", heading="Workload", links=[("This workload", to_workload)]),
            Column("user", heading="User"),
            Column("k8s_namespace", heading="Namespace"),
            Column("cluster", heading="Cluster"),
            *_values(by, largest),
        ],
        unit=GIB_HOURS,
        sort_by="Held",
        height=10,
    )
