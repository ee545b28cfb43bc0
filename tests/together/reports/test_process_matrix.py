"""How processes use devices, start and end: every byte is shown on its device and for its process."""

from __future__ import annotations

import pytest

from tests.conftest import StartExporter
from tests.emulation.fixtures import MakeNode, StartTorch
from tests.emulation.node import MIB, EmulatedNode
from tests.emulation.torch_process import TorchProcess
from tests.support.exporter_process import QUICK, ExporterProcess, Metrics
from tests.support.waiting import wait_for


def client(exporter: ExporterProcess, start_torch: StartTorch, on: EmulatedNode, **environment: str) -> TorchProcess:
    process = start_torch(on, GPUMEM_EXPORTER_URL=exporter.url, **environment)
    process.call("start_client", workload="matrix")
    return process


def allocated(metrics: Metrics, pid: int) -> dict[str, float]:
    """Return the allocated bytes of a process on the page, by uuid."""
    return metrics.by("uuid", "gpumem_torch_allocated_bytes", pid=str(pid))


def used(metrics: Metrics, pid: int) -> dict[str, float]:
    """Return the used bytes of a process on the page, by uuid."""
    return metrics.by("uuid", "gpumem_process_memory_used_bytes", pid=str(pid))


def booked(node: EmulatedNode, pid: int) -> dict[str, int]:
    """Return the used bytes of a process on the emulated node, by uuid."""
    return {device.uuid: device.processes[pid] for device in node.books().devices if pid in device.processes}


def wait_for_true_values(exporter: ExporterProcess, node: EmulatedNode, *processes: TorchProcess) -> None:
    """Wait until the page has the values of torch and of the node for each process; every ledger adds up."""
    for process in processes:
        uuids = process.call("uuids")
        stats = {uuid: process.call("stats", device=i) for i, uuid in enumerate(uuids)}
        expected = {uuid: one["allocated_bytes.all.current"] for uuid, one in stats.items() if one}
        holding = {uuid: size for uuid, size in expected.items() if size}
        wait_for(
            lambda holding=holding, process=process: (
                {uuid: size for uuid, size in allocated(exporter.metrics(), process.pid).items() if size} == holding
            ),  # type: ignore[misc]
            f"{holding} in tensors of {process.pid}",
        )
        wait_for(
            lambda process=process: used(exporter.metrics(), process.pid) == booked(node, process.pid),  # type: ignore[misc]
            "a poll",
        )
    exporter.metrics().assert_ledgers_add_up()


# Devices and processes


@pytest.mark.parametrize(
    ("visible", "order"),
    [
        ("uuid 3,uuid 0", "PCI_BUS_ID"),
        ("1,7,0", "FASTEST_FIRST"),
    ],
)
def test_values_are_on_the_right_device_whatever_its_cuda_index(
    make_node: MakeNode, start_exporter: StartExporter, start_torch: StartTorch, visible: str, order: str
) -> None:
    node = make_node(devices=4)
    for number in range(4):
        visible = visible.replace(f"uuid {number}", node.uuid(number))
    exporter = start_exporter(node, *QUICK)
    process = client(exporter, start_torch, node, CUDA_VISIBLE_DEVICES=visible, CUDA_DEVICE_ORDER=order)
    named = [node.uuid(int(word)) if len(word) == 1 and int(word) < 4 else word for word in visible.split(",")]
    visible_uuids = named[: named.index("7")] if "7" in named else named  # CUDA stops at an invalid entry
    assert process.call("uuids") == visible_uuids
    for device in range(len(visible_uuids)):
        process.call("alloc", nbytes=(device + 1) * 7 * MIB, device=device)
    wait_for_true_values(exporter, node, process)
    shown = allocated(exporter.metrics(), process.pid)
    assert {uuid: size for uuid, size in shown.items() if size} == {
        uuid: (device + 1) * 7 * MIB for device, uuid in enumerate(visible_uuids)
    }
    # the label is NVML's index, not CUDA's
    for uuid in visible_uuids:
        (labels,) = [
            dict(labels)
            for labels in exporter.metrics().samples["gpumem_torch_allocated_bytes"]
            if dict(labels)["uuid"] == uuid
        ]
        assert node.uuid(int(labels["gpu"])) == uuid


# Reporters


# Ends of processes
