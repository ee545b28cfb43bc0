"""Checkpoints: written completely or not at all, loadable by torch, and without device memory."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.emulation.fixtures import StartTorch
from tests.emulation.torch_process import TorchProcess

PROGRAM = "saved_checkpoints"


@pytest.mark.parametrize(
    "scenario",
    [
        "training_resumes_with_the_same_losses",
        "tied_weights_views_and_strides_are_saved_as_torch_saves_them",
        "after_any_error_only_the_previous_checkpoint_exists",
        "a_link_and_the_permissions_of_a_replaced_file_stay",
        "a_part_of_a_sharded_tensor_is_refused",
        "a_model_whose_state_all_ranks_gather_is_refused_without_waiting",
    ],
)
def test_on_the_cpu(process: TorchProcess, tmp_path: Path, scenario: str) -> None:
    process.call_program(PROGRAM, scenario, folder=str(tmp_path))


@pytest.mark.parametrize(
    "scenario",
    [
        "a_signal_handler_can_save_while_another_checkpoint_is_written",
        "threads_that_save_at_once_share_one_tagger_which_is_removed_with_the_last_save",
    ],
)
def test_on_a_device(start_torch: StartTorch, tmp_path: Path, scenario: str) -> None:
    start_torch().call_program(PROGRAM, scenario, folder=str(tmp_path))


def test_saving_takes_no_device_memory_and_host_memory_for_the_largest_tensor(
    process: TorchProcess, start_torch: StartTorch, tmp_path: Path
) -> None:
    on_device = start_torch(PYTORCH_CUDA_ALLOC_CONF=None)
    on_device.call_program(
        PROGRAM, "saving_takes_no_device_memory_and_host_memory_for_the_largest_tensor", folder=str(tmp_path)
    )
    process.call_program(PROGRAM, "read_without_a_device", folder=str(tmp_path))
