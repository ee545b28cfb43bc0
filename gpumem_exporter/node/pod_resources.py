"""Find the Kubernetes container of each process through the kubelet's pod-resources API: gRPC on a unix socket.

If containers share a device (time slicing, MPS) and all are in one pod, a process gets the pod's name, but no container
name.

https://kubernetes.io/docs/concepts/extend-kubernetes/compute-storage-net/device-plugins/#monitoring-device-plugin-resources

grpcio and protobuf belong to the extra `kubernetes`. They are imported only if the socket exists.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, TypeVar

from gpumem_exporter.core.readings import DeviceReading, NodeReading, ProcessFacts
from gpumem_exporter.node.failures import FailureLog

T = TypeVar("T")
DEFAULT_SOCKET = Path("/var/lib/kubelet/pod-resources/kubelet.sock")
"""The path of the socket, unless the kubelet was started with another --root-dir."""
SOCKET_VARIABLE = "GPUMEM_POD_RESOURCES_SOCKET"
_QUERY_INTERVAL_SECONDS = 30.0
_MIN_QUERY_INTERVAL_SECONDS = 2.0
_DEADLINE_SECONDS = 5.0
_ANSWER_EXPIRY_SECONDS = 90.0
_MAX_ANSWER_BYTES = 16 << 20
_METHOD = "/v1.PodResourcesLister/List"
_HOW_TO_FIX = "run `pip install grpcio protobuf`, or remove the mount of the socket's folder"
_log = logging.getLogger(__name__)


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
    """By the device's NVML uuid; for a device of a ResourceClaim, by its name."""

    def containers_of(self, device: DeviceReading) -> frozenset[Container]:
        """Return the containers to which the device is assigned."""
        names = (device.uuid, f"gpu-{device.minor}")
        return frozenset(container for name in names for container in self.by_device.get(name, ()))


def name_containers(reading: NodeReading, assignments: DeviceAssignments) -> tuple[NodeReading, bool]:
    """Add the known names of pods and containers to the processes of a reading.

    Returns the reading, and whether it has a container that is newer than the assignments.
    """
    # The kubelet lists the names of containers and their devices, but no container ids, pod uids or pids. The cgroup of
    # a process has the container id and the pod uid, but no names. The devices connect both: if a device is assigned to
    # one container only, that is the container of the processes that the driver lists on the device.
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


