"""What the live page shows, as one JSON document. Pure: one snapshot in, a plain dictionary out; unknown is null.

It says no more than `/api/v1/devices`, `/api/v1/processes` and `/health`, in a form that is short enough to be sent
once a second: a process is a row, its values in the order of `COLUMNS`.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from gpumem_exporter.actions.model import gpu_labels
from gpumem_exporter.core.ledger import fragmented_bytes
from gpumem_exporter.core.samples import Snapshot
from gpumem_exporter.server.api.documents import SeenProcess, devices_document, seen_processes
from gpumem_exporter.wire.protocol import DeviceSample

__all__ = ["COLUMNS", "live_document"]

COLUMNS = (
    *("pid", "state", "workload", "rank", "command", "user", "k8s_namespace", "k8s_pod"),
    *("last_report_unix_seconds", "clears"),
    *("gpu", "uuid", "used_bytes", "non_torch_bytes"),
    *("allocated_bytes", "reserved_bytes", "reclaimable_bytes", "fragmented_bytes"),
)
"""A row is a process on a device; a process of which no device is known has one row, with null for the device.
`clears`: it reports, and its reporter can run `empty_cache`."""


def live_document(
    snapshot: Snapshot,
    *,
    source: str,
    version: str,
    health: dict[str, Any],
    page: str,
    allowed_actions: tuple[str, ...],
    newest: dict[str, Any] | None,
) -> dict[str, Any]:
    """The state of the node for the live page.

    Args:
        snapshot: all that is known.
        source: `nvml` or `demo`.
        version: the exporter's.
        health: what `/health` says.
        page: the digest of the page that can read this.
        allowed_actions: those of `--action.allow`.
        newest: the last point of the history.
    """
    state = devices_document(snapshot, source)
    state["version"] = version
    state["page"] = page
    state["nvml"]["error"] = health["nvml"]["error"]
    state["status"] = health["status"]
    state["troubles"] = [
        {"part": name, "status": check["status"], "detail": check["detail"]}
        for name, check in health["checks"].items()
        if check["status"] != "ok"
    ]
    state["allowed_actions"] = list(allowed_actions)
    state["newest"] = newest
    state["columns"] = COLUMNS
    gpus = gpu_labels(snapshot)
    state["processes"] = [row for process in seen_processes(snapshot) for row in _rows(process, gpus)]
    return state


def _rows(process: SeenProcess, gpus: dict[str, str]) -> Iterator[list[Any]]:
    """Built by hand: a node has hundreds of rows, and whoever reports waits meanwhile."""
    facts = process.facts
    samples: dict[str, DeviceSample] = {}
    clears = False
    workload = rank = None
    if process.reporter is not None:
        report = process.reporter.report
        workload, rank = report.process.workload, report.process.rank
        samples = {sample.uuid: sample for sample in report.devices}
        # A reporter that does not say what it can run can run everything.
        clears = not report.actions or "empty_cache" in report.actions
    elif process.silent is not None:
        workload, rank = process.silent.workload, process.silent.rank
    of_process = [
        *(process.pid, process.state, workload, rank, process.command),
        *((facts.user, facts.k8s_namespace, facts.k8s_pod) if facts else (None, None, None)),
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
            row += (None, None, None, None)
        else:
            row += (sample.allocated_bytes, sample.reserved_bytes, sample.reclaimable_bytes, fragmented_bytes(sample))
        yield row
