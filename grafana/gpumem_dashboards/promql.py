"""The PromQL that several dashboards ask. Needs no recording rule, and never takes a pid for unique among nodes."""

from __future__ import annotations

__all__ = [
    "ABOVE",
    "DEVICE",
    "EXPORTER_UP",
    "GPU",
    "IS_EXPORTER",
    "NODE",
    "ONE_NODE",
    "ONE_WORKLOAD",
    "PROCESS",
    "TORCH",
    "above_seconds",
    "filled",
    "growth",
    "hard_used_ratio",
    "info",
    "largest_category",
    "largest_process",
    "process_used",
    "seconds_to_full",
    "with_info",
]

# What the variables of a dashboard choose. `=~` where several may be chosen.
NODE = 'instance=~"$node"'
ONE_NODE = 'instance="$node"'
GPU = f'{NODE}, gpu=~"$gpu"'
TORCH = f'{GPU}, workload=~"$workload", rank=~"$rank"'
ONE_WORKLOAD = f'{GPU}, workload="$workload", rank=~"$rank"'

# What tells one from another. A pid is a process' on one node only.
DEVICE = "instance, gpu, uuid"
PROCESS = "instance, gpu, uuid, pid"

# Prometheus' own series of a target, also of one that is down and shows none of ours.
IS_EXPORTER = f"and on (instance, job) last_over_time(gpumem_exporter_build_info{{{NODE}}}[$__range] @ end())"
EXPORTER_UP = f"up{{{NODE}}} {IS_EXPORTER}"

ABOVE = 0.9
"""From this share of memory that no clear gives back a device counts as pressed."""
_FAR_SECONDS = 7 * 86400


def hard_used_ratio(selector: str) -> str:
    """Pressure: the share of a device's usable memory that is neither free nor would come back by a clear."""
    return (
        f'1 - sum by ({DEVICE}) (gpumem_ledger_bytes{{{selector}, category=~"free|torch_reclaimable"}})'
        f' / sum by ({DEVICE}) (gpumem_ledger_bytes{{{selector}, category!="driver_reserved"}})'
    )


def above_seconds(selector: str) -> str:
    """For how long a device's pressure has been above `ABOVE` without a break; 0 while it is not.

    One that was never below in the time shown has that time.
    """
    pressure = hard_used_ratio(selector)
    below = f"time() * (({pressure}) <= bool {ABOVE}) > 0"
    since = f"time() - max_over_time(({below})[$__range:$__rate_interval])"
    return f"(({since}) or ({pressure}) * 0 + $__range_s) * (({pressure}) > bool {ABOVE})"


def growth(metric: str, selector: str) -> str:
    """Bytes a second by which the floor of a sawtooth rises over the time shown: the peaks of steps do not count."""
    return f"deriv({_floors(metric, selector)})"


def seconds_to_full(room: str, metric: str, selector: str, by: str) -> str:
    """How long `room` lasts while the floor of `metric` rises as it did, both by those labels.

    Absent where that is more than a week, or never. And where the floor goes up and down by more than it rises, which
    has a slope, too, of no meaning: a straight line through it has to explain a third of its variance.
    """
    spread = f"stddev_over_time({_floors(metric, selector)})"
    rising = f"{growth(metric, selector)} > 2 * {spread} / $__range_s"
    return f"(({room}) / (sum by ({by}) ({rising}))) < {_FAR_SECONDS}"


def _floors(metric: str, selector: str) -> str:
    return f"min_over_time({metric}{{{selector}}}[$__rate_interval])[$__range:$__rate_interval]"


def info(labels: str, selector: str = NODE) -> str:
    """`* on (...) group_left (labels) info`: gives each series of a process the labels of its info series."""
    return f"* on (instance, pid) group_left ({labels}) gpumem_process_info{{{selector}}}"


def with_info(expression: str, labels: str, selector: str = NODE) -> str:
    """The series of processes with labels of their info series; the value is unchanged."""
    return f"({expression}) {info(labels, selector)}"


def process_used(selector: str) -> str:
    """What each process holds on each device, as the driver counts; else what its allocator reserved, if known."""
    return (
        f"(sum by ({PROCESS}) (gpumem_process_memory_used_bytes{{{selector}}})"
        f" or sum by ({PROCESS}) (gpumem_torch_reserved_bytes{{{selector}}}))"
    )


def largest_process(selector: str, labels: str) -> str:
    """The process that holds most of each device."""
    return with_info(f"topk by ({DEVICE}) (1, {process_used(selector)})", labels)


def largest_category(selector: str) -> str:
    """The category of the ledger that holds most of each device, of those that somebody uses."""
    categories = 'category!~"free|driver_reserved"'
    return f"topk by ({DEVICE}) (1, sum by ({DEVICE}, category) (gpumem_ledger_bytes{{{selector}, {categories}}}))"


def filled(shape: str, expression: str) -> str:
    """`expression`, which is by instance and uuid, with the labels of `shape`; 0 where it has no series."""
    return f"(({shape}) * 0 + on (instance, uuid) group_left () ({expression}) or ({shape}) * 0)"
