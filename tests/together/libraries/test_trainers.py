"""The trainer of transformers: pid, bytes and owners, and the same losses before and after."""

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
