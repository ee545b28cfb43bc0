"""A notebook's kernel that calls `start()`, and the ranks that accelerate forks from it."""

from __future__ import annotations

from tests.support.injected_scripts import exporter
from tests.support.library_programs import PYTHON, StartLibrary, start_library
from tests.support.torch_release import since_torch

__all__ = ["exporter", "start_library"]


@since_torch((2, 10), "torch 2.9 initializes CUDA before its launcher forks the ranks")
def test_ranks_that_a_kernel_forks_report_and_later_the_kernel_itself(start_library: StartLibrary) -> None:
    program = start_library(PYTHON, "notebook.py", run=False)
    ranks = program.compare("notebook-alice", rank=2)["rank"]
    assert [(made.rank, made.world_size) for made in ranks] == [(0, 2), (1, 2)]
    (kernel,) = program.compare("notebook-alice", kernel=1)["kernel"]
    assert kernel.pid not in [made.pid for made in ranks]
    program.end()
