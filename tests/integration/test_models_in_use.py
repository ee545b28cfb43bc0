"""Running a model for its outputs, and changing its weights: what is done, what is left alone, what is told of it."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import pytest

from tests.emulation.fixtures import StartTorch
from tests.emulation.torch_process import TorchProcess

MIB = 1 << 20


@pytest.fixture(scope="module")
def process() -> Iterator[TorchProcess]:
    """One without any driver."""
    with TorchProcess(None, {"OMP_NUM_THREADS": "1"}) as started:
        yield started


def call(process: TorchProcess, function: str) -> Any:
    return process.exec(
        f"from tests.programs import models_in_use\nresult = models_in_use.{function}()", timeout_seconds=110
    )


def test_inference_leaves_each_part_in_its_mode_and_says_that_there_is_no_cuda(process: TorchProcess) -> None:
    told = call(process, "inference")
    assert told["modes within"] == [False] * 6
    assert told["modes after"] is True
    assert told["dtypes"] == ["torch.bfloat16", "torch.float32"]
    assert told["inference"] == [True, True]
    assert told["gradients"] is True
    assert told["devices"] == []
    assert len(told["lines"]) == 4
    assert all(re.search(r"\bSequential\b.*\bno CUDA\b", line) for line in told["lines"])
    assert re.search(r"^ConfigurationError\b.*torch\.int8\b.*torch\.bfloat16\b.*torch\.float16\b", told["autocast"])
    assert told["generator"].startswith("TypeError")


def test_changed_weights_are_measured_and_what_would_change_nothing_is_refused(process: TorchProcess) -> None:
    told = call(process, "optimizing")
    before, after = told["weights"]
    assert before - after == (before - 8) // 2, "but for the norm's count of batches, an integer of 8 bytes"
    assert told["allocated"] == told["peaks"] == [None, None]
    assert "no CUDA" in told["text"]
    assert 0 < told["difference"] < 0.1
    assert f" {told['difference']:.2g} " in told["text"]
    assert told["dtypes"] == ["torch.bfloat16"]
    assert [name for name in ("logged", "layout", "optimizer", "modes", "statistics") if not told[name]] == []
    expected = {
        "nothing": ("dtype=", "channels_last="),
        "the same dtype": ("torch.bfloat16", "Sequential"),
        "integers": ("torch.int8", "torch.bfloat16"),
        "the same layout": ("channels_last", "Sequential"),
        "reset without example": ("reset_peaks", "example"),
        "no convolution": ("channels_last",),
        "no parameters": ("ReLU",),
    }
    assert told["refused"].keys() == expected.keys()
    for name, parts in expected.items():
        refusal = told["refused"][name]
        assert refusal.startswith("ConfigurationError: ")
        assert [part for part in parts if part not in refusal] == []


def test_an_output_that_is_and_stays_zero_does_not_differ(process: TorchProcess) -> None:
    assert 0 < call(process, "optimizing_zeros")["difference"] < 0.1


def test_on_a_device_the_bytes_and_peaks_are_the_allocators(start_torch: StartTorch) -> None:
    told = call(start_torch(PYTORCH_CUDA_ALLOC_CONF=None), "on_device")
    before, after, peak, exact = told["inference"]
    assert (before, exact) == (after, True)
    assert peak - before >= 2 * 4 * MIB, "the outputs of two layers at once"
    assert len(told["lines"]) == 1
    assert re.search(r"\bSequential\b.*\bcuda:0\b", told["lines"][0])
    assert told["weights"] == [16 * MIB, 8 * MIB]
    assert told["fell"] == told["told fell"] == 8 * MIB
    assert told["exact"] == [True, True]
    assert told["peaks"][0] - told["peaks"][1] == 4 * MIB, "half of two layers' outputs"
    assert "allocated" in told["text"]
