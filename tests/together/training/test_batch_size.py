"""The search for a batch size with real training steps on an emulated device of 2 GiB."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.emulation.node import EmulatedNode
from tests.emulation.torch_process import TorchProcess

PROGRAM = "searched_batches"


@pytest.fixture(scope="module")
def device(tmp_path_factory: pytest.TempPathFactory, emulation: Path) -> Iterator[TorchProcess]:
    """A process on a node with one device of 2 GiB."""
    with (
        EmulatedNode(tmp_path_factory.mktemp("node") / "node", 1, 2 << 30) as node,
        TorchProcess(node, {"PYTORCH_CUDA_ALLOC_CONF": None}) as started,
    ):
        started.exec("torch.set_num_threads(1); torch.cuda.init()")
        yield started


@pytest.mark.parametrize(
    "scenario",
    [
        "the_found_size_trains_the_next_one_does_not_and_no_statistic_is_reset",
        "the_found_size_is_tried_until_its_memory_stops_growing",
        "the_advice_of_a_guard_is_measured_although_the_search_had_a_higher_peak",
        "a_search_ends_with_an_error_of_the_step_without_a_fitting_size_or_at_its_limits",
    ],
)
def test_on_a_device(device: TorchProcess, scenario: str) -> None:
    device.exec("import gc; gc.collect(); torch.cuda.empty_cache(); torch.cuda.reset_peak_memory_stats()")
    device.call_program(PROGRAM, scenario)


def test_without_cuda_nothing_is_tried_and_invalid_arguments_are_rejected() -> None:
    with TorchProcess(None, {"CUDA_VISIBLE_DEVICES": ""}) as process:
        process.call_program(PROGRAM, "without_cuda_nothing_is_tried_and_invalid_arguments_are_rejected")
        assert "find_batch_size" in process.stderr()
