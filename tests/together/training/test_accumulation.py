"""Accumulated gradients against those of whole batches, to floating-point tolerance."""

from __future__ import annotations

import re
from typing import Any

import pytest

from tests.emulation.fixtures import StartTorch
from tests.emulation.torch_process import TorchProcess

EVEN = [4] * 6
SHORT_END = [4, 4, 4, 4, 4, 4, 4, 3]
MIXED = [4, 1, 3, 2, 4, 4, 1]


def call(process: TorchProcess, function: str, **given: Any) -> Any:
    return process.call_program("accumulated_steps", function, **given)


@pytest.mark.parametrize("clip", [None, 0.05], ids=["not clipped", "clipped"])
@pytest.mark.parametrize(
    ("optimizer", "sizes", "left_out", "steps"),
    [
        ("sgd", SHORT_END, [], 9),
        ("adamw", MIXED, [], 9),
        ("sgd", EVEN, [0, 5], 6),
        ("adamw", SHORT_END, [7], 9),
    ],
    ids=["short end", "mixed sizes", "first and last left out", "short one left out"],
)
def test_a_window_steps_like_one_batch_of_its_samples(
    process: TorchProcess, optimizer: str, clip: float | None, sizes: list[int], left_out: list[int], steps: int
) -> None:
    results = call(process, "against_whole", name=optimizer, sizes=sizes, clip=clip, left_out=left_out)
    assert results["difference"] < 1e-12 < 1e-3 < results["moved"]
    assert results["norms"] < 1e-12
    assert results["clipped"] is (clip is not None), "some gradients must be clipped"
    assert results["steps"] == [steps, steps, steps], "made, expected, and seen by the reporter's hook"
    assert results["gradients_left"] == 0


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_under_autocast_a_step_equals_accumulation_by_hand(process: TorchProcess, dtype: str) -> None:
    results = call(process, "in_low_precision", dtype_name=dtype)
    assert results["steps"] == 2
    assert results["difference"] == 0 < 1e-3 < results["moved"]


def test_a_step_that_the_scaler_skips_is_counted_as_skipped(process: TorchProcess) -> None:
    results = call(process, "overflowing")
    assert results["stepped"] == results["moved"] == [False] * 5 + [True, False, True]
    assert results["counted"] == [2, 2, 2]
    assert results["scaled_by_default"] == 65536.0


def test_batches_of_another_size_cause_one_warning(process: TorchProcess) -> None:
    (line,) = call(process, "of_another_size")
    assert re.search(r"\b2\b.*\b4\b", line)


def test_every_public_name_of_training_can_be_imported(process: TorchProcess) -> None:
    code = "import gpumem_toolkit as toolkit\nresult = {n: getattr(toolkit, n).__name__ for n in toolkit.__all__}"
    named = process.exec(code)
    assert {"GradientAccumulator", "find_batch_size"} <= named.keys()
    assert all(name == its_own for name, its_own in named.items())


def test_errors_name_the_accepted_values(process: TorchProcess) -> None:
    results = call(process, "refusals")
    expected = {
        "uneven": r"effective batch.*\b100\b.*\b32\b.*micro batch.*\b32\b.*\b1 rank.*\b96\b.*\b128\b",
        "autocast": r"autocast.*torch\.float64.*torch\.bfloat16.*torch\.float16.*None",
        "clip": r"clip norm.*\b0\.0\b.*\b0\b",
        "a part": r"clip norm.*FullyShardedDataParallel.*torch\.distributed\.fsdp\.fully_shard",
        "backward": r"backward\(\).*accumulator\.forward\(\)",
        "samples": r"\b0\.0 samples\b.*\b0\b",
        "step": r"\b2\b.*step\(\).*forward\(\)",
    }
    assert results.keys() == expected.keys()
    assert [text for name, text in results.items() if not re.search(expected[name], text)] == []


def test_a_failed_or_abandoned_window_does_not_affect_the_next(process: TorchProcess) -> None:
    results = call(process, "interrupted")
    assert results["caught"] == ["KeyError", "MemoryError"]
    assert results["after_failures"] < 1e-12
    assert results["after_a_break"] < 1e-12


def test_accumulation_clears_the_cache_at_its_interval(start_torch: StartTorch) -> None:
    results = call(start_torch(PYTORCH_CUDA_ALLOC_CONF=None), "on_device")
    assert results["steps"] == 2
    assert results["freed"] == results["by_torch"] > 0
