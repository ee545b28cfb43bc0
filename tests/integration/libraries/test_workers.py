"""Worker processes of torch, joblib and celery: those that use CUDA report, the others do not."""

from __future__ import annotations

import signal

from tests.support.injected_scripts import exporter
from tests.support.library_programs import PYTHON, StartLibrary, start_library

__all__ = ["exporter", "start_library"]


def test_workers_of_data_loaders_do_not_report_and_spawned_ranks_do(start_library: StartLibrary) -> None:
    program = start_library(PYTHON, "torch_workers.py")
    (trainer,) = program.compare(trainer=1, forked=2, spawned=1)["trainer"]
    assert trainer.more["batches"] == [2] * 8
    ranks = program.compare(main=1, rank=2)["rank"]
    assert [(made.rank, made.world_size) for made in ranks] == [(0, 2), (1, 2)]
    program.end()


def test_workers_of_loky_report_and_their_parent_does_not(start_library: StartLibrary) -> None:
    program = start_library(PYTHON, "loky_pool.py")
    program.compare(parent=1, worker=2)
    program.end()


def test_processes_of_celery_s_pool_report_and_their_parent_does_not(start_library: StartLibrary) -> None:
    program = start_library(PYTHON, "-m", "celery", "--app", "celery_tasks", "worker", "--concurrency", "2")
    program.compare(parent=1, worker=2)
    program.end(signal.SIGTERM)
