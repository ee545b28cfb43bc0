"""A script that plans its own model, in another process, which imports the script. Runs in a process with torch."""

from __future__ import annotations

import gc
import os
import random
import sys
import threading
from typing import Any

import torch
from torch import nn

import gpumem_toolkit as toolkit
from gpumem_toolkit.planning.devices import parse_gpu
from gpumem_toolkit.planning.job import Job, parse_tensor
from gpumem_toolkit.planning.plan import Target
from gpumem_toolkit.planning.planner import plan_job


class Width:
    def __init__(self, width: int) -> None:
        self.width = width

    def make(self) -> nn.Module:
        return nn.Linear(self.width, self.width)


def state() -> dict[str, Any]:
    return {
        "collector": gc.isenabled(),
        "types": [torch.get_default_dtype(), torch.get_default_device()],
        "random": [torch.get_rng_state().tolist(), random.getstate()],
        "cuda": torch.cuda.is_initialized(),
        "environment": dict(os.environ),
        "path": list(sys.path),
        "threads": threading.active_count(),
    }


def a_plan_changes_nothing_and_equals_a_plan_in_the_process_of_the_caller() -> None:
    torch.set_default_dtype(torch.float64)  # the worker uses it, too
    before, make = state(), Width(16).make
    planned = toolkit.plan(make, "float64[B,16]", "2GiB", optimizer="sgd", changes=False)
    assert state() == before
    assert planned.breakdown["parameters"] == 8 * (16 * 16 + 16)
    job = Job(make, [parse_tensor("float64[B,16]")], optimizer="sgd")
    assert plan_job(job, parse_gpu("2GiB"), Target(), changes=False) == planned


if __name__ == "__main__":
    a_plan_changes_nothing_and_equals_a_plan_in_the_process_of_the_caller()
