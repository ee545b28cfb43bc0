"""Processes of torch.utils.data and torch.multiprocessing: those that use CUDA report, the others do not."""

from __future__ import annotations

from tests.support.library_programs import PYTHON, StartLibrary


def test_workers_of_data_loaders_do_not_report_and_spawned_ranks_do(start_library: StartLibrary) -> None:
    program = start_library(PYTHON, "torch_workers.py")
    (trainer,) = program.compare(trainer=1, forked=2, spawned=1)["trainer"]
    assert trainer.more["batches"] == [2] * 8
    ranks = program.compare(main=1, rank=2)["rank"]
    assert [(made.rank, made.world_size) for made in ranks] == [(0, 2), (1, 2)]
    program.end()
