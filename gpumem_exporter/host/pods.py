"""Which Kubernetes container a process is in, from what the kubelet has given to whom. Pure.

The kubelet lists containers by name with the devices given to each. It says neither a container's id, nor a pod's uid,
nor a pid. The cgroup of a process says container id and pod uid, and no names. What joins the two are the devices that
the driver lists the process on: a container whose processes are on a device that was given to one container alone is
that container. No name is given where that does not decide:

- a device that several containers share (time slicing, MPS): if all are of one pod, that pod, but no container;
- two containers on a device that was given to one (one of them uses it without having asked the kubelet, or has just
  been replaced): neither; the same for two pods that would have one name, or two names for one pod;
- a container of which no process is older than the list: the list may not know it yet;
- a process outside of pods, and devices given by a ResourceClaim (DRA), which the kubelet does not name by uuid.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import TypeVar

from gpumem_exporter.core.samples import NodeReading, ProcessFacts

__all__ = ["Container", "Given", "device_uuid", "name_containers"]

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Container:
    """A container as the kubelet names it."""

    namespace: str
    pod: str
    name: str


@dataclass(frozen=True, slots=True)
class Given:
    """What the kubelet has given to whom."""

    asked_ticks: int = 0
    """When it was asked, in clock ticks after boot: it knows the containers of all processes that began before."""
    by_device: Mapping[str, frozenset[Container]] = field(default_factory=dict)
    """By uuid, as NVML spells it."""


def device_uuid(device_id: str) -> str | None:
    """The device that an id of NVIDIA's device plugin means; None for an id that is no uuid.

    The copies of a shared device are called `GPU-…::0`, `GPU-…::1`. Other plugins name devices otherwise (`nvidia0`).
    """
    uuid = device_id.partition("::")[0]
    return uuid if uuid.startswith(("GPU-", "MIG-")) else None


def name_containers(reading: NodeReading, given: Given) -> tuple[NodeReading, bool]:
    """The reading with the names of its processes' pods and containers, as far as they can be known.

    Returns:
        The reading, and whether it holds a container that is younger than what was given.
    """
    on: dict[str, set[str]] = defaultdict(set)
    members: dict[str, list[ProcessFacts]] = defaultdict(list)
    for device in reading.devices:
        for process in device.processes or ():
            facts = reading.facts.get(process.pid)
            if facts is not None and facts.container_id and facts.k8s_pod_uid:
                on[facts.container_id].add(device.uuid)
                members[facts.container_id].append(facts)
    known = {
        container_id
        for container_id, processes in members.items()
        if 0 < min(facts.start_time_ticks for facts in processes) < given.asked_ticks
    }
    candidates = {
        container_id: frozenset.intersection(*(given.by_device.get(uuid, frozenset()) for uuid in on[container_id]))
        for container_id in known
    }
    containers = _one_to_one(
        (container_id, found) for container_id, several in candidates.items() if (found := _only(several)) is not None
    )
    pods = _one_to_one(
        {
            (members[container_id][0].k8s_pod_uid, pod)
            for container_id, several in candidates.items()
            if (pod := _only((container.namespace, container.pod) for container in several)) is not None
            # Two that claim one container cannot both be in its pod.
            and (len(several) > 1 or container_id in containers)
        }
    )
    facts_by_pid = dict(reading.facts)
    for container_id in known:
        for facts in members[container_id]:
            pod = pods.get(facts.k8s_pod_uid)
            if pod is not None:
                container = containers.get(container_id)
                facts_by_pid[facts.pid] = replace(
                    facts,
                    k8s_namespace=pod[0],
                    k8s_pod=pod[1],
                    k8s_container=container.name if container is not None else "",
                )
    return replace(reading, facts=facts_by_pid), len(known) < len(members)


def _only(values: Iterable[T]) -> T | None:
    """The one value that there is."""
    distinct = set(values)
    return distinct.pop() if len(distinct) == 1 else None


def _one_to_one(pairs: Iterable[tuple[str, T]]) -> dict[str, T]:
    """The pairs whose halves are in no other."""
    listed = list(pairs)
    keys, values = Counter(key for key, _ in listed), Counter(value for _, value in listed)
    return {key: value for key, value in listed if keys[key] == values[value] == 1}
