"""Reads the real driver without the exporter, as an independent source for tests."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pynvml

from tests.emulation.node import DeviceBook

__all__ = ["books", "nvml", "why_no_device"]


def why_no_device() -> str:
    """Return the reason why there is no real device to test on; empty if there is one."""
    if importlib.util.find_spec("torch") is None:
        return "needs PyTorch, which is not installed"
    try:
        with nvml():
            count = pynvml.nvmlDeviceGetCount()
    except pynvml.NVMLError as error:
        return f"needs a real NVIDIA GPU and its driver; NVML says: {error}"
    return "" if count else "needs a real NVIDIA GPU; the driver has none"


@contextmanager
def nvml() -> Iterator[None]:
    """Open NVML for a while; raises pynvml.NVMLError if there is no driver."""
    pynvml.nvmlInit()
    try:
        yield
    finally:
        pynvml.nvmlShutdown()


def books() -> list[DeviceBook]:
    """Return every GPU with the driver's values, unchanged."""
    with nvml():
        return [_book(index) for index in range(pynvml.nvmlDeviceGetCount())]


def _book(index: int) -> DeviceBook:
    handle = pynvml.nvmlDeviceGetHandleByIndex(index)
    memory: Any = pynvml.nvmlDeviceGetMemoryInfo(handle, version=pynvml.nvmlMemory_v2)
    processes: dict[int, int] = {}
    for listed in pynvml.nvmlDeviceGetComputeRunningProcesses(handle):
        if listed.usedGpuMemory is not None:
            processes[listed.pid] = listed.usedGpuMemory
    return DeviceBook(
        index=index,
        uuid=pynvml.nvmlDeviceGetUUID(handle),
        name=pynvml.nvmlDeviceGetName(handle),
        parent_uuid="",
        total_bytes=memory.total,
        reserved_bytes=memory.reserved,
        used_bytes=memory.used,
        unattributed_bytes=memory.used - sum(processes.values()),
        processes=processes,
    )
