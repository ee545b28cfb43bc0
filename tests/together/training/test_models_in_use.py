"""Inference and optimized models: their changes and the measurements."""

from __future__ import annotations

import re
from typing import Any

from tests.emulation.fixtures import StartTorch
from tests.emulation.torch_process import TorchProcess

MIB = 1 << 20


def call(process: TorchProcess, function: str, **given: Any) -> Any:
    return process.call_program("models_in_use", function, **given)


def test_inference_restores_each_mode_and_logs_that_there_is_no_cuda(process: TorchProcess) -> None:
    results = call(process, "inference")
    assert results["modes within"] == [False] * 6
    assert results["modes after"] is True
    assert results["dtypes"] == ["torch.bfloat16", "torch.float32"]
    assert results["inference"] == [True, True]
    assert results["gradients"] is True
    assert results["devices"] == []
    assert len(results["lines"]) == 4
    assert all(re.search(r"\bSequential\b.*\bno CUDA\b", line) for line in results["lines"])
    assert re.search(r"^ConfigurationError\b.*torch\.int8\b.*torch\.bfloat16\b.*torch\.float16\b", results["autocast"])
    assert results["generator"].startswith("TypeError")


def test_changed_weights_are_measured_and_arguments_without_effect_are_rejected(process: TorchProcess) -> None:
    results = call(process, "optimizing")
    before, after = results["weights"]
    assert before - after == (before - 8) // 2, "except the norm's count of batches, an integer of 8 bytes"
    assert results["allocated"] == results["peaks"] == [None, None]
    assert "no CUDA" in results["text"]
    assert 0 < results["difference"] < 0.1
    assert results["dtypes"] == ["torch.bfloat16"]
    assert [name for name in ("logged", "layout", "optimizer", "modes", "statistics") if not results[name]] == []
    expected = {
        "nothing": ("dtype=", "channels_last="),
        "the same dtype": ("torch.bfloat16", "Sequential"),
        "integers": ("torch.int8", "torch.bfloat16"),
        "reset without example": ("reset_peaks", "example"),
        "no convolution": ("channels_last",),
    }
    assert results["refused"].keys() == expected.keys()
    for name, parts in expected.items():
        refusal = results["refused"][name]
        assert refusal.startswith("ConfigurationError: ")
        assert [part for part in parts if part not in refusal] == []


def test_an_output_that_stays_zero_does_not_differ(process: TorchProcess) -> None:
    assert 0 < call(process, "optimizing_zeros") < 0.1


def test_on_a_device_bytes_and_peaks_equal_the_allocators(start_torch: StartTorch) -> None:
    results = call(start_torch(PYTORCH_CUDA_ALLOC_CONF=None), "on_device")
    before, after, peak, exact = results["inference"]
    assert (before, exact) == (after, True)
    assert peak - before >= 2 * 4 * MIB, "the outputs of two layers at once"
    assert len(results["lines"]) == 1
    assert re.search(r"\bSequential\b.*\bcuda:0\b", results["lines"][0])
    assert results["weights"] == [16 * MIB, 8 * MIB]
    assert results["fell"] == results["measured fell"] == 8 * MIB
    assert results["kept"] is True
    in_full, in_half, after_a_reset = results["peaks"]
    assert in_full - in_half == 4 * MIB, "half of two layers' outputs"
    assert in_half == after_a_reset
