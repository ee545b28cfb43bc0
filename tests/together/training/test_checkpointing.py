"""Comparisons of checkpointing: they measure, change nothing, and report different results."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.emulation.node import EmulatedNode
from tests.emulation.torch_process import TorchProcess

PROGRAM = "checkpointed_steps"


@pytest.fixture(scope="module")
def process(tmp_path_factory: pytest.TempPathFactory, emulation: Path) -> Iterator[TorchProcess]:
    node = EmulatedNode(tmp_path_factory.mktemp("node") / "node")
    with contextlib.closing(node), TorchProcess(node, {"PYTORCH_CUDA_ALLOC_CONF": None}) as started:
        started.exec("torch.set_num_threads(1)")
        yield started


@pytest.mark.parametrize(
    "scenario",
    [
        "the_longest_list_of_blocks_of_one_class_is_recomputed_and_without_cuda_no_peak_is_known",
        "an_allocation_failure_of_a_library_counts_as_out_of_memory",
        "results_that_differ_are_named",
        "blocks_selections_and_batches_can_be_chosen",
        "errors_name_the_accepted_values",
        "peaks_are_of_the_step_alone_and_fall_with_more_checkpoints",
        "a_variant_that_runs_out_of_memory_is_reported_and_the_others_are_measured",
    ],
)
def test_a_comparison(process: TorchProcess, scenario: str) -> None:
    process.call_program(PROGRAM, scenario)


@pytest.mark.parametrize("failing", [False, True], ids=["over", "failed on its way"])
def test_a_comparison_changes_nothing(process: TorchProcess, failing: bool) -> None:
    process.call_program(PROGRAM, "a_comparison_changes_nothing", failing=failing)