class PodResources:
    """Queries the kubelet in a thread named `gpumem-pod-resources` and stores its last answer.

    If the kubelet is slow, missing or wrong, only the names of pods are missing. The query runs every 30 seconds. While
    a device has a container that is newer than the last answer, it runs every 2 seconds. The socket need not exist.
    """

    def __init__(
        self,
        socket: Path,
        *,
        query: Callable[[Path, float], DeviceAssignments] | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.socket = socket
        self._query = query or query_device_assignments
        self._clock = clock
        self._assignments = DeviceAssignments()
        self._answered_seconds: float | None = None
        self._failures = FailureLog(_log, clock)
        self._stopping = threading.Event()
        self._query_needed = threading.Event()
        self._thread = threading.Thread(target=self._run, name="gpumem-pod-resources", daemon=True)

    @classmethod
    def of_this_node(cls, environ: Mapping[str, str] = os.environ) -> PodResources | None:
        """Create the client of this node's kubelet, or of GPUMEM_POD_RESOURCES_SOCKET; None if there is no kubelet.

        The folder of the socket must exist when the exporter starts. The socket may appear later, because the kubelet
        creates it at each start.
        """
        socket = Path(environ.get(SOCKET_VARIABLE) or DEFAULT_SOCKET)
        return cls(socket) if socket.parent.is_dir() else None

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    def stop(self) -> None:
        """Stop the thread without waiting for a running query, which has its own deadline."""
        self._stopping.set()
        self._query_needed.set()

    def name(self, reading: NodeReading) -> NodeReading:
        """Return the reading with the known names of pods and containers. Never blocks or raises."""
        answered = self._answered_seconds
        is_valid = answered is not None and self._clock() - answered < _ANSWER_EXPIRY_SECONDS
        try:
            named, has_new = name_containers(reading, self._assignments if is_valid else DeviceAssignments())
        except Exception:  # noqa: BLE001 - missing pod names must not lose a poll
            self._failures.failed("names of pods", "cannot be found", exc_info=True)
            return reading
        self._failures.recovered("names of pods")
        if has_new:
            self._query_needed.set()
        return named

    def _run(self) -> None:
        while not self._stopping.is_set():
            if self.socket.exists():
                kubelet = f"the kubelet at {self.socket}"
                try:
                    self._assignments = self._query(self.socket, _DEADLINE_SECONDS)
                except ImportError as error:
                    self._failures.failed(kubelet, f"not queried for pods: {error}; {_HOW_TO_FIX}")
                    return
                except Exception as error:  # noqa: BLE001 - a failing kubelet must affect only the names of pods
                    self._failures.failed(kubelet, f"does not list its pods: {_error_text(error)}")
                else:
                    self._answered_seconds = self._clock()
                    self._failures.recovered(kubelet)
            self._stopping.wait(_MIN_QUERY_INTERVAL_SECONDS)
            self._query_needed.wait(_QUERY_INTERVAL_SECONDS - _MIN_QUERY_INTERVAL_SECONDS)
            self._query_needed.clear()


def query_device_assignments(socket: Path, deadline_seconds: float) -> DeviceAssignments:
    """Query a kubelet once; waits at most for the deadline.

    Raises ImportError if the extra `kubernetes` is not installed, and any of gRPC's errors.
    """
    import grpc

    # The time is taken before the query, because a container that starts during the query may be missing in the answer.
    queried_ticks = int(time.clock_gettime(time.CLOCK_BOOTTIME) * os.sysconf("SC_CLK_TCK"))
    options = (
        ("grpc.default_authority", "localhost"),  # Go servers reject gRPC's default, the path of the socket
        ("grpc.enable_http_proxy", 0),
        ("grpc.max_receive_message_length", _MAX_ANSWER_BYTES),
    )
    with grpc.insecure_channel(f"unix:{socket}", options=options) as channel:
        list_pods = channel.unary_unary(
            _METHOD, request_serializer=lambda _: b"", response_deserializer=_response_class().FromString
        )
        answer = list_pods(None, timeout=deadline_seconds)
    by_device: dict[str, set[Container]] = defaultdict(set)
    for pod in answer.pod_resources:
        for container in pod.containers:
            for device in device_names(container):
                by_device[device].add(Container(pod.namespace, pod.name, container.name))
    return DeviceAssignments(queried_ticks, {uuid: frozenset(containers) for uuid, containers in by_device.items()})


def device_names(container: Any) -> Iterator[str]:
    """Yield the name of each NVIDIA device of a container, as in `DeviceAssignments`."""
    for devices in container.devices:
        for device_id in devices.device_ids:
            # The ids of a shared device are `GPU-…::0`, `GPU-…::1` and so on. Other plugins use names like `nvidia0`.
            uuid = device_id.partition("::")[0]
            if uuid.startswith(("GPU-", "MIG-")):
                yield uuid
    for claim in container.dynamic_resources:
        for claimed in claim.claim_resources:
            # NVIDIA's driver names a GPU after its minor number: `gpu-0` is /dev/nvidia0. The name of a MIG device
            # (`gpu-0-mig-1g10gb-19-0`) has the profile and the placement instead of a uuid, and matches no device.
            if claimed.driver_name == "gpu.nvidia.com":
                yield claimed.device_name


def _response_class() -> Any:
    """Build the message class `v1.ListPodResourcesResponse` with the needed fields; protobuf skips the others."""
    from google.protobuf import descriptor_pb2, descriptor_pool, message_factory

    field = descriptor_pb2.FieldDescriptorProto
    file = descriptor_pb2.FileDescriptorProto(name="podresources.proto", package="v1", syntax="proto3")
    messages: dict[str, tuple[tuple[str, int, str], ...]] = {
        "ContainerDevices": (("resource_name", 1, ""), ("device_ids", 2, "*")),
        "ClaimResource": (("driver_name", 2, ""), ("device_name", 4, "")),
        "DynamicResource": (("claim_resources", 4, "ClaimResource"),),
        "ContainerResources": (
            *(("name", 1, ""), ("devices", 2, "ContainerDevices")),
            ("dynamic_resources", 5, "DynamicResource"),
        ),
        "PodResources": (("name", 1, ""), ("namespace", 2, ""), ("containers", 3, "ContainerResources")),
        "ListPodResourcesResponse": (("pod_resources", 1, "PodResources"),),
    }
    for name, fields in messages.items():
        message = file.message_type.add(name=name)
        for field_name, number, kind in fields:
            label = field.LABEL_REPEATED if kind else field.LABEL_OPTIONAL
            added = message.field.add(name=field_name, number=number, label=label, type=field.TYPE_STRING)
            if kind not in ("", "*"):
                added.type, added.type_name = field.TYPE_MESSAGE, f".v1.{kind}"
    pool = descriptor_pool.DescriptorPool()
    pool.AddSerializedFile(file.SerializeToString())
    return message_factory.GetMessageClass(pool.FindMessageTypeByName("v1.ListPodResourcesResponse"))


def _error_text(error: Exception) -> str:
    """Return an error as one line; for a gRPC error, which prints several lines, the code and the details."""
    code, details = getattr(error, "code", None), getattr(error, "details", None)
    if callable(code) and callable(details):
        return f"{getattr(code(), 'name', code())}: {details()}"
    return f"{type(error).__name__}: {error}"
