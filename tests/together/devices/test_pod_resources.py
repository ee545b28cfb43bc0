"""The kubelet's pod-resources API over real gRPC."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import grpc
import pytest

from gpumem_exporter.core.readings import NodeReading, ProcessFacts
from gpumem_exporter.node.pod_resources import Container, PodResources, query_device_assignments
from tests.support.builders.builders import UUIDS, device
from tests.support.servers.kubelet import Kubelet
from tests.support.waiting import patient, wait_for

TRAINER = ("ml", "llm-0", "trainer")
SERVER = ("web", "chat-0", "server")


@pytest.fixture
def socket(tmp_path: Path) -> Path:
    return tmp_path / "kubelet.sock"


def reading(start_ticks: int = 1) -> NodeReading:
    """One process in a pod, on device 0."""
    facts = {7: ProcessFacts(7, start_ticks, container_id="c", k8s_pod_uid="p")}
    return NodeReading(0, 0, 0, True, devices=(device(UUIDS[0], processes={7: 1}),), facts=facts)


def names(pods: PodResources, known: NodeReading | None = None) -> tuple[str, str, str]:
    facts = pods.name(known or reading()).facts[7]
    return facts.k8s_namespace, facts.k8s_pod, facts.k8s_container


def test_devices_and_claims_are_assigned_to_the_listed_containers(socket: Path) -> None:
    with Kubelet(socket) as kubelet:
        kubelet.containers = {
            TRAINER: (UUIDS[0], UUIDS[1]),
            SERVER: (f"{UUIDS[2]}::0",),
            ("web", "chat-1", "server"): (f"{UUIDS[2]}::1",),
            ("kube-system", "proxy", "proxy"): (),
            ("gke", "named-otherwise", "x"): ("nvidia0",),
        }
        kubelet.claims = {
            TRAINER: (("gpu.nvidia.com", "gpu-0"), ("gpu.nvidia.com", "gpu-12")),
            SERVER: (("gpu.nvidia.com", "gpu-1-mig-1g10gb-19-0"), ("dra.cpu", "gpu-2")),
        }
        before = time.clock_gettime(time.CLOCK_BOOTTIME) * 100
        given = query_device_assignments(socket, 30)
    assert given.by_device == {
        **{name: {Container(*TRAINER)} for name in (UUIDS[0], UUIDS[1], "gpu-0", "gpu-12")},
        UUIDS[2]: {Container(*SERVER), Container("web", "chat-1", "server")},
        "gpu-1-mig-1g10gb-19-0": {Container(*SERVER)},
    }
    assert before - 1 <= given.queried_ticks <= time.clock_gettime(time.CLOCK_BOOTTIME) * 100


def test_a_query_of_a_hanging_kubelet_times_out(socket: Path) -> None:
    with Kubelet(socket) as kubelet:
        kubelet.hanging.set()
        with pytest.raises(grpc.RpcError) as caught:
            query_device_assignments(socket, 0.2)
    assert caught.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED


def test_without_a_working_kubelet_only_the_names_are_missing(socket: Path, caplog: pytest.LogCaptureFixture) -> None:
    pods = PodResources(socket)
    pods.start()
    try:
        assert names(pods) == ("", "", "")
        with Kubelet(socket) as kubelet:
            kubelet.containers = {TRAINER: (UUIDS[0],)}
            wait_for(lambda: names(pods) == TRAINER, "the names")
            kubelet.error = "the kubelet is starting"
            young = reading(start_ticks=1 << 60)  # newer than the last answer: the kubelet is queried repeatedly
            queries = kubelet.questions
            wait_for(lambda: names(pods, young) == ("", "", "") and kubelet.questions > queries + 1, "two more queries")
            assert names(pods) == TRAINER, "the last answer is still valid"
            kubelet.error = ""
            kubelet.containers = {SERVER: (UUIDS[0],)}
            wait_for(lambda: names(pods, young) == ("", "", "") and names(pods) == SERVER, "the new names")
        messages = [record.getMessage() for record in caplog.records if "gpumem" in record.name]
        (complaint,) = [message for message in messages if "the kubelet is starting" in message]
        assert str(socket) in complaint
        assert "UNAVAILABLE" in complaint
    finally:
        pods.stop()


def test_grpc_is_imported_only_with_a_socket_and_its_absence_is_logged_with_a_fix(socket: Path) -> None:
    code = (
        "import logging, sys, time\n"
        "class Refuse:\n"
        "    def find_spec(self, name, path=None, target=None):\n"
        "        if name.split('.')[0] in ('grpc', 'google'): raise ImportError(f'No module named {name!r}')\n"
        "sys.meta_path.insert(0, Refuse())\n"
        "logging.basicConfig(format='%(message)s')\n"
        "from pathlib import Path\n"
        "from gpumem_exporter.node.pod_resources import PodResources\n"
        "import gpumem_exporter.app\n"
        "pods = PodResources(Path(sys.argv[1]))\n"
        "pods.start()\n"
        "import threading\n"
        "threads = [one for one in threading.enumerate() if one.name == 'gpumem-pod-resources']\n"
        "for thread in threads: thread.join(float(sys.argv[2]) if Path(sys.argv[1]).exists() else 0.5)\n"
        "print(any(thread.is_alive() for thread in threads))\n"
    )

    def run() -> Any:
        command = [sys.executable, "-c", code, str(socket), str(patient(30))]
        return subprocess.run(command, capture_output=True, text=True, check=True, timeout=patient(60))

    absent = run()
    assert (absent.stdout, absent.stderr) == ("True\n", "")
    socket.touch()
    present = run()
    assert present.stdout == "False\n"
    assert "pip install grpcio protobuf" in present.stderr
    assert len(present.stderr.splitlines()) == 1
