"""Accumulated gradients against those of whole batches, to floating-point tolerance."""

from __future__ import annotations

import pytest

from tests.emulation.torch_process import TorchProcess

PROGRAM = "accumulated_steps"
EVEN = [4] * 6
SHORT_END = [4, 4, 4, 4, 4, 4, 4, 3]
MIXED = [4, 1, 3, 2, 4, 4, 1]


@pytest.mark.parametrize("clip", [None, 0.05], ids=["not clipped", "clipped"])
@pytest.mark.parametrize(
    ("optimizer", "sizes", "left_out"),
    [("sgd", SHORT_END, []), ("adamw", MIXED, []), ("sgd", EVEN, [0, 5]), ("adamw", SHORT_END, [7])],
    ids=["short end", "mixed sizes", "first and last left out", "short one left out"],
)
def test_a_window_steps_like_one_batch_of_its_samples(
    process: TorchProcess, optimizer: str, clip: float | None, sizes: list[int], left_out: list[int]
) -> None:
    given = {"name": optimizer, "sizes": sizes, "clip": clip, "left_out": left_out}
    process.call_program(PROGRAM, "a_window_steps_like_one_batch_of_its_samples", **given)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_under_autocast_a_step_equals_accumulation_by_hand(process: TorchProcess, dtype: str) -> None:
    process.call_program(PROGRAM, "under_autocast_a_step_equals_accumulation_by_hand", dtype_name=dtype)


@pytest.mark.parametrize(
    "scenario",
    [
        "a_step_that_the_scaler_skips_is_counted_as_skipped",
        "errors_name_the_accepted_values",
        "a_failed_or_abandoned_window_does_not_affect_the_next",
        "every_public_name_can_be_imported",
    ],
)
def test_an_accumulator(process: TorchProcess, scenario: str) -> None:
    process.call_program(PROGRAM, scenario)
