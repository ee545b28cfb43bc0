"""Reads the real driver without the exporter, as an independent source for tests."""

from __future__ import annotations

import importlib.util
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import pynvml

from tests.emulation.node import DeviceBook

__all__ = ["anonymous", "books", "nvml", "why_no_device"]


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


def anonymous(text: str, uuids: Sequence[str]) -> str:
    """Replace the UUIDs of the devices by numbers, and the ids of containers by zeros."""
    for number, uuid in enumerate(uuids):
        text = text.replace(uuid.partition("-")[2], f"00000000-0000-0000-0000-{number:012}")
    return re.sub(r"\b[0-9a-f]{64}\b", "0" * 64, text)


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
