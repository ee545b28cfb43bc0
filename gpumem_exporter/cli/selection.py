"""Selects what `info` and `top` show, by the target options of the actions, from the documents of the API. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from gpumem_exporter.actions.mismatch import unknown_names
from gpumem_exporter.actions.request import Target
from gpumem_exporter.errors import TargetNotFoundError

__all__ = ["concerns", "require_known", "selected"]

Document = Mapping[str, Any]

_OF_PROCESS = ("pid", "workload", "rank", "user")


def require_known(target: Target, devices: Document, processes: Document) -> None:
    """Check that each name of a target exists.

    Raises:
        TargetNotFoundError: no device and no process has one of the names; the text has the nearest known ones.
    """
    on_devices = [*devices["devices"], *(device for process in processes["processes"] for device in process["devices"])]
    identities = [_identity(process) for process in processes["processes"]]
    known = {
        "gpu": [name for device in devices["devices"] for name in _gpus(device)],
        "uuid": [device["uuid"] for device in on_devices],
        **{name: sorted(value for one in identities for value in one[name]) for name in _OF_PROCESS},
    }
    if unknown := unknown_names(target, known):
        raise TargetNotFoundError(unknown)


def selected(target: Target, devices: Document, processes: Document) -> tuple[Document, Document]:
    """Return the documents of devices and processes with what a target selects.

    A target that names processes selects the devices that they use.
    """
    if not target.given():
        return devices, processes
    kept = list(_kept(target, processes["processes"]))
    used = {device["uuid"] for process in kept for device in process["devices"]}
    by_process = any(getattr(target, name) for name in _OF_PROCESS)
    chosen = [
        device
        for device in devices["devices"]
        if _admits_device(target, device) and (not by_process or device["uuid"] in used)
    ]
    return {**devices, "devices": chosen}, {**processes, "processes": kept}


def concerns(target: Target, event: Document) -> bool:
    """Return whether an event may be about the target: no value that it has is one that the target excludes."""
    return _admits_device(target, event) and all(
        event.get(name) is None or target.admits(name, str(event[name])) for name in ("pid", "workload", "rank")
    )


def _kept(target: Target, processes: list[Document]) -> Iterator[Document]:
    for process in processes:
        if not all(target.admits(name, *values) for name, values in _identity(process).items()):
            continue
        devices = [device for device in process["devices"] if _admits_device(target, device)]
        if devices or not (target.gpu or target.uuid):
            yield {**process, "devices": devices}


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
    """Whether the device of a device, a sample or an event is selected; also if it is unknown."""
    gpu, uuid = place.get("gpu"), place.get("uuid")
    return (gpu is None or target.admits("gpu", *_gpus(place))) and (uuid is None or target.admits("uuid", uuid))


def _gpus(place: Document) -> tuple[str, ...]:
    """The index of a device. That of a MIG device is preceded by its GPU's, which stands for all of them."""
    gpu = str(place.get("gpu") or "")
    parent, colon, _ = gpu.partition(":")
    return (parent, gpu) if colon else (gpu,)
