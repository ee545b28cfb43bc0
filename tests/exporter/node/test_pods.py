"""The names of pods and containers, from the kubelet's device assignments."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest

from gpumem_exporter.core.readings import NodeReading, ProcessFacts
from gpumem_exporter.node.pod_resources import Container, DeviceAssignments, PodResources, name_containers
from tests.support.builders.builders import UUIDS, device, node
from tests.support.waiting import wait_for

TRAINER = Container("ml", "llm-0", "trainer")
SIDECAR = Container("ml", "llm-0", "sidecar")
SERVER = Container("web", "chat-0", "server")
QUERIED = 5000


def facts(pid: int, container: str, pod: str, started: int = 100) -> ProcessFacts:
    return ProcessFacts(pid, started, container_id=container, k8s_pod_uid=pod)


def reading(*processes: ProcessFacts, on: dict[int, tuple[int, ...]]) -> NodeReading:
    """A reading with these processes; `on` has the devices of each by pid."""
    devices = [
        device(uuid, gpu=str(i), processes={pid: 1 for pid, where in on.items() if i in where})
        for i, uuid in enumerate(UUIDS)
    ]
    return dataclasses.replace(node(*devices), facts={process.pid: process for process in processes})


def given(**by_device: tuple[Container, ...]) -> DeviceAssignments:
    by_uuid = {UUIDS[int(name[1:])]: frozenset(containers) for name, containers in by_device.items()}
    return DeviceAssignments(QUERIED, by_uuid)


def named(reading: NodeReading, given: DeviceAssignments) -> dict[int, tuple[str, str, str]]:
    after, _ = name_containers(reading, given)
    return {
        pid: (found.k8s_namespace, found.k8s_pod, found.k8s_container)
        for pid, found in after.facts.items()
        if found.k8s_namespace or found.k8s_pod or found.k8s_container
    }


def test_the_container_of_a_device_is_that_of_its_processes() -> None:
    known = reading(facts(1, "c1", "p1"), facts(2, "c1", "p1"), facts(3, "c2", "p2"), on={1: (0, 1), 2: (1,), 3: (2,)})
    assert named(known, given(d0=(TRAINER,), d1=(TRAINER,), d2=(SERVER,))) == {
        1: ("ml", "llm-0", "trainer"),
        2: ("ml", "llm-0", "trainer"),
        3: ("web", "chat-0", "server"),
    }
    # Process 2 uses only a shared device, but its container also has device 0.
    assert named(known, given(d0=(TRAINER,), d1=(TRAINER, SERVER)))[2] == ("ml", "llm-0", "trainer")
    known = reading(facts(1, "c1", "p1"), facts(2, "c2", "p1"), on={1: (0,), 2: (0,)})
    assert named(known, given(d0=(TRAINER, SIDECAR))) == {1: ("ml", "llm-0", ""), 2: ("ml", "llm-0", "")}


ONE = facts(1, "c1", "p1")
AMBIGUOUS = {
    "the kubelet assigned the device to no container": (reading(ONE, on={1: (0,)}), given()),
    "time slicing": (reading(ONE, on={1: (0,)}), given(d0=(TRAINER, SERVER))),
    "a container in no pod": (reading(facts(1, "c1", ""), on={1: (0,)}), given(d0=(TRAINER,))),
    "a process of the host": (reading(facts(1, "", ""), on={1: (0,)}), given(d0=(TRAINER,))),
    "one of two does not use the kubelet": (
        reading(ONE, facts(2, "c2", "p2"), on={1: (0,), 2: (0,)}),
        given(d0=(TRAINER,)),
    ),
    "no one has both": (reading(ONE, on={1: (0, 1)}), given(d0=(TRAINER,), d1=(SERVER,))),
    "two names for one pod": (
        reading(ONE, facts(2, "c2", "p1"), on={1: (0,), 2: (1,)}),
        given(d0=(TRAINER,), d1=(SERVER,)),
    ),
    "one name for two pods": (
        reading(ONE, facts(2, "c2", "p2"), on={1: (0,), 2: (1,)}),
        given(d0=(TRAINER,), d1=(SIDECAR,)),
    ),
    "newer than the list": (reading(facts(1, "c1", "p1", started=QUERIED), on={1: (0,)}), given(d0=(TRAINER,))),
    "unknown start time": (reading(facts(1, "c1", "p1", started=0), on={1: (0,)}), given(d0=(TRAINER,))),
}


@pytest.mark.parametrize("case", AMBIGUOUS)
def test_ambiguous_containers_have_no_name(case: str) -> None:
    assert named(*AMBIGUOUS[case]) == {}
    _, has_new = name_containers(*AMBIGUOUS[case])
    assert has_new == (case in ("newer than the list", "unknown start time"))


def test_a_device_of_a_resource_claim_is_found_by_its_minor_number() -> None:
    known = reading(facts(1, "c1", "p1"), facts(2, "c2", "p2"), facts(3, "c3", "p3"), on={1: (0, 1), 2: (2,), 3: (3,)})
    minors = (5, 4, 0, None)  # not in NVML's order
    devices = tuple(dataclasses.replace(each, minor=minor) for each, minor in zip(known.devices, minors, strict=False))
    claimed = {name: frozenset((who,)) for name, who in (("gpu-4", TRAINER), ("gpu-5", TRAINER), ("gpu-0", SERVER))}
    assert named(dataclasses.replace(known, devices=devices), DeviceAssignments(QUERIED, claimed)) == {
        1: ("ml", "llm-0", "trainer"),
        2: ("web", "chat-0", "server"),
    }


def test_an_expired_answer_of_the_kubelet_is_not_used(tmp_path: Path) -> None:
    socket = tmp_path / "kubelet.sock"
    socket.touch()
    now = [100.0]

    def query(path: Path, deadline_seconds: float) -> DeviceAssignments:
        return given(d0=(TRAINER,))

    assert PodResources.of_this_node({"GPUMEM_POD_RESOURCES_SOCKET": str(tmp_path / "absent" / "kubelet.sock")}) is None
    pods = PodResources(socket, query=query, clock=lambda: now[0])
    known = reading(facts(1, "c1", "p1"), on={1: (0,)})
    assert pods.name(known).facts[1].k8s_pod == ""
    pods.start()
    try:
        wait_for(lambda: pods.name(known).facts[1].k8s_pod == "llm-0", "the pod's name")
    finally:
        pods.stop()
    now[0] += 90
    assert pods.name(known).facts[1].k8s_pod == ""
