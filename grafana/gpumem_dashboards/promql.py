"""PromQL of several dashboards. It needs no recording rules, and treats a pid as unique only within a node."""

from __future__ import annotations

# Selectors with the variables of a dashboard, `=~` for variables with multiple values. Without a label `cluster`, the
# variable has no value but all, which is `.*` and includes series without the label.
CLUSTER = 'cluster=~"$cluster"'
NODE = f'{CLUSTER}, instance=~"$node"'
ONE_NODE = f'{CLUSTER}, instance="$node"'
GPU = f'{NODE}, gpu=~"$gpu"'
ONE_WORKLOAD = f'{GPU}, workload="$workload", rank=~"$rank"'

# The identifying labels. Clusters may have nodes with equal names, and a pid is unique only within a node.
DEVICE = "cluster, instance, gpu, uuid"
PROCESS = "cluster, instance, gpu, uuid, pid"
ON_DEVICE = "on (cluster, instance, uuid)"
ON_PROCESS = "on (cluster, instance, pid)"

# Prometheus's own series of a target, which exist also while the target is down.
IS_EXPORTER = f"and on (cluster, instance, job) last_over_time(gpumem_exporter_build_info{{{NODE}}}[$__range] @ end())"
EXPORTER_UP = f"up{{{NODE}}} {IS_EXPORTER}"

ABOVE = 0.9
"""The pressure above which a device is nearly full."""
FULL = 0.95
"""The pressure above which a device is full. The live page and docs/numbers.md have the same limits."""
_FAR_SECONDS = 7 * 86400


def hard_used_ratio(selector: str) -> str:
    """Return the query for pressure: the share of a device's usable memory that is neither free nor reclaimable."""
    return (
        f'1 - sum by ({DEVICE}) (gpumem_ledger_bytes{{{selector}, category=~"free|torch_reclaimable"}})'
        f' / sum by ({DEVICE}) (gpumem_ledger_bytes{{{selector}, category!="driver_reserved"}})'
    )


def coverage(node: str) -> str:
    """Return the query for coverage: of the memory that processes use, the share of the processes that report.

    Nodes with a device whose processes the driver does not list, or with a process of unknown memory, are left out.
    """
    used, info_ = f"gpumem_process_memory_used_bytes{{{node}}}", f"gpumem_process_info{{{node}"
    listed = f'gpumem_ledger_bytes{{{node}, category="other_processes"}}'
    exited = f"{ON_PROCESS} gpumem_reporter_up{{{node}}}"
    known = (
        f"({used} unless on (cluster, instance)"
        f" (gpumem_device_memory_total_bytes{{{node}}} unless {ON_DEVICE} {listed})"
        f" unless on (cluster, instance) ((gpumem_torch_reserved_bytes{{{node}}} > 0"
        f' or {info_}, reporting="false"}} unless {exited}) unless {ON_PROCESS} {used}))'
    )
    reports = f'({info_}, reporting="true"}} or 0 * {info_}}})'
    return f"sum({known} * {ON_PROCESS} group_left () {reports}) / sum({known})"


def above_seconds(selector: str) -> str:
    """Return the query for the time since a device's pressure exceeded `ABOVE`; 0 while it is below.

    The maximum is the length of the time range.
    """
    pressure = hard_used_ratio(selector)
    below = f"time() * (({pressure}) <= bool {ABOVE}) > 0"
    since = f"time() - max_over_time(({below})[$__range:$__rate_interval])"
    return f"(({since}) or ({pressure}) * 0 + $__range_s) * (({pressure}) > bool {ABOVE})"


def growth(metric: str, selector: str) -> str:
    """Return the query for the growth per second of a sawtooth's low mark over the time range."""
    return f"deriv({_floors(metric, selector)})"


def seconds_to_full(room: str, metric: str, selector: str, by: str) -> str:
    """Return the query for the time until `room` is used if the low mark of `metric` keeps growing.

    Absent if that is more than a week. Also absent if the low mark varies more than it grows, because the slope then
    has no meaning: a straight line must explain a third of the variance.
    """
    spread = f"stddev_over_time({_floors(metric, selector)})"
    rising = f"{growth(metric, selector)} > 2 * {spread} / $__range_s"
    return f"(({room}) / (sum by ({by}) ({rising}))) < {_FAR_SECONDS}"


def _floors(metric: str, selector: str) -> str:
    return f"min_over_time({metric}{{{selector}}}[$__rate_interval])[$__range:$__rate_interval]"


def info(labels: str, selector: str = NODE) -> str:
    """Return `* on (...) group_left (labels) info`, which adds labels of the info series to series of a process."""
    return f"* {ON_PROCESS} group_left ({labels}) gpumem_process_info{{{selector}}}"


def with_info(expression: str, labels: str, selector: str = NODE) -> str:
    """Return a query for series of processes with labels of their info series and unchanged values."""
    return f"({expression}) {info(labels, selector)}"


def process_used(selector: str) -> str:
    """Return the query for the driver's bytes of each process on each device, otherwise its reserved bytes."""
    return (
        f"(sum by ({PROCESS}) (gpumem_process_memory_used_bytes{{{selector}}})"
        f" or sum by ({PROCESS}) (gpumem_torch_reserved_bytes{{{selector}}}))"
    )


def largest_process(selector: str, labels: str) -> str:
    """Return the query for the process with the most memory on each device."""
    return with_info(f"topk by ({DEVICE}) (1, {process_used(selector)})", labels)


def largest_category(selector: str) -> str:
    """Return the query for the largest category of each device, except free memory."""
    categories = 'category!~"free|driver_reserved"'
    return f"topk by ({DEVICE}) (1, sum by ({DEVICE}, category) (gpumem_ledger_bytes{{{selector}, {categories}}}))"


def filled(shape: str, expression: str) -> str:
    """Return `expression`, which has the labels of `ON_DEVICE`, with the labels of `shape`; 0 without a series."""
    return f"(({shape}) * 0 + {ON_DEVICE} group_left () ({expression}) or ({shape}) * 0)"
