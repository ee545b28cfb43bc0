"""A kubelet's pod-resources server: real gRPC with the messages of tests/data/podresources.proto."""

from __future__ import annotations

import importlib.util
import sys
import tempfile
import threading
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import grpc
from grpc_tools import protoc

from tests.support.paths import DATA

PROTO = DATA / "podresources.proto"
LIBRARY = Path(protoc.__file__).parent / "_proto"


class Kubelet:
    """Listens at `socket` and returns `containers`: `{(namespace, pod, container): (device id, …)}`.

    The test may change `containers` and `claims` (`{(…): (("gpu.nvidia.com", "gpu-0"), …)}`) at any time. With an
    `error`, every request is answered with UNAVAILABLE and this text; while `hanging` is set, none is answered.
    """

    def __init__(self, socket: Path) -> None:
        self.containers: Mapping[tuple[str, str, str], tuple[str, ...]] = {}
        self.claims: Mapping[tuple[str, str, str], tuple[tuple[str, str], ...]] = {}
        self.error = ""
        self.hanging = threading.Event()
        self.questions = 0
        self._closing = threading.Event()
        self._messages = messages = _messages()
        self._server = grpc.server(ThreadPoolExecutor(4))
        handler = grpc.unary_unary_rpc_method_handler(
            self._list,
            request_deserializer=messages.ListPodResourcesRequest.FromString,
            response_serializer=messages.ListPodResourcesResponse.SerializeToString,
        )
        (service,) = messages.DESCRIPTOR.services_by_name.values()
        (method,) = service.methods
        self._server.add_generic_rpc_handlers(
            (grpc.method_handlers_generic_handler(service.full_name, {method.name: handler}),)
        )
        self._server.add_insecure_port(f"unix:{socket}")

    def __enter__(self) -> Kubelet:
        self._server.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._closing.set()
        self._server.stop(0).wait(30)

    def _list(self, _: Any, context: grpc.ServicerContext) -> Any:
        self.questions += 1
        while self.hanging.is_set() and not self._closing.wait(0.05):
            pass
        if self.error:
            context.abort(grpc.StatusCode.UNAVAILABLE, self.error)
        answer = self._messages.ListPodResourcesResponse()
        for who in {**self.containers, **self.claims}:
            namespace, pod, name = who
            container = answer.pod_resources.add(name=pod, namespace=namespace).containers.add(
                name=name, cpu_ids=[0, 1, 40]
            )
            container.memory.add(memory_type="memory", size=1 << 34).topology.nodes.add(ID=1)
            for device_id in self.containers.get(who, ()):  # the kubelet lists each NUMA node separately
                devices = container.devices.add(resource_name="nvidia.com/gpu", device_ids=[device_id])
                devices.topology.nodes.add(ID=0)
            for driver, device in self.claims.get(who, ()):
                claim = container.dynamic_resources.add(claim_name=f"{pod}-gpus", claim_namespace=namespace)
                claimed = claim.claim_resources.add(driver_name=driver, pool_name="gpu-node-7", device_name=device)
                claimed.cdi_devices.add(name=f"k8s.{driver}/device={device}")
        return answer


def _messages() -> Any:
    """Return the module that protoc generates."""
    name = "podresources_pb2"
    if name not in sys.modules:
        with tempfile.TemporaryDirectory() as folder:
            arguments = ("protoc", f"-I{PROTO.parent}", f"-I{LIBRARY}", f"--python_out={folder}", str(PROTO))
            assert protoc.main(arguments) == 0
            spec = importlib.util.spec_from_file_location(name, Path(folder) / f"{name}.py")
            assert spec is not None
            assert spec.loader is not None
            module = importlib.util.module_from_spec(spec)
            spec.loader.exec_module(module)
            sys.modules[name] = module
    return sys.modules[name]
