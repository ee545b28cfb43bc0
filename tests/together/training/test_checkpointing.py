"""Comparisons of checkpointing: they measure, change nothing, and report different results."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.emulation.node import EmulatedNode
from tests.emulation.torch_process import TorchProcess
from tests.support.torch_release import torch_release

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
        "a_model_in_evaluation_mode_is_simulated_in_training_mode",
        "an_allocation_failure_of_a_library_counts_as_out_of_memory",
        "results_that_differ_are_named",
        "blocks_selections_and_batches_can_be_chosen",
        "errors_name_the_accepted_values",
        "a_variant_that_runs_out_of_memory_is_reported_and_the_others_are_measured",
    ],
)
def test_a_comparison(process: TorchProcess, scenario: str) -> None:
    process.call_program(PROGRAM, scenario)


@pytest.mark.parametrize("failing", [False, True], ids=["over", "failed on its way"])
def test_a_comparison_changes_nothing(process: TorchProcess, failing: bool) -> None:
    process.call_program(PROGRAM, "a_comparison_changes_nothing", failing=failing)


def test_a_figure_has_times_and_peaks_and_without_matplotlib_the_package_is_named(
    process: TorchProcess, tmp_path: Path
) -> None:
    scenario = "a_figure_has_times_and_peaks_and_without_matplotlib_the_package_is_named"
    process.call_program(PROGRAM, scenario, path=str(tmp_path / "figure.png"))


def test_peaks_are_exact_bounded_or_simulated_and_no_statistic_is_reset_by_default(process: TorchProcess) -> None:
    scenario = "peaks_are_exact_bounded_or_simulated_and_no_statistic_is_reset_by_default"
    process.call_program(PROGRAM, scenario, exact=torch_release() >= (2, 15))
