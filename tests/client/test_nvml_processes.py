"""The driver's process lists in every layout and size of known drivers."""

from __future__ import annotations

import ctypes
import struct
from collections.abc import Callable, Sequence
from typing import Any

import pytest

from gpumem_client.driver_memory import read_driver
from gpumem_client.wire.nvml_processes import ProcessListError, processes_on_device

COMPUTE = "nvmlDeviceGetComputeRunningProcesses"
GRAPHICS = "nvmlDeviceGetGraphicsRunningProcesses"
MPS = "nvmlDeviceGetMPSComputeRunningProcesses"
NOT_AVAILABLE = (1 << 64) - 1
NO_INSTANCE = 0xFFFFFFFF

V1 = struct.Struct("@IQ")
V2 = struct.Struct("@IQII")
PROTECTED = struct.Struct("@IQIIQ")

Function = Callable[..., int]


class Library:
    """Replaces libnvidia-ml: writes answers to the caller's buffer, as the driver does."""

    def __init__(self, **functions: Function) -> None:
        for name, function in functions.items():
            setattr(self, name, function)


def answer(entries: Sequence[tuple[int, int]], layout: struct.Struct = V2) -> Function:
    rest = (NO_INSTANCE, NO_INSTANCE, 0)[: {V1.size: 0, V2.size: 2, PROTECTED.size: 3}[layout.size]]

    def function(handle: Any, count: Any, buffer: Any) -> int:
        room, count._obj.value = count._obj.value, len(entries)
        if len(entries) > room:
            return 7
        data = b"".join(layout.pack(pid, used, *rest) for pid, used in entries)
        ctypes.memmove(buffer, data, len(data))
        return 0

    return function


def code(value: int) -> Function:
    return lambda handle, count, buffer: value


def read(compute: Function, **others: Function) -> dict[int, int | None]:
    return processes_on_device(Library(**{COMPUTE + "_v3": compute, **others}), None)


@pytest.mark.parametrize("value", [NOT_AVAILABLE, 1 << 63])
def test_an_unavailable_value_is_unknown_not_zero(value: int) -> None:
    assert read(answer([(30, value)])) == {30: None}


def test_a_process_on_several_lists_counts_once_with_its_largest_value() -> None:
    assert read(
        answer([(30, 5), (31, NOT_AVAILABLE), (32, 9), (0, 7)]),
        **{GRAPHICS + "_v3": answer([(31, 7), (32, 8), (40, 1)]), MPS + "_v3": answer([(30, 5), (32, NOT_AVAILABLE)])},
    ) == {30: 5, 31: 7, 32: 9, 40: 1}


@pytest.mark.parametrize("layout", [V2, PROTECTED], ids=["24 bytes", "32 bytes"])
@pytest.mark.parametrize("count", [0, 3, 128, 129])
def test_every_layout_and_length_of_list_is_read(layout: struct.Struct, count: int) -> None:
    calls = []
    written = answer([(pid, pid << 20) for pid in range(1, count + 1)], layout)

    def compute(*arguments: Any) -> int:
        calls.append(arguments)
        return written(*arguments)

    assert read(compute) == {pid: pid << 20 for pid in range(1, count + 1)}
    assert len(calls) == (1 if count <= 128 else 2)


def test_a_list_that_grows_faster_than_it_is_read_is_an_error() -> None:
    rooms = []

    def growing(handle: Any, count: Any, buffer: Any) -> int:
        rooms.append(count._obj.value)
        count._obj.value *= 3
        return 7

    with pytest.raises(ProcessListError):
        read(growing)
    assert len(rooms) == 4
    assert rooms == sorted(set(rooms))


@pytest.mark.parametrize(("suffix", "layout"), [("_v3", V2), ("_v2", V2), ("", V1)])
def test_the_newest_function_that_an_older_driver_has_is_used(suffix: str, layout: struct.Struct) -> None:
    library = Library(**{COMPUTE + suffix: answer([(30, 5), (31, 6)], layout)})
    assert processes_on_device(library, None) == {30: 5, 31: 6}


def test_a_driver_without_the_function_does_not_support_the_list() -> None:
    with pytest.raises(ProcessListError) as error:
        processes_on_device(Library(), None)
    assert error.value.code == 13


@pytest.mark.parametrize("value", [3, 13])
def test_a_device_without_a_graphics_or_mps_list_has_its_compute_list(value: int) -> None:
    assert read(answer([(30, 5)]), **{GRAPHICS + "_v3": code(value), MPS + "_v3": code(value)}) == {30: 5}


@pytest.mark.parametrize(("compute", "mps"), [(3, 0), (0, 999)])
def test_a_list_that_cannot_be_read_is_an_error(compute: int, mps: int) -> None:
    with pytest.raises(ProcessListError) as error:
        read(code(compute) if compute else answer([(30, 5)]), **{MPS + "_v3": code(mps)})
    assert error.value.code == (compute or mps)


def test_a_device_without_a_uuid_is_not_queried() -> None:
    assert read_driver("").process_bytes is None
