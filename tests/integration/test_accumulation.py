"""Accumulated gradients against those of whole batches: the same steps, to floating-point tolerance."""

from __future__ import annotations

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
    with TorchProcess(None, {"OMP_NUM_THREADS": "1"}) as started:
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
    assert call(process, "of_another_size") == ["the loader gives micro batches of 2 samples, not of 4"]


def test_every_public_name_of_training_is_there(process: TorchProcess) -> None:
    code = "from gpumem_exporter import training\nresult = {n: getattr(training, n).__name__ for n in training.__all__}"
    named = process.exec(code)
    assert {"GradientAccumulator", "find_batch_size"} <= named.keys()
    assert all(name == its_own for name, its_own in named.items())


def test_wrong_use_is_told_what_would_be_right(process: TorchProcess) -> None:
    told = call(process, "refusals")
    assert told == {
        "uneven": "effective batch 100 is no multiple of 32 (micro batches of 32 on 1 rank); 96 or 128 would be",
        "small": "effective batch 16 is no multiple of 32 (micro batches of 32 on 1 rank); 32 would be",
        "none": "micro batch 0; it must be at least 1",
        "autocast": "autocast to torch.float64; torch.bfloat16, torch.float16 or None would be right",
        "clip": "clip norm 0.0; it must be above 0",
        "a part": (
            "clip norm: only parts of the model are FullyShardedDataParallel, and no rank knows the norm of all;"
            " wrap the model itself, or shard it by torch.distributed.fsdp.fully_shard"
        ),
        "clear": "clear the cache every 0 steps; it must be at least 1",
        "group": "a process group is given, but torch.distributed is not initialised",
        "backward": "backward() comes after the loss was computed under `with accumulator.forward():`",
        "samples": "a mean over 0.0 samples; there must be more than 0",
        "step": "the window of 2 micro batches is complete: call step() before the next forward()",
    }


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
