"""Pools of processes: the workers use CUDA and report, their parent does not."""

from __future__ import annotations

import signal

from tests.support.injected_scripts import exporter
from tests.support.library_programs import PYTHON, StartLibrary, start_library

__all__ = ["exporter", "start_library"]


def test_workers_of_loky_report_and_their_parent_does_not(start_library: StartLibrary) -> None:
    program = start_library(PYTHON, "loky_pool.py")
    program.compare(parent=1, worker=2)
    program.end()


def test_processes_of_celery_s_pool_report_and_their_parent_does_not(start_library: StartLibrary) -> None:
    program = start_library(PYTHON, "-m", "celery", "--app", "celery_tasks", "worker", "--concurrency", "2")
    program.compare(parent=1, worker=2)
    program.end(signal.SIGTERM)
