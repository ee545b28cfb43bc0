"""The driver's process lists as `summary` reads them, in the layouts of all drivers."""

from __future__ import annotations

import ctypes
import struct
from typing import Any

import pytest

from gpumem_client.driver_memory import process_list, processes_of_device, read_driver

SHORT, LONG = struct.Struct("@IQII"), struct.Struct("@IQIIQ")
SUCCESS, NOT_SUPPORTED, INSUFFICIENT_SIZE = 0, 3, 7
UNKNOWN = 2**64 - 1


class Driver:
    """`nvmlDeviceGet…RunningProcesses_v3` of a driver that writes entries of one layout."""

    def __init__(self, entries: list[tuple[int, int]], layout: struct.Struct = SHORT) -> None:
        self.entries = entries
        self.layout = layout
        self.calls = 0

    def __call__(self, device: Any, count: Any, buffer: Any) -> int:
        self.calls += 1
        room, count._obj.value = count._obj.value, len(self.entries)
        if room < len(self.entries):
            return INSUFFICIENT_SIZE
        rest = (0xFFFFFFFF, 0xFFFFFFFF, 0)[: 2 if self.layout is SHORT else 3]
        data = b"".join(self.layout.pack(pid, used, *rest) for pid, used in self.entries)
        ctypes.memmove(buffer, data, len(data))
        return SUCCESS


@pytest.mark.parametrize("layout", [SHORT, LONG], ids=["24 bytes", "32 bytes"])
@pytest.mark.parametrize("count", [0, 1, 2, 3, 4, 128, 129, 1000])
def test_every_layout_and_length_of_list_is_read(layout: struct.Struct, count: int) -> None:
    entries = [(pid, pid << 20) for pid in range(1, count + 1)]
    driver = Driver(entries, layout)
    assert process_list(driver, ctypes.c_void_p()) == entries
    assert driver.calls == (1 if count <= 128 else 2)


def test_an_unsupported_list_is_none() -> None:
    assert process_list(lambda *_: NOT_SUPPORTED, ctypes.c_void_p()) is None


class Nvml:
    def __init__(self, compute: Any, graphics: Any, mps: Any) -> None:
        self.nvmlDeviceGetComputeRunningProcesses_v3 = compute
        self.nvmlDeviceGetGraphicsRunningProcesses_v3 = graphics
        self.nvmlDeviceGetMPSComputeRunningProcesses_v3 = mps


def missing(*_: Any) -> int:
    return NOT_SUPPORTED


def test_a_process_on_several_lists_counts_once_and_unknown_bytes_stay_unknown() -> None:
    compute, graphics = Driver([(1, 100), (2, UNKNOWN), (0, 7), (4, UNKNOWN)]), Driver([(1, 120), (3, 5), (4, 9)])
    processes = processes_of_device(Nvml(compute, graphics, missing), ctypes.c_void_p())
    assert processes == {1: 120, 2: None, 3: 5, 4: 9}


def test_without_the_list_of_compute_processes_all_processes_are_unknown() -> None:
    assert processes_of_device(Nvml(missing, Driver([(1, 2)]), missing), ctypes.c_void_p()) is None


def test_a_device_without_a_uuid_is_not_queried() -> None:
    assert read_driver("").process_bytes is None
