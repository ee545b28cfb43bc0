"""Accumulation and the search for a batch size on two ranks, by gloo, each with its emulated device."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.emulation.fixtures import MakeNode, StartTorch
from tests.support.torch_release import torch_release

GIB = 1 << 30


@pytest.mark.slow
def test_two_ranks_step_like_one_batch_and_agree_on_the_smaller_batch_size(
    make_node: MakeNode, start_torch: StartTorch, tmp_path: Path
) -> None:
    node = make_node(total_bytes=[2 * GIB, 3 * GIB])
    processes = [start_torch(node) for _ in range(2)]
    code = "from tests.programs import training_ranks\nresult = training_ranks.run(rank, store, rounding)"
    rounding = 1e-12 if torch_release() >= (2, 10) else 1e-6  # FSDP2 of torch 2.9 rounds to single precision
    numbers = [
        process.send("exec", code=code, rank=rank, store=str(tmp_path / "store"), rounding=rounding)
        for rank, process in enumerate(processes)
    ]
    small, large = (process.receive(number, 200) for process, number in zip(processes, numbers, strict=True))
    assert small["alike"] == large["alike"]
    assert small["together"] == small["apart"] < large["apart"]
    assert 0 in small["out of memory"]
