"""A notebook's kernel that calls `start()`, and the ranks that accelerate forks from it."""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Iterator
from typing import Any

import pytest
from IPython.core.formatters import DisplayFormatter

import gpumem_client as client
import gpumem_toolkit as toolkit
from gpumem_client.summary import Summary
from gpumem_toolkit.leaks.live_tensors import LingeringTensors, TensorGroup
from gpumem_toolkit.oom.diagnosis import OomDiagnosis
from gpumem_toolkit.oom.values import OomValues
from gpumem_toolkit.planning.devices import parse_gpu
from gpumem_toolkit.planning.plan import Plan
from tests.support.library_programs import PYTHON, StartLibrary
from tests.support.torch_release import since_torch


@since_torch((2, 10), "torch 2.9 initializes CUDA before its launcher forks the ranks")
def test_ranks_that_a_kernel_forks_report_and_later_the_kernel_itself(start_library: StartLibrary) -> None:
    program = start_library(PYTHON, "notebook.py", run=False)
    ranks = program.compare("notebook-alice", rank=2)["rank"]
    assert [(made.rank, made.world_size) for made in ranks] == [(0, 2), (1, 2)]
    (kernel,) = program.compare("notebook-alice", kernel=1)["kernel"]
    assert kernel.pid not in [made.pid for made in ranks]
    program.end()


PLAN = Plan("model", parse_gpu("80GiB"), 0.85, 12, 8, 2, 16, 1, 5 << 30, 6 << 30, {"parameters": 1 << 30})


@pytest.mark.parametrize(
    "result",
    [
        Summary(reason="no <CUDA>"),
        LingeringTensors((TensorGroup((2, 3), "float32", 0, 1, 24, referrers=("list of 1 in <locals>",)),)),
        OomDiagnosis(OomValues(phase="forward", requested=1 << 30), ()),
        PLAN,
        dataclasses.replace(PLAN, largest_batch=0),
    ],
    ids=lambda result: type(result).__name__,
)
def test_a_notebook_shows_the_text_of_a_result(result: Any) -> None:
    shown, _ = DisplayFormatter().format(result)
    assert shown["text/plain"] == str(result)
    assert shown["text/html"].startswith("<pre>")
    assert "<CUDA>" not in shown["text/html"]
    assert "Plan(" not in str(result)


def results() -> Iterator[type]:
    """The classes of what the public functions of the client and of the toolkit return."""
    for package in (client, toolkit):
        for name in package.__all__:
            public = getattr(package, name)
            named = vars(sys.modules[public.__module__]).get(public.__annotations__.get("return"))
            returned = public if isinstance(public, type) else named
            if isinstance(returned, type) and returned.__module__.startswith(("gpumem_client", "gpumem_toolkit")):
                yield returned


def test_each_result_that_prints_as_text_is_shown_as_text() -> None:
    with_text = {kind for kind in results() if "__str__" in vars(kind)}
    assert {kind.__name__ for kind in with_text} >= {"Summary", "LingeringTensors", "DeepClean", "Milestones", "Plan"}
    assert [kind.__name__ for kind in with_text if not hasattr(kind, "_repr_html_")] == []
