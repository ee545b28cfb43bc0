"""The comparisons of the emulated node, on a real device with its real driver: the same checks, not a copy of them."""

from __future__ import annotations

import pytest

from tests.conftest import StartExporter
from tests.emulation.fixtures import StartTorch
from tests.gpu.driver import books
from tests.integration.end_to_end_checks import (
    QUICK,
    check_a_garbage_collection_frees_tensors_in_cycles,
    check_a_private_pool_stays_and_the_rest_is_reclaimable,
    check_every_torch_series_is_what_the_process_says,
    check_ledgers_add_up_in_every_scrape,
    check_peaks_are_reset_on_the_device_meant_alone,
    check_reclaimable_is_what_a_clear_gives_back,
    check_reclaimable_on_expandable_segments,
)

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(400)]


def all_devices() -> range:
    return range(len(books()))


def test_every_torch_series_is_what_the_process_itself_says_byte_for_byte(
    start_exporter: StartExporter, start_torch: StartTorch
) -> None:
    exporter = start_exporter(None, *QUICK)
    process = start_torch(GPUMEM_EXPORTER_URL=exporter.url)
    check_every_torch_series_is_what_the_process_says(exporter, process, books, all_devices()[:2])


def test_device_series_are_what_the_driver_says(start_exporter: StartExporter, start_torch: StartTorch) -> None:
    exporter = start_exporter(None, *QUICK)
    process = start_torch(GPUMEM_EXPORTER_URL=exporter.url)
    process.call("alloc", nbytes=1 << 30)  # so that it is not an empty device that is compared
    for book in books():
        metrics, labels = exporter.metrics(), {"gpu": str(book.index), "uuid": book.uuid}
        (info,) = (
            dict(found) for found in metrics.samples["gpumem_device_info"] if labels.items() <= dict(found).items()
        )
        assert info["name"] == book.name
        assert metrics.value("gpumem_device_up", **labels) == 1
        assert metrics.value("gpumem_device_memory_total_bytes", **labels) == book.total_bytes
        assert metrics.value("gpumem_device_memory_reserved_bytes", **labels) == book.reserved_bytes
    assert exporter.get("/health")["status"] == "ok"


def test_ledgers_add_up_in_every_scrape_while_processes_allocate_and_free(
    start_exporter: StartExporter, start_torch: StartTorch
) -> None:
    exporter = start_exporter(None, *QUICK)
    processes = [start_torch(GPUMEM_EXPORTER_URL=exporter.url) for _ in range(8)]
    check_ledgers_add_up_in_every_scrape(exporter, processes, books, all_devices())


def test_reclaimable_is_what_a_clear_gives_back_to_the_byte_on_50_random_heaps(
    start_exporter: StartExporter, start_torch: StartTorch
) -> None:
    exporter = start_exporter(None, *QUICK)
    check_reclaimable_is_what_a_clear_gives_back(exporter, start_torch(GPUMEM_EXPORTER_URL=exporter.url), books)


def test_a_garbage_collection_frees_tensors_in_cycles_and_a_clear_gives_them_back(
    start_exporter: StartExporter, start_torch: StartTorch
) -> None:
    exporter = start_exporter(None, *QUICK)
    check_a_garbage_collection_frees_tensors_in_cycles(exporter, start_torch(GPUMEM_EXPORTER_URL=exporter.url))


def test_reset_peak_resets_the_peaks_of_the_device_meant_alone(
    start_exporter: StartExporter, start_torch: StartTorch
) -> None:
    exporter = start_exporter(None, *QUICK)
    process = start_torch(GPUMEM_EXPORTER_URL=exporter.url)
    check_peaks_are_reset_on_the_device_meant_alone(exporter, process, all_devices())


def test_on_expandable_segments_reclaimable_is_right_to_the_page(
    start_exporter: StartExporter, start_torch: StartTorch
) -> None:
    exporter = start_exporter(None, *QUICK)
    process = start_torch(GPUMEM_EXPORTER_URL=exporter.url, PYTORCH_CUDA_ALLOC_CONF="expandable_segments:True")
    check_reclaimable_on_expandable_segments(exporter, process)


def test_the_pool_of_a_cuda_graph_is_not_reclaimable_and_what_is_comes_back(
    start_exporter: StartExporter, start_torch: StartTorch
) -> None:
    exporter = start_exporter(None, *QUICK)
    check_a_private_pool_stays_and_the_rest_is_reclaimable(exporter, start_torch(GPUMEM_EXPORTER_URL=exporter.url))
