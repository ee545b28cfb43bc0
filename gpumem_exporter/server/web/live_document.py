"""The state of the node for the live page. Pure: built from one snapshot; unknown values are null.

It has the content of `/api/v1/devices`, `/api/v1/processes` and `/health`. The page gets it each second, so there a
process is a row of values in the order of `COLUMNS`. Commands get the documents of `/api/v1/processes` instead.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from gpumem_client.wire.protocol import DeviceSample
from gpumem_exporter.actions.caller import Caller
from gpumem_exporter.actions.selection import gpu_labels
from gpumem_exporter.core.ledger import fragmented_bytes
from gpumem_exporter.core.samples import Snapshot
from gpumem_exporter.server.api.documents import SeenProcess, devices_document, processes_document, seen_processes
from gpumem_exporter.server.api.health import HealthDocument

__all__ = ["COLUMNS", "live_document"]

COLUMNS = (
    *("pid", "state", "workload", "rank", "command", "user", "k8s_namespace", "k8s_pod"),
    *("last_report_unix_seconds", "clears"),
    *("gpu", "uuid", "used_bytes", "non_torch_bytes"),
    *("allocated_bytes", "reserved_bytes", "reclaimable_bytes", "idle_cache_bytes", "fragmented_bytes"),
    *("unmapped_bytes", "nccl_bytes"),
)
"""A row is a process on a device. A process without a known device has one row, with null for the device.
`clears`: the process reports, and its reporter can run `empty_cache`."""


def live_document(
    snapshot: Snapshot,
    *,
    host: str,
    health: HealthDocument,
    page: str,
    allowed_actions: tuple[str, ...],
    newest: dict[str, Any] | None,
    viewer: Caller | None = None,
    whole_processes: bool = False,
) -> dict[str, Any]:
    """Return the state of the node.

    Args:
        snapshot: the current state.
        host: the name of the exporter's host.
        health: the document of `/health`.
        page: the digest of the page that can read this document.
        allowed_actions: the actions of `--action.allow`.
        newest: the last point of the history.
        viewer: the viewer, who does not see the identities of others' processes; None shows all identities.
        whole_processes: return processes as `/api/v1/processes` does, instead of rows and their columns.
    """
    devices = devices_document(snapshot, health["source"])
    return {
        "host": host,
        **devices,
        "nvml": {**devices["nvml"], "error": health["nvml"]["error"]},
        "version": health["version"],
        "page": page,
        "status": health["status"],
        "failed_checks": [
            {"part": name, **check} for name, check in health["checks"].items() if check["status"] != "ok"
        ],
        "allowed_actions": allowed_actions,
        "hides_identities": viewer is not None,
        "newest": newest,
        **(processes_document(snapshot, health["source"], viewer) if whole_processes else _table(snapshot, viewer)),
    }


def _table(snapshot: Snapshot, viewer: Caller | None) -> dict[str, Any]:
    gpus = gpu_labels(snapshot)
    rows = [row for process in seen_processes(snapshot, viewer) for row in _rows(process, gpus)]
    return {"columns": COLUMNS, "processes": rows}


def _rows(process: SeenProcess, gpus: dict[str, str]) -> Iterator[list[Any]]:
    """Build the rows of a process by hand: a node has hundreds of rows, and reports wait meanwhile."""
    samples: dict[str, DeviceSample] = {}
    clears = False
    workload = rank = None
    if process.reporter is not None:
        report = process.reporter.report
        workload, rank = report.process.workload, report.process.rank
        samples = {sample.uuid: sample for sample in report.devices}
        clears = process.reporter.clears
    elif process.silent is not None:
        workload, rank = process.silent.workload, process.silent.rank
    of_process = [
        *(process.pid, process.state, workload, rank, process.command),
        *(process.identity("user"), process.identity("k8s_namespace"), process.identity("k8s_pod")),
        *(process.last_report_unix_seconds, clears),
    ]
    uuids = [*samples, *(uuid for uuid in process.shares if uuid not in samples)]
    if not uuids:
        yield [*of_process, *(None,) * (len(COLUMNS) - len(of_process))]
    for uuid in uuids:
        share, sample = process.shares.get(uuid), samples.get(uuid)
        row = [*of_process, gpus.get(uuid), uuid]
        row += (share.used_bytes, share.non_torch_bytes) if share else (None, None)
        if sample is None:
            row += (None,) * 7
        else:
            row += (sample.allocated_bytes, sample.reserved_bytes, sample.reclaimable_bytes)
            row += (sample.idle_cache_bytes, fragmented_bytes(sample), sample.unmapped_bytes, sample.nccl_bytes)
        yield row
