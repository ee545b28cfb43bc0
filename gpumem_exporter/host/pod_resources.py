"""Asks the kubelet which container it has given which device: its pod-resources API, over gRPC on a unix socket.

https://kubernetes.io/docs/concepts/extend-kubernetes/compute-storage-net/device-plugins/#monitoring-device-plugin-resources

grpcio and protobuf are the extra `kubernetes`; they are imported once there is a socket to ask, and not before.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from gpumem_exporter.core.samples import NodeReading
from gpumem_exporter.host.pods import Container, Given, device_uuid, name_containers

__all__ = ["DEFAULT_SOCKET", "SOCKET_VARIABLE", "PodResources", "list_given"]

DEFAULT_SOCKET = Path("/var/lib/kubelet/pod-resources/kubelet.sock")
"""Where every kubelet has it, unless it was started with another --root-dir."""
SOCKET_VARIABLE = "GPUMEM_POD_RESOURCES_SOCKET"

_ASK_AGAIN_SECONDS = 30.0
_ASK_SOONEST_SECONDS = 2.0
_DEADLINE_SECONDS = 5.0
_BELIEVED_SECONDS = 90.0
_LONGEST_ANSWER_BYTES = 16 << 20
_METHOD = "/v1.PodResourcesLister/List"
_MEND = "pip install 'gpumem-exporter[kubernetes]', or take the folder of the socket away"

_log = logging.getLogger(__name__)


class PodResources:
    """Keeps what the kubelet last said, in a thread of its own called `gpumem-pod-resources`.

    A kubelet that is slow, absent or wrong costs the names of pods and nothing else. It is asked every half minute, and
    sooner, though at most every two seconds, while a container is on a device that it did not know when it was asked.

    Args:
        socket: the kubelet's; it may come and go.
        ask: how it is asked; raises whatever it likes.
        clock: monotonic seconds.
    """

    def __init__(
        self,
        socket: Path,
        *,
        ask: Callable[[Path, float], Given] | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.socket = socket
        self._ask = ask or list_given
        self._clock = clock
        self._given = Given()
        self._answered_seconds: float | None = None
        self._trouble = ""
        self._stopping = threading.Event()
        self._wanted = threading.Event()
        self._thread = threading.Thread(target=self._run, name="gpumem-pod-resources", daemon=True)

    @classmethod
    def of_this_node(cls, environ: Mapping[str, str] = os.environ) -> PodResources | None:
        """The kubelet's of this node, or that which GPUMEM_POD_RESOURCES_SOCKET names; None where there is no kubelet.

        The folder must be there when the exporter starts; the socket need not: a kubelet makes it anew at each start.
        """
        socket = Path(environ.get(SOCKET_VARIABLE) or DEFAULT_SOCKET)
        return cls(socket) if socket.parent.is_dir() else None

    def start(self) -> None:
        """Begin to ask."""
        self._thread.start()

    def stop(self) -> None:
        """Ask no more. Does not wait for a question that is under way: that has its own deadline."""
        self._stopping.set()
        self._wanted.set()

    def name(self, reading: NodeReading) -> NodeReading:
        """The reading with the names of pods and containers as far as they can be known. Does not wait, nor raise."""
        answered = self._answered_seconds
        given = self._given if answered is not None and self._clock() - answered < _BELIEVED_SECONDS else Given()
        try:
            named, unknown = name_containers(reading, given)
        except Exception:  # noqa: BLE001 - a poll must not be lost for the names of its pods
            self._note("the pods cannot be told", exc_info=True)
            return reading
        if unknown:
            self._wanted.set()
        return named

    def _run(self) -> None:
        while not self._stopping.is_set():
            if self.socket.exists():
                try:
                    self._given = self._ask(self.socket, _DEADLINE_SECONDS)
                except ImportError as error:
                    self._note(f"the kubelet is not asked for pods: {error}; {_MEND}")
                    return
                except Exception as error:  # noqa: BLE001 - whatever a kubelet does, it costs the names alone
                    self._note(f"the kubelet at {self.socket} does not tell its pods: {_told(error)}")
                else:
                    self._answered_seconds = self._clock()
                    self._trouble = ""
            self._stopping.wait(_ASK_SOONEST_SECONDS)
            self._wanted.wait(_ASK_AGAIN_SECONDS - _ASK_SOONEST_SECONDS)
            self._wanted.clear()

    def _note(self, trouble: str, *, exc_info: bool = False) -> None:
        """Say it once, not at each attempt."""
        if trouble != self._trouble:
            self._trouble = trouble
            _log.warning("%s", trouble, exc_info=exc_info)


def list_given(socket: Path, deadline_seconds: float) -> Given:
    """Ask a kubelet once; waits no longer than the deadline.

    Raises:
        ImportError: the extra `kubernetes` is not installed.
        Exception: whatever gRPC raises for a kubelet that does not answer, or not with this message.
    """
    import grpc

    # The moment before the question: containers that are admitted while it is answered may be missing in the answer.
    asked_ticks = int(time.clock_gettime(time.CLOCK_BOOTTIME) * os.sysconf("SC_CLK_TCK"))
    options = (
        ("grpc.default_authority", "localhost"),  # gRPC's own, the socket's path, is refused by servers written in Go
        ("grpc.enable_http_proxy", 0),
        ("grpc.max_receive_message_length", _LONGEST_ANSWER_BYTES),
    )
    with grpc.insecure_channel(f"unix:{socket}", options=options) as channel:
        ask = channel.unary_unary(
            _METHOD, request_serializer=lambda _: b"", response_deserializer=_response_class().FromString
        )
        answer = ask(None, timeout=deadline_seconds)
    by_device: dict[str, set[Container]] = defaultdict(set)
    for pod in answer.pod_resources:
        for container in pod.containers:
            for devices in container.devices:
                for uuid in filter(None, map(device_uuid, devices.device_ids)):
                    by_device[uuid].add(Container(pod.namespace, pod.name, container.name))
    return Given(asked_ticks, {uuid: frozenset(containers) for uuid, containers in by_device.items()})


def _response_class() -> Any:
    """`v1.ListPodResourcesResponse`, with the fields that are needed; a message's other fields are skipped."""
    from google.protobuf import descriptor_pb2, descriptor_pool, message_factory

    field = descriptor_pb2.FieldDescriptorProto
    file = descriptor_pb2.FileDescriptorProto(name="podresources.proto", package="v1", syntax="proto3")
    messages: dict[str, tuple[tuple[str, int, str], ...]] = {
        "ContainerDevices": (("resource_name", 1, ""), ("device_ids", 2, "*")),
        "ContainerResources": (("name", 1, ""), ("devices", 2, "ContainerDevices")),
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


def _told(error: Exception) -> str:
    """Errors of gRPC print several lines; their code and details are what matters."""
    code, details = getattr(error, "code", None), getattr(error, "details", None)
    if callable(code) and callable(details):
        return f"{getattr(code(), 'name', code())}: {details()}"
    return f"{type(error).__name__}: {error}"
