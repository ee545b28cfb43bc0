"""Nodes as their exporters describe them in `/api/v1/live`, and the part of a node that target options select."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from gpumem_client.wire.errors import ExporterUnreachableError
from gpumem_client.wire.http import shown_url
from gpumem_exporter.actions.action_options import Target
from gpumem_exporter.actions.selection import unknown_names
from gpumem_exporter.cli.api_client import Document, ExporterApi
from gpumem_exporter.errors import TargetNotFoundError

_PATH = "/api/v1/live"
_OF_PROCESS = ("pid", "workload", "rank", "user")


@dataclass(frozen=True, slots=True)
class Node:
    """The last description of a node."""

    live: Document | None
    """The document of `/api/v1/live`; None if the exporter has never answered."""
    url: str = ""
    """The exporter's address; empty if only the driver was read."""
    name: str = ""
    """The `instance` of the exporter in a fleet; empty for a single node."""
    error: str = ""
    """Why `live` is not current; empty while it is."""


def read_live(api: ExporterApi, details: str = "none") -> dict[str, Any]:
    """Read the node, with whole documents of the processes of a job or of `all`.

    Raises ExporterUnreachableError if no address answers, or the answer is not an exporter's, and
    ExporterAnswerError if the exporter answers with an error.
    """
    live = api.get(f"{_PATH}?details={details}")
    if all(name in live for name in ("node", "devices", "jobs", "findings", "words")):
        return live
    raise ExporterUnreachableError(f"the server at {shown_url(api.url)} is not a gpumem-exporter of this version")


def processes_of(live: Document) -> list[Document]:
    """Return the processes of all jobs."""
    # Without details, only the job has the uid.
    return [{"uid": job["uid"], **process} for job in live["jobs"] for process in job["processes"]]


def node_document(live: Document) -> dict[str, Any]:
    """Return the node as `--json` prints it: devices and processes as in their own routes, jobs and findings."""
    node = live["node"]
    return {
        "source": node["source"],
        "taken_unix_seconds": node["taken_unix_seconds"],
        "nvml": {
            "up": node["driver"]["up"],
            "error": node["driver"]["error"],
            "driver_version": node["driver"]["version"],
        },
        "devices": live["devices"],
        "processes": processes_of(live),
        "jobs": [{**job, "processes": [process["pid"] for process in job["processes"]]} for job in live["jobs"]],
        "findings": live["findings"],
    }


def require_known(live: Document, target: Target) -> None:
    """Raise TargetNotFoundError, with the nearest names, if no device and no process has a name of a target."""
    processes = processes_of(live)
    on_devices = [*live["devices"], *(device for process in processes for device in process["devices"])]
    identities = [_identity(process) for process in processes]
    known = {
        "gpu": [name for device in live["devices"] for name in _gpus(device)],
        "uuid": [device["uuid"] for device in on_devices],
        **{name: sorted(value for one in identities for value in one[name]) for name in _OF_PROCESS},
    }
    if unknown := unknown_names(target, known, known):
        raise TargetNotFoundError(unknown)


def selected(live: Document, target: Target) -> Document:
    """Return what a target selects: processes, their jobs, the devices that they use, and the findings about these.

    The sizes of a job are the job's, also if the target selects only some of its processes.
    """
    if not target.given and not target.orphans:
        return live
    jobs = []
    for job in live["jobs"]:
        kept = [
            {**process, "devices": devices}
            for process in job["processes"]
            if target.admits(**_identity({"uid": job["uid"], **process}))
            and (not target.orphans or process.get("orphan") is not None)
            for devices in [[device for device in process["devices"] if _admits_device(target, device)]]
            if devices or not (target.gpu or target.uuid)
        ]
        if kept:
            jobs.append({**job, "processes": kept})
    used = {place["uuid"] for job in jobs for process in job["processes"] for place in process["devices"]}
    by_process = target.orphans or any(getattr(target, name) for name in _OF_PROCESS)
    devices = [
        device
        for device in live["devices"]
        if _admits_device(target, device) and (not by_process or device["uuid"] in used)
    ]
    ids, uuids = {job["id"] for job in jobs}, {device["uuid"] for device in devices}
    findings = [
        finding
        for finding in live["findings"]
        if (finding["job"] in ids if finding["job"] else finding["uuid"] is None or finding["uuid"] in uuids)
    ]
    return {**live, "devices": devices, "jobs": jobs, "findings": findings}


def _identity(process: Document) -> dict[str, tuple[str, ...]]:
    """Return the values of a process for each selector. A process without a workload or a rank has an empty one."""
    users = (process.get("user"), process.get("uid"))
    return {
        "pid": (str(process["pid"]),),
        "workload": (process.get("workload") or "",),
        "rank": (process.get("rank") or "",),
        "user": tuple(str(user) for user in users if user is not None),
    }


def _admits_device(target: Target, place: Document) -> bool:
    """Whether a target selects a device, or the device of a process; also if that device is unknown."""
    gpu, uuid = place.get("gpu"), place.get("uuid")
    return (gpu is None or target.admits(gpu=_gpus(place))) and (uuid is None or target.admits(uuid=(uuid,)))


def _gpus(place: Document) -> tuple[str, ...]:
    """Return the names that select a device: its index and, for a MIG device, also the index of its GPU."""
    gpu = str(place.get("gpu") or "")
    parent, colon, _ = gpu.partition(":")
    return (parent, gpu) if colon else (gpu,)
