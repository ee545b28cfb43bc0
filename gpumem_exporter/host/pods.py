"""Find the Kubernetes container of each process from the device assignments of the kubelet.

The kubelet lists the names of containers and their devices, but no container ids, pod uids or pids. The cgroup of a
process has the container id and the pod uid, but no names. The devices connect both: if a device is assigned to one
container only, that is the container of the processes that the driver lists on the device. If containers share a
device (time slicing, MPS) and all are in one pod, the process gets the pod's name, but no container name.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import TypeVar

from gpumem_exporter.core.samples import DeviceReading, NodeReading, ProcessFacts

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Container:
    """The names of a container in the kubelet's list."""

    namespace: str
    pod: str
    name: str


@dataclass(frozen=True, slots=True)
class DeviceAssignments:
    """The containers to which the kubelet assigned each device."""

    queried_ticks: int = 0
    """When the kubelet was queried, in clock ticks after boot; containers that started earlier are in the answer."""
    by_device: Mapping[str, frozenset[Container]] = field(default_factory=dict)
    """By the device's NVML uuid; for a device of a ResourceClaim, by its name: see `claimed_device`."""

    def containers_of(self, device: DeviceReading) -> frozenset[Container]:
        """Return the containers to which the device is assigned."""
        names = (device.uuid, f"gpu-{device.minor}")
        return frozenset(container for name in names for container in self.by_device.get(name, ()))


def device_uuid(device_id: str) -> str | None:
    """Return the uuid of the device in an id of NVIDIA's device plugin; None for an id that is not a uuid.

    The ids of a shared device are `GPU-…::0`, `GPU-…::1` and so on. Other plugins use other names (`nvidia0`).
    """
    uuid = device_id.partition("::")[0]
    return uuid if uuid.startswith(("GPU-", "MIG-")) else None


def claimed_device(driver: str, device: str) -> str | None:
    """Return the name of a device of a ResourceClaim in `DeviceAssignments`; None if it is not NVIDIA's.

    NVIDIA's driver names a GPU after its minor number: `gpu-0` is /dev/nvidia0. The name of a MIG device
    (`gpu-0-mig-1g10gb-19-0`) contains profile and placement instead of a uuid, and matches no device.
    """
    return device if driver == "gpu.nvidia.com" else None


def name_containers(reading: NodeReading, assignments: DeviceAssignments) -> tuple[NodeReading, bool]:
    """Add the known names of pods and containers to the processes of a reading.

    Returns the reading, and whether it has a container that is newer than the assignments.
    """
    devices_of: dict[str, set[str]] = defaultdict(set)
    members: dict[str, list[ProcessFacts]] = defaultdict(list)
    for device in reading.devices:
        for process in device.processes or ():
            facts = reading.facts.get(process.pid)
            if facts is not None and facts.container_id and facts.k8s_pod_uid:
                devices_of[facts.container_id].add(device.uuid)
                members[facts.container_id].append(facts)
    # The answer may lack a container of which all processes have started after the query.
    known = {
        container_id
        for container_id, processes in members.items()
        if 0 < min(facts.start_time_ticks for facts in processes) < assignments.queried_ticks
    }
    assigned = {device.uuid: assignments.containers_of(device) for device in reading.devices}
    candidates = {
        container_id: frozenset.intersection(*(assigned[uuid] for uuid in devices_of[container_id]))
        for container_id in known
    }
    # If the processes of two containers use a device that is assigned to one, one of them uses it without the kubelet,
    # or has just been replaced: neither gets the name. The same applies to pods.
    containers = _one_to_one(
        (container_id, found) for container_id, several in candidates.items() if (found := _only(several)) is not None
    )
    pods = _one_to_one(
        {
            (members[container_id][0].k8s_pod_uid, pod)
            for container_id, several in candidates.items()
            if (pod := _only((container.namespace, container.pod) for container in several)) is not None
            # If two pods match one container, at most one of them contains it.
            and (len(several) > 1 or container_id in containers)
        }
    )
    facts_by_pid = dict(reading.facts)
    for container_id in known:
        container = containers.get(container_id)
        for facts in members[container_id]:
            pod = pods.get(facts.k8s_pod_uid)
            if pod is not None:
                facts_by_pid[facts.pid] = replace(
                    facts,
                    k8s_namespace=pod[0],
                    k8s_pod=pod[1],
                    k8s_container=container.name if container is not None else "",
                )
    return replace(reading, facts=facts_by_pid), len(known) < len(members)


def _only(values: Iterable[T]) -> T | None:
    """Return the only distinct value; None if there are none or several."""
    distinct = set(values)
    return distinct.pop() if len(distinct) == 1 else None


def _one_to_one(pairs: Iterable[tuple[str, T]]) -> dict[str, T]:
    """Return the pairs whose key and value occur in no other pair."""
    listed = list(pairs)
    keys, values = Counter(key for key, _ in listed), Counter(value for _, value in listed)
    return {key: value for key, value in listed if keys[key] == values[value] == 1}
