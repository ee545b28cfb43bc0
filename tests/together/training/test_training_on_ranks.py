"""The search for a batch size on two ranks, by gloo, each with its emulated device."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.emulation.fixtures import MakeNode, StartTorch

GIB = 1 << 30


@pytest.mark.slow
def test_two_ranks_agree_on_the_smaller_batch_size(
    make_node: MakeNode, start_torch: StartTorch, tmp_path: Path
) -> None:
    node = make_node(total_bytes=[2 * GIB, 3 * GIB])
    processes = [start_torch(node) for _ in range(2)]
    code = "from tests.programs import training_ranks\nresult = training_ranks.run(rank, store)"
    numbers = [
        process.send("exec", code=code, rank=rank, store=str(tmp_path / "store"))
        for rank, process in enumerate(processes)
    ]
    small, large = (process.receive(number, 200) for process, number in zip(processes, numbers, strict=True))
    assert small["alike"] == large["alike"]
    assert small["together"] == small["apart"] < large["apart"]
    assert 0 in small["out of memory"]
