"""The list of out-of-memory errors, each with a link to its post-mortem."""

from __future__ import annotations

from typing import Any

from grafana_foundation_sdk.models import units

from gpumem_dashboards.frame import post_mortem_times
from gpumem_dashboards.tables import Column, table


def listed(selector: str, *, node_shown: bool) -> Any:
    """Build a table of the last error of each process in the time range, including processes that have exited."""

    def value_of(name: str) -> str:
        by = "cluster, instance, gpu, pid, workload, rank"
        return f"max by ({by}) (last_over_time(gpumem_last_oom_{name}{{{selector}}}[$__range]))"

    happened = value_of("timestamp_seconds")
    since, until = post_mortem_times(happened)
    return table(
        "Last error of each process",
        "The last error of each process on each device in the time range: the bytes that PyTorch requested from"
        " the driver, the free bytes of the device, and the process's own cache. Click an error for its"
        " post-mortem.",
        [
            Column("cluster", heading="Cluster", hidden=not node_shown),
            Column("instance", heading="Node", hidden=not node_shown),
            Column("gpu", heading="GPU", width=60),
            Column("workload", heading="Workload", links=[("Post-mortem", _address())]),
            Column("rank", heading="Rank", width=70),
            Column("pid", width=90),
            Column("Ago", f"time() - {happened}", units.Seconds, width=100),
            Column("Requested", value_of("requested_bytes")),
            Column("Free on the device", value_of("device_free_bytes")),
            Column("Reclaimable", value_of("reclaimable_bytes")),
            Column("Fragmented", value_of("fragmented_bytes")),
            Column("Allocated", value_of("allocated_bytes")),
            Column("From", since, units.NoUnit, hidden=True),
            Column("To", until, units.NoUnit, hidden=True),
        ],
        sort_by="Ago",
        descending=False,
        no_value="No out-of-memory errors in the time range.",
        height=8,
    )


def _address() -> str:
    values = {"cluster": "cluster", "node": "instance", "gpu": "gpu", "workload": "workload", "pid": "pid"}
    chosen = "".join(f"&var-{name}=${{__data.fields.{label}:percentencode}}" for name, label in values.items())
    return (
        "/d/gpumem-oom?${datasource:queryparam}"
        f"&from=${{__data.fields.From.numeric}}&to=${{__data.fields.To.numeric}}{chosen}"
    )
