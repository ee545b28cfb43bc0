"""Samples of the devices and their ledgers."""

from __future__ import annotations

from collections.abc import Iterator

from gpumem_exporter.collectors import catalog
from gpumem_exporter.collectors.lines import Column, Sample
from gpumem_exporter.collectors.view import OrderedDevices, View
from gpumem_exporter.core.ledger import node_ledgers, non_torch_bytes
from gpumem_exporter.core.samples import NodeReading

__all__ = ["device_samples", "ledger_samples"]


def device_samples(node: NodeReading | None, ordered: OrderedDevices) -> Iterator[Sample]:
    """Yield the samples of each device. A device that cannot be read has only its info and `up` 0."""
    if node is None:
        return
    for device in ordered.devices:
        labels = (device.gpu, device.uuid)
        info = (device.name, node.driver_version, device.pci_bus_id, device.mig_profile, device.parent_uuid)
        yield catalog.DEVICE_INFO, (*labels, *info), 1
        yield catalog.DEVICE_UP, labels, 1 if device.up else 0
        memory = device.memory
        if memory is not None:
            yield catalog.DEVICE_TOTAL, labels, memory.total_bytes
            yield catalog.DEVICE_USED, labels, memory.used_bytes
            yield catalog.DEVICE_FREE, labels, memory.free_bytes
            if memory.reserved_bytes is not None:
                yield catalog.DEVICE_RESERVED, labels, memory.reserved_bytes
            if memory.of_host:
                yield catalog.DEVICE_HOST_MEMORY, labels, 1
        if device.utilization_ratio is not None:
            yield catalog.DEVICE_UTILIZATION, labels, device.utilization_ratio


def ledger_samples(view: View) -> Iterator[Sample | Column]:
    """Yield the known categories of each device's ledger, and the non-torch memory of each process."""
    labels_by_pid = {
        process.host_pid: (pid, process.report.process.workload, process.report.process.rank)
        for pid, process in view.reporting
        if process.host_pid is not None
    }
    ledgers = node_ledgers(view.snapshot, view.names)
    for device in view.devices:
        ledger = ledgers.get(device.uuid)
        if ledger is not None:
            non_torch = ledger.non_torch
            for category, value in ledger.categories.items():
                yield catalog.LEDGER, (device.gpu, device.uuid, category), value
        elif view.node is not None:
            non_torch = non_torch_bytes(view.node, view.names, device)
        else:
            continue
        rows = tuple([labels_by_pid[pid] for pid in non_torch])
        yield Column(catalog.TORCH_NON_TORCH, (device.gpu, device.uuid), rows, list(non_torch.values()))
