"""Real PyTorch processes, the real exporter, the real driver library, on the emulated node; every byte compared."""

from __future__ import annotations

from pathlib import Path

import pytest

from gpumem_client.wire.procfs import describe_command, split_cmdline
from tests.claims import actions, device, heaps
from tests.claims.place import EXPANDABLE, Place
from tests.claims.values import require
from tests.emulation.node import CONTEXT_BYTES


def test_every_torch_series_equals_the_value_of_the_process(place: Place) -> None:
    bench = place.process()
    values = heaps.every_series_is_what_torch_says(bench, devices=(0, 1))
    require(values)
    assert values["gpumem_torch_ooms_total of device 0"].value == 1
    # the driver lists every process here, so its value was compared too
    assert all(bench.pid in book.processes for book in place.books())
    info = bench.info()
    assert info["reporting"] == "true"
    assert info["command"] == describe_command(split_cmdline(Path(f"/proc/{bench.pid}/cmdline").read_bytes())) != ""
    assert info["torch_version"].startswith("2.")


def test_a_garbage_collection_frees_tensors_in_cycles_and_a_clear_releases_them(place: Place) -> None:
    require(actions.cycles_go_with_a_collection(place.process()))


def test_reset_peak_resets_only_the_peaks_of_the_target_device(place: Place) -> None:
    require(actions.peaks_are_reset(place.process(), devices=(0, 1)))


def test_a_device_s_memory_equals_that_of_the_driver_and_cuda(place: Place) -> None:
    require(device.memory_of_the_device(place))


@pytest.mark.parametrize("settings", ["", EXPANDABLE])
def test_a_segment_of_torch_equals_the_driver_s_allocation(place: Place, settings: str) -> None:
    values = device.segments(place.process(settings))
    require(values)
    assert values["1 byte: reserved"].value == 2 << 20


def test_a_context_is_non_torch_and_ends_with_the_process(place: Place) -> None:
    values = device.context_of_a_process(place)
    require(values)
    assert values["gpumem_torch_non_torch_bytes"].value == CONTEXT_BYTES


def test_a_dry_run_touches_nothing(place: Place) -> None:
    require(actions.dry_run_touches_nothing(place.process()))
