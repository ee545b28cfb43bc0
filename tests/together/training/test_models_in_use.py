"""Inference and optimized models: their changes and the measurements."""

from __future__ import annotations

import pytest

from tests.emulation.fixtures import StartTorch
from tests.emulation.torch_process import TorchProcess

PROGRAM = "models_in_use"


@pytest.mark.parametrize(
    "scenario",
    [
        "inference_restores_each_mode_and_logs_that_there_is_no_cuda",
        "changed_weights_are_measured_and_arguments_without_effect_are_rejected",
    ],
)
def test_on_the_cpu(process: TorchProcess, scenario: str) -> None:
    process.call_program(PROGRAM, scenario)


def test_on_a_device_bytes_and_peaks_equal_the_allocators(start_torch: StartTorch) -> None:
    process = start_torch(PYTORCH_CUDA_ALLOC_CONF=None)
    process.call_program(PROGRAM, "on_a_device_bytes_and_peaks_equal_the_allocators")
