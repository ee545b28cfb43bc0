"""Accumulation and the search for a batch size on two ranks, by gloo, each with its emulated device."""

from __future__ import annotations

import re
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
    code = "from tests.programs import training_ranks\nresult = training_ranks.run(rank, store)"
    numbers = [
        process.send("exec", code=code, rank=rank, store=str(tmp_path / "store"))
        for rank, process in enumerate(processes)
    ]
    ranks = [process.receive(number, 200) for process, number in zip(processes, numbers, strict=True)]

    rounding = 1e-12 if torch_release() >= (2, 10) else 1e-6  # FSDP2 of torch 2.9 rounds to single precision
    for rank in ranks:
        results = rank["accumulation"]
        assert results["clipped"] == [True, True], "some steps and not others"
        for name, averaged in (("ddp", 6), ("ddp every batch", 10), ("fsdp", 6)):
            assert results[name]["averaged"] == averaged, f"{name}: once for each step, unless configured otherwise"
            assert results[name]["steps"] == 6, name
            assert results[name]["difference"] < rounding, f"{name}: an abandoned window does not affect the first one"
            assert results[name]["norms"] < rounding, name
        kind, text, _ = rank["misuse"]["left out"]
        assert kind == "RuntimeError"
        assert re.search(r"forward\(\).*backward\(\)", text)
        kind, text, _ = rank["misuse"]["uneven"]
        assert kind == "ConfigurationError"
        assert re.search(r"\b12\b.*\b8\b.*\b4 on 2 ranks\b.*\b8\b.*\b16\b", text)

    small, large = (rank["search"] for rank in ranks)
    assert small["together"] == large["together"] == small["apart"] < large["apart"]
    assert small["fits"] == large["fits"]
    assert 0 in small["out_of_memory"] == large["out_of_memory"]
    assert large["failed"][:2] == ["ValueError", "no such sample"]
    kind, text, failed_ranks = small["failed"]
    assert (kind, failed_ranks) == ("RankFailedError", [1])
    assert re.search(r"\b8192\b.*\brank 1\b", text)
    for rank in (small, large):
        kind, text, _ = rank["unlike"]
        assert kind == "ConfigurationError"
        assert re.search(r"\bstart\b.*\b4096 on rank 0\b.*\b4097 on rank 1\b", text)
        kind, text, _ = rank["foreign"]
        assert kind == "ConfigurationError"
        assert "process group" in text
        assert rank["still together"] == rank["together"]
