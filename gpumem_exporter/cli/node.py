"""The node at one time, as `info` and `top` show it, and the part of it that target options select."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

from gpumem_client.wire.errors import ExporterUnreachableError
from gpumem_client.wire.http import shown_url
from gpumem_exporter.actions.mismatch import unknown_names
from gpumem_exporter.actions.request import Target
from gpumem_exporter.cli.api_client import ExporterApi
from gpumem_exporter.errors import TargetNotFoundError

Document = Mapping[str, Any]

# Documents of devices and of processes that are read one after the other may contradict each other.
_PATH = "/api/v1/live-rows?processes=documents"
_OF_DEVICES = ("source", "taken_unix_seconds", "nvml", "devices")
_OF_PROCESSES = ("source", "processes")
_OF_PROCESS = ("pid", "workload", "rank", "user")


@dataclass(frozen=True)
class Node:
    """Devices and processes, as `/api/v1/devices` and `/api/v1/processes` have them."""

    devices: Document
    processes: Document

    def require_known(self, target: Target) -> None:
        """Check that each name of a target exists.

        Raises TargetNotFoundError if no device and no process has one of the names; the text has the nearest names.
        """
        processes = self.processes["processes"]
        on_devices = [*self.devices["devices"], *(device for process in processes for device in process["devices"])]
        identities = [_identity(process) for process in processes]
        known = {
            "gpu": [name for device in self.devices["devices"] for name in _gpus(device)],
            "uuid": [device["uuid"] for device in on_devices],
            **{name: sorted(value for one in identities for value in one[name]) for name in _OF_PROCESS},
        }
        if unknown := unknown_names(target, known):
            raise TargetNotFoundError(unknown)

    def selected(self, target: Target) -> Node:
        """Return what a target selects. A target that names processes selects the devices that they use."""
        if not target.given():
            return self
        kept = list(_kept(target, self.processes["processes"]))
        used = {device["uuid"] for process in kept for device in process["devices"]}
        by_process = any(getattr(target, name) for name in _OF_PROCESS)
        devices = [
            device
            for device in self.devices["devices"]
            if _admits_device(target, device) and (not by_process or device["uuid"] in used)
        ]
        return replace(
            self, devices={**self.devices, "devices": devices}, processes={**self.processes, "processes": kept}
        )


def read_live(api: ExporterApi) -> tuple[Node, Document]:
    """Read the node, and return it with the whole document of `/api/v1/live`.

    Raises ExporterUnreachableError if no address answers, or the answer is not an exporter's, and
    ExporterAnswerError if the exporter answers with an error.
    """
    live = api.get(_PATH)
    problem = "is not a gpumem-exporter"
    try:
        state = live["state"]
        if "columns" in state:  # the rows of the page: the exporter does not know the parameter
            problem = f"is of version {state['version']}, which is too old for this command"
        elif all("pid" in process for process in state["processes"]):
            return Node(
                {name: state[name] for name in _OF_DEVICES}, {name: state[name] for name in _OF_PROCESSES}
            ), live
    except (KeyError, TypeError):
        pass
    raise ExporterUnreachableError(f"the server at {shown_url(api.url)} {problem}")


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
    """Whether a target selects a device, or the device of a sample or an event; also if that device is unknown."""
    gpu, uuid = place.get("gpu"), place.get("uuid")
    return (gpu is None or target.admits("gpu", *_gpus(place))) and (uuid is None or target.admits("uuid", uuid))


def _gpus(place: Document) -> tuple[str, ...]:
    """Return the names that select a device: its index and, for a MIG device, also the index of its GPU."""
    gpu = str(place.get("gpu") or "")
    parent, colon, _ = gpu.partition(":")
    return (parent, gpu) if colon else (gpu,)
