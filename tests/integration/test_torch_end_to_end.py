"""Real PyTorch processes, the real exporter, the real driver library, on the emulated node; every byte compared."""

from __future__ import annotations

import pytest

from tests.conftest import StartExporter
from tests.emulation.fixtures import MakeNode, StartTorch
from tests.emulation.node import EmulatedNode
from tests.integration.end_to_end_checks import (
    QUICK,
    Books,
    check_a_garbage_collection_frees_tensors_in_cycles,
    check_a_private_pool_stays_and_the_rest_is_reclaimable,
    check_every_torch_series_is_what_the_process_says,
    check_ledgers_add_up_in_every_scrape,
    check_peaks_are_reset_on_the_device_meant_alone,
    check_reclaimable_is_what_a_clear_gives_back,
    check_reclaimable_on_expandable_segments,
)


def books_of(node: EmulatedNode) -> Books:
    return lambda: node.books().devices


def test_every_torch_series_is_what_the_process_itself_says_byte_for_byte(
    node: EmulatedNode, start_exporter: StartExporter, start_torch: StartTorch
) -> None:
    exporter = start_exporter(node, *QUICK)
    process = start_torch(GPUMEM_EXPORTER_URL=exporter.url)
    check_every_torch_series_is_what_the_process_says(exporter, process, books_of(node), devices=(0, 1))
    # the driver knows every process here: its own figure was compared, too
    assert all(process.pid in book.processes for book in node.books().devices)


def test_ledgers_add_up_in_every_scrape_while_processes_allocate_and_free(
    make_node: MakeNode, start_exporter: StartExporter, start_torch: StartTorch
) -> None:
    node = make_node(devices=4)
    node.set_process(pid=1, device=2, nbytes=123_456_789)
    exporter = start_exporter(node, *QUICK)
    processes = [start_torch(node, GPUMEM_EXPORTER_URL=exporter.url) for _ in range(8)]
    check_ledgers_add_up_in_every_scrape(exporter, processes, books_of(node), devices=range(4))


@pytest.mark.timeout(300)
def test_reclaimable_is_what_a_clear_gives_back_to_the_byte_on_50_random_heaps(
    node: EmulatedNode, start_exporter: StartExporter, start_torch: StartTorch
) -> None:
    exporter = start_exporter(node, *QUICK)
    process = start_torch(GPUMEM_EXPORTER_URL=exporter.url)
    check_reclaimable_is_what_a_clear_gives_back(exporter, process, books_of(node))


def test_a_garbage_collection_frees_tensors_in_cycles_and_a_clear_gives_them_back(
    node: EmulatedNode, start_exporter: StartExporter, start_torch: StartTorch
) -> None:
    exporter = start_exporter(node, *QUICK)
    check_a_garbage_collection_frees_tensors_in_cycles(exporter, start_torch(GPUMEM_EXPORTER_URL=exporter.url))


def test_reset_peak_resets_the_peaks_of_the_device_meant_alone(
    node: EmulatedNode, start_exporter: StartExporter, start_torch: StartTorch
) -> None:
    exporter = start_exporter(node, *QUICK)
    process = start_torch(GPUMEM_EXPORTER_URL=exporter.url)
    check_peaks_are_reset_on_the_device_meant_alone(exporter, process, devices=(0, 1))


def test_on_expandable_segments_reclaimable_is_right_to_the_page(
    node: EmulatedNode, start_exporter: StartExporter, start_torch: StartTorch
) -> None:
    exporter = start_exporter(node, *QUICK)
    process = start_torch(GPUMEM_EXPORTER_URL=exporter.url, PYTORCH_CUDA_ALLOC_CONF="expandable_segments:True")
    check_reclaimable_on_expandable_segments(exporter, process)


def test_the_pool_of_a_cuda_graph_is_not_reclaimable_and_what_is_comes_back(
    node: EmulatedNode, start_exporter: StartExporter, start_torch: StartTorch
) -> None:
    exporter = start_exporter(node, *QUICK)
    check_a_private_pool_stays_and_the_rest_is_reclaimable(exporter, start_torch(GPUMEM_EXPORTER_URL=exporter.url))
