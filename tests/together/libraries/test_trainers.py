"""Trainers of widely used libraries: pids, ranks and bytes of each process, and the same losses."""

from __future__ import annotations

from tests.emulation.node import EmulatedNode
from tests.support.library_programs import PYTHON, StartLibrary


def test_the_trainer_of_transformers(start_library: StartLibrary, node: EmulatedNode) -> None:
    program = start_library(PYTHON, "transformers_trainer.py", CUDA_VISIBLE_DEVICES="1")
    (trainer,) = program.compare(trainer=1)["trainer"]
    assert trainer.devices.keys() == {node.uuid(1)}
    before, after = trainer.more["losses"]
    assert len(before) == 4
    assert before == after
    owners = {row["owner"]: row["kind"] for row in program.profiles[trainer.pid]["rows"]}
    assert owners["transformer.h.0.attn.c_attn.weight"] == "parameters"
    assert owners["AdamW.exp_avg transformer.h.0.attn.c_attn.weight"] == "optimizer_state"
    program.end()


def test_ranks_that_lightning_starts(start_library: StartLibrary, node: EmulatedNode) -> None:
    program = start_library(PYTHON, "lightning_trainer.py")
    ranks = program.compare(rank=2)["rank"]
    assert [(made.rank, made.world_size) for made in ranks] == [(0, 2), (1, 2)]
    for made in ranks:
        assert made.devices[node.uuid(made.more["local_rank"])][0] > 0
        before, after = made.more["losses"]
        assert len(before) == 8
        assert before == after
    program.end()
