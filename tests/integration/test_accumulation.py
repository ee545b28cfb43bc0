"""Accumulated gradients against those of whole batches: the same steps, to floating-point tolerance."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import pytest

from tests.emulation.fixtures import StartTorch
from tests.emulation.torch_process import TorchProcess

EVEN = [4] * 6
SHORT_END = [4, 4, 4, 4, 4, 4, 4, 3]
MIXED = [4, 1, 3, 2, 4, 4, 1]


@pytest.fixture(scope="module")
def process() -> Iterator[TorchProcess]:
    """One without any driver, for what needs the CPU alone."""
    with TorchProcess(None) as started:
        started.exec("torch.set_num_threads(1)")
        yield started


def call(process: TorchProcess, function: str, **arguments: Any) -> Any:
    code = f"from tests.programs import accumulated_steps\nresult = accumulated_steps.{function}(**given)"
    return process.exec(code, given=arguments)


@pytest.mark.parametrize("optimizer", ["sgd", "adamw"])
@pytest.mark.parametrize("clip", [None, 0.05], ids=["not clipped", "clipped"])
@pytest.mark.parametrize(
    ("sizes", "left_out", "steps"),
    [(EVEN, [], 6), (SHORT_END, [], 9), (MIXED, [], 9), (EVEN, [0, 5], 6), (SHORT_END, [7], 9)],
    ids=["even", "short end", "mixed sizes", "first and last left out", "short one left out"],
)
def test_windows_step_as_their_samples_at_once_would(
    process: TorchProcess, optimizer: str, clip: float | None, sizes: list[int], left_out: list[int], steps: int
) -> None:
    told = call(process, "against_whole", name=optimizer, sizes=sizes, clip=clip, left_out=left_out)
    assert told["difference"] < 1e-12 < 1e-3 < told["moved"]
    assert told["norms"] < 1e-12
    assert told["clipped"] is (clip is not None), "the clip must have had something to do"
    assert told["steps"] == [steps, steps, steps], "made, expected, and heard of by the reporter's hook"
    assert told["gradients_left"] == 0


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_under_autocast_a_step_is_that_of_the_same_passes_by_hand(process: TorchProcess, dtype: str) -> None:
    told = call(process, "in_low_precision", dtype_name=dtype)
    assert told["steps"] == 2
    assert told["difference"] == 0 < 1e-3 < told["moved"]


def test_a_step_that_the_scaler_skips_is_told_and_counted_as_skipped(process: TorchProcess) -> None:
    told = call(process, "overflowing")
    assert told["stepped"] == told["moved"] == [False] * 5 + [True, False, True]
    assert told["counted"] == [2, 2, 2]
    assert told["scaled_by_default"] == 65536.0


def test_a_loop_that_is_still_held_changes_nothing_in_the_next(process: TorchProcess) -> None:
    assert call(process, "held_loops") == [False, True, False, True, True]


def test_batches_of_another_size_than_was_reckoned_with_are_told_once(process: TorchProcess) -> None:
    (line,) = call(process, "of_another_size")
    assert re.search(r"\b2\b.*\b4\b", line)


def test_every_public_name_of_training_is_there(process: TorchProcess) -> None:
    code = "from gpumem_exporter import training\nresult = {n: getattr(training, n).__name__ for n in training.__all__}"
    named = process.exec(code)
    assert {"GradientAccumulator", "find_batch_size"} <= named.keys()
    assert all(name == its_own for name, its_own in named.items())


def test_wrong_use_is_told_what_would_be_right(process: TorchProcess) -> None:
    told = call(process, "refusals")
    expected = {
        "uneven": r"effective batch.*\b100\b.*\b32\b.*micro batch.*\b32\b.*\b1 rank.*\b96\b.*\b128\b",
        "small": r"effective batch.*\b16\b.*\b32\b.*micro batch.*\b32\b.*\b1 rank.*\b32\b",
        "none": r"micro batch.*\b0\b.*\b1\b",
        "autocast": r"autocast.*torch\.float64.*torch\.bfloat16.*torch\.float16.*None",
        "clip": r"clip norm.*\b0\.0\b.*\b0\b",
        "a part": r"clip norm.*FullyShardedDataParallel.*torch\.distributed\.fsdp\.fully_shard",
        "clear": r"clear_cache_every.*\b0\b.*\b1\b",
        "group": r"process group.*torch\.distributed",
        "backward": r"backward\(\).*accumulator\.forward\(\)",
        "samples": r"\b0\.0 samples\b.*\b0\b",
        "step": r"\b2\b.*step\(\).*forward\(\)",
    }
    assert told.keys() == expected.keys()
    assert [text for name, text in told.items() if not re.search(expected[name], text)] == []


def test_a_window_that_fails_or_is_left_leaves_nothing_in_the_next(process: TorchProcess) -> None:
    told = call(process, "interrupted")
    assert told["caught"] == ["KeyError", "MemoryError"]
    assert told["after_failures"] < 1e-12
    assert told["after_a_break"] < 1e-12


def test_accumulating_takes_less_memory_than_the_batch_at_once_and_clears_by_interval(start_torch: StartTorch) -> None:
    told = call(start_torch(PYTORCH_CUDA_ALLOC_CONF=None), "on_device")
    assert told["accumulated"] < told["at_once"] / 2
    assert told["steps"] == 2
    assert told["freed"] == told["by_driver"] > 0
