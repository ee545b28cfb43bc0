"""A job whose plans are made in another process. The functions run in a process with torch."""

from __future__ import annotations

import gc
import os
import random
import sys
import threading
from typing import Any

import pytest
import torch
from torch import nn

import gpumem_toolkit as toolkit
from gpumem_client.wire.errors import ConfigurationError
from gpumem_toolkit.planning.devices import parse_gpu
from gpumem_toolkit.planning.job import Job, parse_tensor
from gpumem_toolkit.planning.plan import Target
from gpumem_toolkit.planning.planner import plan_job


def make() -> nn.Module:
    return nn.Linear(16, 16)


def broken() -> nn.Module:
    raise LookupError("no weights here")


def killed() -> None:
    os.kill(os.getpid(), 9)


def plan(make_model: Any) -> toolkit.Plan:
    return toolkit.plan(make_model, "float64[B,16]", "2GiB", optimizer="sgd", changes=False)


def state() -> dict[str, Any]:
    x = torch.ones(2, dtype=torch.bfloat16)
    with torch.autocast("cpu", torch.bfloat16):
        softmax = torch.softmax(x, 0).dtype
    keys = "AutocastCPU", "AutogradCPU"
    return {
        "collector": gc.isenabled(),
        "kernels": [sorted(torch._C._dispatch_get_registrations_for_dispatch_key(key)) for key in keys],
        "types": [softmax, torch.get_default_dtype(), torch.get_default_device()],
        "random": [torch.get_rng_state().tolist(), random.getstate()],
        "cuda": torch.cuda.is_initialized(),
        "environment": dict(os.environ),
        "path": list(sys.path),
        "threads": threading.active_count(),
    }


def a_plan_changes_nothing_and_equals_a_plan_in_the_process_of_the_caller() -> None:
    torch.set_default_dtype(torch.float64)  # the worker uses it, too
    before = state()
    planned = plan(make)
    assert state() == before
    assert planned.breakdown["parameters"] == 8 * (16 * 16 + 16)
    job = Job(make, [parse_tensor("float64[B,16]")], optimizer="sgd")
    assert plan_job(job, parse_gpu("2GiB"), Target(), changes=False) == planned


def errors_of_the_model_have_the_traceback_of_the_worker() -> None:
    with pytest.raises(ConfigurationError, match="LookupError: no weights here") as failed:
        plan(broken)
    assert f'plan_in_a_worker.py", line {broken.__code__.co_firstlineno + 1}, in broken' in str(failed.value.__cause__)
    with pytest.raises(ConfigurationError, match="SIGKILL"):
        plan(killed)


def closures_are_passed_on_by_cloudpickle() -> None:
    torch.set_default_dtype(torch.float32)
    width = 16
    assert plan(lambda: nn.Linear(width, width)).breakdown["parameters"] == 4 * (16 * 16 + 16)
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(sys.modules, "cloudpickle", None)  # as if it were not installed
        with pytest.raises(ConfigurationError, match="cloudpickle"):
            plan(lambda: None)
