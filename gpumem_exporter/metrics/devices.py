"""Samples of the last poll, of the devices and of their ledgers."""

from __future__ import annotations

from collections.abc import Iterator

from gpumem_exporter.core.ledger import device_ledger, shares_on
from gpumem_exporter.core.readings import DeviceReading
from gpumem_exporter.metrics import catalog
from gpumem_exporter.metrics.collector_types import Collector, Sample, Samples, Series, Subject, View, listed


def _polls(view: View) -> Iterator[Subject]:
    """Yield whether the driver answers, and the duration and time of the last poll unless it has expired."""
    last = view.snapshot.node
    samples: list[Sample] = [(catalog.NVML_UP, (), int(view.node is not None))]
    if last is not None:
        samples.append((catalog.POLL_DURATION, (), last.duration_seconds))
        samples.append((catalog.POLL_TIMESTAMP, (), last.taken_unix_seconds))
    yield Subject("poll", listed, (samples,))


def _devices(view: View) -> Iterator[Subject]:
    """Yield the devices. A device that cannot be read has only its info and `up` 0."""
    driver_version = view.node.driver_version if view.node is not None else ""
    for device in view.devices:
        yield Subject((device.gpu, device.uuid), _device_samples, (device, driver_version))


def _device_samples(device: DeviceReading, driver_version: str) -> Samples:
    key = (device.gpu, device.uuid)
    info = (*key, device.name, driver_version, device.pci_bus_id, device.mig_profile, device.parent_uuid)
    samples: list[Sample] = [(catalog.DEVICE_INFO, info, 1), (catalog.DEVICE_UP, key, int(device.up))]
    if (memory := device.memory) is not None:
        samples += [
            (catalog.DEVICE_TOTAL, key, memory.total_bytes),
            (catalog.DEVICE_USED, key, memory.used_bytes),
            (catalog.DEVICE_FREE, key, memory.free_bytes),
            (catalog.DEVICE_RESERVED, key, memory.reserved_bytes),
            (catalog.DEVICE_HOST_MEMORY, key, 1 if memory.of_host else None),
        ]
    return listed([*samples, (catalog.DEVICE_UTILIZATION, key, device.utilization_ratio)])


def _ledgers(view: View) -> Iterator[Subject]:
    """Yield the ledger of each device, with the non-torch memory of the processes on it."""
    identities = [(pid, process.report.process) for pid, process in view.names.reporting]
    labels = {pid: (pid, identity.workload, identity.rank) for pid, identity in identities}
    for device, shares in shares_on(view.devices, view.snapshot):
        key = (device.gpu, device.uuid)
        ledger = device_ledger(device, shares)
        categories = ledger.categories if ledger is not None else {}
        processes, values = [], [ledger.allocatable_bytes if ledger is not None else None, *categories.values()]
        for pid, _, _, _, non_torch_bytes in shares:
            if non_torch_bytes is not None:
                processes.append(labels[pid])
                values.append(non_torch_bytes)
        yield Subject(key, Samples, ((key, tuple(categories), tuple(processes)), _ledger_series, tuple(values)))


def _ledger_series(
    device: tuple[str, str], categories: tuple[str, ...], processes: tuple[tuple[str, str, str], ...]
) -> Iterator[Series]:
    yield catalog.DEVICE_ALLOCATABLE, device
    for category in categories:
        yield catalog.LEDGER, (*device, category)
    for labels in processes:
        yield catalog.TORCH_NON_TORCH, (*device, *labels)


POLL = Collector("poll", (catalog.NVML_UP, catalog.POLL_DURATION, catalog.POLL_TIMESTAMP), _polls)
DEVICE = Collector(
    "devices",
    (
        *(catalog.DEVICE_INFO, catalog.DEVICE_UP, catalog.DEVICE_TOTAL, catalog.DEVICE_USED, catalog.DEVICE_FREE),
        *(catalog.DEVICE_RESERVED, catalog.DEVICE_HOST_MEMORY, catalog.DEVICE_UTILIZATION),
    ),
    _devices,
)
LEDGER = Collector("ledger", (catalog.DEVICE_ALLOCATABLE, catalog.LEDGER, catalog.TORCH_NON_TORCH), _ledgers)
