"""The driver's process lists in every layout and size of known drivers."""

from __future__ import annotations

import ctypes
import struct
from collections.abc import Callable, Sequence
from typing import Any

import pytest

from gpumem_exporter.core.samples import ProcessMemory
from gpumem_exporter.errors import NvmlDeviceLostError, NvmlError, NvmlNotSupportedError, NvmlPermissionError
from gpumem_exporter.nvml.process_lists import ProcessLists

COMPUTE = "nvmlDeviceGetComputeRunningProcesses"
GRAPHICS = "nvmlDeviceGetGraphicsRunningProcesses"
MPS = "nvmlDeviceGetMPSComputeRunningProcesses"
NOT_AVAILABLE = (1 << 64) - 1
NO_INSTANCE = 0xFFFFFFFF

V1 = struct.Struct("@IQ")
V2 = struct.Struct("@IQII")
PROTECTED = struct.Struct("@IQIIQ")


class Library:
    """Replaces libnvidia-ml: writes answers to the caller's buffer, as the driver does."""

    def __init__(self, **functions: Callable[..., int]) -> None:
        for name, function in functions.items():
            setattr(self, name, function)


def answer(entries: Sequence[tuple[int, int]], layout: struct.Struct = V2) -> Callable[..., int]:
    rest = (NO_INSTANCE, NO_INSTANCE, 0)[: {V1.size: 0, V2.size: 2, PROTECTED.size: 3}[layout.size]]

    def function(handle: Any, count: Any, buffer: Any) -> int:
        capacity = count._obj.value
        count._obj.value = len(entries)
        if len(entries) > capacity:
            return 7
        data = b"".join(layout.pack(pid, used, *rest) for pid, used in entries)
        ctypes.memmove(buffer, data, len(data))
        return 0

    return function


def code(value: int) -> Callable[..., int]:
    return lambda handle, count, buffer: value


def lists(compute: Callable[..., int], **others: Callable[..., int]) -> ProcessLists:
    return ProcessLists(Library(**{COMPUTE + "_v3": compute, **others}), capacity=4)


@pytest.mark.parametrize("value", [NOT_AVAILABLE, 1 << 63, 9223372036854775808 + 12])
def test_an_unavailable_value_is_unknown_not_zero(value: int) -> None:
    assert lists(answer([(30, value)])).read(None) == (ProcessMemory(30, None),)


def test_a_process_on_several_lists_counts_once_with_its_largest_value() -> None:
    both = lists(
        answer([(30, 5), (31, NOT_AVAILABLE), (32, 9)]),
        **{GRAPHICS + "_v3": answer([(31, 7), (32, 8), (40, 1)]), MPS + "_v3": answer([(30, 5), (32, NOT_AVAILABLE)])},
    )
    assert both.read(None) == (
        ProcessMemory(30, 5),
        ProcessMemory(31, 7),
        ProcessMemory(32, 9),
        ProcessMemory(40, 1),
    )


def test_an_entry_without_a_pid_is_left_out() -> None:
    assert lists(answer([(0, 5), (30, 6)])).read(None) == (ProcessMemory(30, 6),)


def test_a_list_that_exceeds_the_buffer_is_read_again_with_a_larger_one() -> None:
    entries = [(pid, pid * 10) for pid in range(1, 1001)]
    assert lists(answer(entries)).read(None) == tuple(ProcessMemory(pid, used) for pid, used in entries)


def test_a_list_that_grows_faster_than_it_is_read_is_an_error() -> None:
    capacities = []

    def growing(handle: Any, count: Any, buffer: Any) -> int:
        capacities.append(count._obj.value)
        count._obj.value = count._obj.value * 3
        return 7

    with pytest.raises(NvmlError, match="outgrew"):
        lists(growing).read(None)
    assert len(capacities) == 4
    assert capacities == sorted(set(capacities))


@pytest.mark.parametrize("count", [1, 2, 3, 4, 5, 64, 100])
def test_entries_with_protected_memory_are_detected_by_their_length(count: int) -> None:
    entries = [(pid, pid << 20) for pid in range(100, 100 + count)]
    expected = tuple(ProcessMemory(pid, used) for pid, used in entries)
    assert lists(answer(entries, PROTECTED)).read(None) == expected
    assert lists(answer(entries, V2)).read(None) == expected


def test_a_short_answer_contains_nothing_of_an_earlier_longer_one() -> None:
    answers = [answer([(pid, 1) for pid in range(1, 5)], PROTECTED), answer([(9, 2)], V2), answer([(8, 3)], PROTECTED)]
    changing = lists(lambda *arguments: answers.pop(0)(*arguments))
    assert len(changing.read(None)) == 4
    assert changing.read(None) == (ProcessMemory(9, 2),)
    assert changing.read(None) == (ProcessMemory(8, 3),)


@pytest.mark.parametrize(("suffix", "layout"), [("_v3", V2), ("_v2", V2), ("", V1)])
def test_the_newest_function_that_an_older_driver_has_is_used(suffix: str, layout: struct.Struct) -> None:
    old = ProcessLists(Library(**{COMPUTE + suffix: answer([(30, 5), (31, 6)], layout)}))
    assert old.read(None) == (ProcessMemory(30, 5), ProcessMemory(31, 6))


def test_a_driver_without_the_function_does_not_support_the_list() -> None:
    with pytest.raises(NvmlNotSupportedError):
        ProcessLists(Library()).read(None)


@pytest.mark.parametrize(("value", "error"), [(3, NvmlNotSupportedError), (4, NvmlPermissionError)])
def test_a_compute_list_that_cannot_be_read_is_an_error(value: int, error: type) -> None:
    with pytest.raises(error):
        lists(code(value)).read(None)


@pytest.mark.parametrize("value", [3, 13, 25])
def test_a_device_without_a_graphics_or_mps_list_has_its_compute_list(value: int) -> None:
    partial = lists(answer([(30, 5)]), **{GRAPHICS + "_v3": code(value), MPS + "_v3": code(value)})
    assert partial.read(None) == (ProcessMemory(30, 5),)


@pytest.mark.parametrize(("value", "error"), [(4, NvmlPermissionError), (15, NvmlDeviceLostError), (999, NvmlError)])
def test_a_partially_read_list_is_an_error(value: int, error: type) -> None:
    with pytest.raises(error):
        lists(answer([(30, 5)]), **{MPS + "_v3": code(value)}).read(None)
