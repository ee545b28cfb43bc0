"""MIG, lost, old, integrated and reordered devices, and values of different times: each exported byte is right."""

from __future__ import annotations

import errno
from typing import Any

import pytest

from tests.conftest import StartExporter
from tests.emulation.fixtures import MakeNode, StartTorch
from tests.emulation.node import GIB, MIB, EmulatedNode, MigSlice
from tests.support.servers.exporter_process import QUICK, ExporterProcess, Metrics
from tests.support.truth.device_truth import (
    ATTACH_SECONDS,
    FOREIGN_PID,
    scrape,
    series_of,
    shown,
    start_reporting,
    wait_until_right,
)
from tests.support.waiting import wait_for, wait_until_equal


def gpu_of(metrics: Metrics, uuid: str) -> str:
    """Return the exported index of a device."""
    (gpu,) = [dict(labels)["gpu"] for labels in metrics.samples["gpumem_device_up"] if dict(labels)["uuid"] == uuid]
    return gpu


def wait_for_devices(exporter: ExporterProcess, *uuids: str) -> Metrics:
    """Return the first scrape with exactly these devices."""

    def there() -> Metrics | None:
        metrics = scrape(exporter)
        found = {dict(labels)["uuid"] for labels in metrics.samples.get("gpumem_device_up", {})}
        return metrics if found == set(uuids) else None

    return wait_for(there, f"the devices {uuids}", ATTACH_SECONDS)


def test_series_of_mig_devices_follow_their_creation_removal_and_loss(
    make_node: MakeNode, start_exporter: StartExporter, start_torch: StartTorch
) -> None:
    node = make_node(mig={1: [MigSlice("1g.10gb", 2 * GIB), MigSlice("1g.10gb", 3 * GIB)]})
    first, second = 2, 3
    exporter = start_exporter(node, *QUICK)
    process = start_reporting(start_torch, exporter, on=node, CUDA_VISIBLE_DEVICES=node.uuid(second))
    node.set_process(FOREIGN_PID, first, 100 * MIB)
    node.set_process(FOREIGN_PID, 0, 7 * MIB)
    metrics = wait_until_right(exporter, node, (0, first, second), {second: [process]})
    assert [gpu_of(metrics, node.uuid(i)) for i in (0, first, second)] == ["0", "1:0", "1:1"]
    assert series_of(metrics, uuid=node.uuid(1)) == []  # its MIG devices stand for the GPU

    with pytest.raises(OSError, match="busy") as refused:
        node.destroy_mig(second)
    assert refused.value.errno == errno.EBUSY
    node.remove_process(FOREIGN_PID)
    node.destroy_mig(first)
    metrics = wait_for_devices(exporter, node.uuid(0), node.uuid(second))
    assert series_of(metrics, uuid=node.uuid(first)) == []
    metrics = wait_until_right(exporter, node, (0, second), {second: [process]})
    assert gpu_of(metrics, node.uuid(second)) == "1:1"

    third = node.create_mig(1, MigSlice("2g.20gb", 1 * GIB))
    node.set_process(FOREIGN_PID, third, 33 * MIB)
    metrics = wait_until_right(exporter, node, (0, second, third), {second: [process]})
    assert gpu_of(metrics, node.uuid(third)) == "1:0"  # the slot of the one that went, but another device
    (info,) = [dict(labels) for labels in metrics.samples["gpumem_device_info"] if ("gpu", "1:0") in labels]
    assert (info["uuid"], info["mig_profile"], info["parent_uuid"]) == (node.uuid(third), "2g.20gb", node.uuid(1))

    node.lose_device(1)
    wait_for(lambda: scrape(exporter).values("gpumem_device_up", gpu="1:1") == [0], "the loss of the GPU to show")
    metrics = scrape(exporter)
    assert [metrics.value("gpumem_device_up", uuid=node.uuid(i)) for i in (0, second, third)] == [1, 0, 0]
    for part in (second, third):
        assert (shown(metrics, node.uuid(part))["ledger"], shown(metrics, node.uuid(part))["processes"]) == ({}, {})
    allocated = process.call("stats")["allocated_bytes.all.current"]
    assert metrics.value("gpumem_torch_allocated_bytes", uuid=node.uuid(second)) == allocated
    node.heal_device(1)
    wait_until_right(exporter, node, (0, second, third), {second: [process]})


