"""Accumulation and the search for a batch size on two ranks below torchrun, by gloo, each with its emulated device."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from tests.emulation.fixtures import MakeNode
from tests.support.paths import REPOSITORY

GIB = 1 << 30


@pytest.mark.timeout(400)
def test_two_ranks_step_as_all_their_samples_at_once_would_and_agree_on_the_smaller_batch_size(
    make_node: MakeNode,
) -> None:
    node = make_node(total_bytes=[2 * GIB, 3 * GIB])
    done = subprocess.run(
        [
            *(sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"),
            *("-m", "tests.programs.training_ranks"),
        ],
        env=node.environment(PYTHONPATH=str(REPOSITORY), OMP_NUM_THREADS="1", GLOO_SOCKET_IFNAME="lo"),
        capture_output=True,
        text=True,
        cwd=REPOSITORY,
        timeout=380,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-8000:]
    ranks = sorted(
        (json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")), key=lambda rank: rank["rank"]
    )
    assert [rank["rank"] for rank in ranks] == [0, 1]

    for rank in ranks:
        told = rank["accumulation"]
        assert told["clipped"] == [True, True], "some steps and not others"
        for name, averaged in (("ddp", 6), ("ddp every batch", 10), ("fsdp", 6)):
            assert told[name]["averaged"] == averaged, f"{name}: once for each step, unless asked otherwise"
            assert told[name]["steps"] == 6, name
            assert told[name]["difference"] < 1e-12, f"{name}: and nothing of a window that was left is in the first"
            assert told[name]["norms"] < 1e-12, name
        kind, text, _ = rank["misuse"]["left out"]
        assert (kind, text.endswith("every batch needs its forward() and backward()")) == ("RuntimeError", True)
        assert rank["misuse"]["uneven"][1] == (
            "effective batch 12 is no multiple of 8 (micro batches of 4 on 2 ranks); 8 or 16 would be"
        )
        assert rank["misuse"]["alone"] == 3

    small, large = (rank["search"] for rank in ranks)
    assert small["together"] == large["together"] == small["apart"] < large["apart"]
    assert small["fits"] == large["fits"]
    assert 0 in small["out_of_memory"] == large["out_of_memory"]
    assert large["failed"][:2] == ["ValueError", "no such sample"]
    assert small["failed"] == [
        "RankFailedError",
        "the step of a batch of 8192 has failed on rank 1; the error there says why",
        [1],
    ]
    for rank in (small, large):
        kind, text, _ = rank["unlike"]
        assert (kind, "start is 4096 on rank 0, 4097 on rank 1" in text) == ("ConfigurationError", True)
        assert "does not belong to the process group" in rank["foreign"][1]
        assert rank["still together"] == rank["together"]
