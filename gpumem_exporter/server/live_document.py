"""What the live page shows, as one JSON document. Pure: one snapshot in, a plain dictionary out; unknown is null.

It says no more than `/api/v1/devices`, `/api/v1/processes` and `/health`, in a form that is short enough to be sent
once a second: a process is a row, its values in the order of `COLUMNS`.
"""

from __future__ import annotations

from typing import Any

from gpumem_exporter.core.samples import Snapshot
from gpumem_exporter.server.documents import devices_document, processes_document

__all__ = ["COLUMNS", "live_document"]

_OF_PROCESS = ("pid", "state", "workload", "rank", "command", "user", "k8s_namespace", "k8s_pod")
_OF_DEVICE = (
    "gpu",
    "uuid",
    "used_bytes",
    "allocated_bytes",
    "reserved_bytes",
    "reclaimable_bytes",
    "fragmented_bytes",
    "non_torch_bytes",
)
_NOWHERE: dict[str, None] = dict.fromkeys(_OF_DEVICE)
COLUMNS = (*_OF_PROCESS, *_OF_DEVICE, "last_report_unix_seconds", "clears")
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
    state["processes"] = [
        row for process in processes_document(snapshot, source)["processes"] for row in _rows(process)
    ]
    return state


def _rows(process: dict[str, Any]) -> list[list[Any]]:
    of_process = [process[name] for name in _OF_PROCESS]
    # A reporter that does not say what it can run can run everything.
    clears = process["reporting"] and (not process["actions"] or "empty_cache" in process["actions"])
    return [
        [*of_process, *(device[name] for name in _OF_DEVICE), process["last_report_unix_seconds"], clears]
        for device in process["devices"] or (_NOWHERE,)
    ]