def test_series_follow_the_uuid_when_the_driver_s_order_changes(
    node: EmulatedNode, start_exporter: StartExporter, start_torch: StartTorch
) -> None:
    exporter = start_exporter(node, *QUICK)
    processes = [start_reporting(start_torch, exporter, on=node, CUDA_VISIBLE_DEVICES=node.uuid(i)) for i in (0, 1)]
    node.set_process(FOREIGN_PID, 1, 11 * MIB)
    reporting = {0: [processes[0]], 1: [processes[1]]}
    metrics = wait_until_right(exporter, node, (0, 1), reporting)
    assert [gpu_of(metrics, node.uuid(i)) for i in (0, 1)] == ["0", "1"]
    for order in ([1, 0], [0, 1], [1, 0]):
        node.restart_driver_reordered(order)
        wanted = {node.uuid(device): str(index) for index, device in enumerate(order)}

        def reordered(wanted: dict[str, str] = wanted) -> bool:
            found = scrape(exporter).samples.get("gpumem_device_up", {})
            return {dict(labels)["uuid"]: dict(labels)["gpu"] for labels in found} == wanted

        wait_for(reordered, f"the order {order}", ATTACH_SECONDS)
        metrics = wait_until_right(exporter, node, (0, 1), reporting)
        # Every series of a device has its current index, including those of reports before the restart.
        for name, samples in metrics.samples.items():
            for labels in map(dict, samples):
                if "uuid" in labels:
                    assert labels["gpu"] == wanted[labels["uuid"]], (name, labels)
        action = exporter.act("empty_cache", target={"gpu": wanted[node.uuid(0)]})
        assert [(row["pid"], row["uuid"]) for row in action["results"]] == [(processes[0].pid, node.uuid(0))]
        processes[0].call("random_heap", seed=order[0], blocks=20)


@pytest.mark.parametrize(("visible", "order"), [("3,0", "PCI_BUS_ID"), ("1,7,0", "FASTEST_FIRST")])
def test_values_are_on_the_right_device_whatever_its_cuda_index(
    make_node: MakeNode, start_exporter: StartExporter, start_torch: StartTorch, visible: str, order: str
) -> None:
    node = make_node(devices=4)
    exporter = start_exporter(node, *QUICK)
    process = start_torch(node, GPUMEM_EXPORTER_URL=exporter.url, CUDA_VISIBLE_DEVICES=visible, CUDA_DEVICE_ORDER=order)
    process.call("start_client", workload="matrix")
    visible_uuids = [node.uuid(int(word)) for word in visible.partition(",7")[0].split(",")]  # CUDA stops at this one
    assert process.call("uuids") == visible_uuids
    for device in range(len(visible_uuids)):
        process.call("alloc", nbytes=(device + 1) * 7 * MIB, device=device)

    def shown() -> list[dict[tuple[str, str], float]]:
        """Return the allocated and the used bytes of the process, by NVML's index and by uuid."""
        metrics, pid = scrape(exporter), str(process.pid)
        found = []
        for name in ("gpumem_torch_allocated_bytes", "gpumem_process_memory_used_bytes"):
            series = [(dict(labels), size) for labels, size in metrics.samples.get(name, {}).items() if size]
            found.append({(labels["gpu"], labels["uuid"]): size for labels, size in series if labels["pid"] == pid})
        return found

    places = {node.uuid(number): (str(number), node.uuid(number)) for number in range(4)}
    sizes = {places[uuid]: (device + 1) * 7 * MIB for device, uuid in enumerate(visible_uuids)}
    books = {places[book.uuid]: book.processes[process.pid] for book in node.books().devices if book.processes}
    wait_until_equal(shown, [sizes, books], "the bytes of each device")


def test_after_an_action_the_driver_is_read_immediately(
    node: EmulatedNode, start_exporter: StartExporter, start_torch: StartTorch
) -> None:
    exporter = start_exporter(node, "--report.interval", "0.2", "--collect.interval", "600")
    process = start_reporting(start_torch, exporter)
    uuid, pid = node.uuid(0), process.pid
    # The only poll may have been before the start of the process; the first action causes another.
    exporter.act("empty_cache", target={"pid": pid})
    wait_until_right(exporter, node, (0,), {0: [process]})
    context_bytes = node.books()[0].processes[pid] - process.call("stats")["reserved_bytes.all.current"]

    process.call("free")
    reserved = process.call("stats")["reserved_bytes.all.current"]
    wait_for(
        lambda: scrape(exporter).ledgers()[uuid]["torch_reclaimable"] == reserved > 0, "a report of the free cache"
    )
    assert exporter.act("empty_cache", target={"pid": pid})["freed_bytes"] == reserved
    seen: list[Any] = []
    while not seen or seen[-1] != (0, reserved):
        metrics = scrape(exporter)
        ledger = metrics.ledgers()[uuid]
        used = int(metrics.value("gpumem_process_memory_used_bytes", pid=str(pid), uuid=uuid))
        reported = ledger["torch_allocated"] + ledger["torch_reclaimable"] + ledger["torch_fragmented"]
        # The context alone, if report and reading have the same time; otherwise the difference between them too.
        assert ledger["non_torch"] - context_bytes == (used - context_bytes) - reported
        seen.append((reported, context_bytes + reserved - used))
        assert set(seen[-1]) <= {0, reserved}, seen
    wait_until_right(exporter, node, (0,), {0: [process]})
