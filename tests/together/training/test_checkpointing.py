"""Comparisons of checkpointing: they measure, change nothing, and report different results."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.emulation.node import EmulatedNode
from tests.emulation.torch_process import TorchProcess
from tests.support.torch_release import with_the_planners_kernels


@pytest.fixture(scope="module")
def process(tmp_path_factory: pytest.TempPathFactory, emulation: Path) -> Iterator[TorchProcess]:
    node = EmulatedNode(tmp_path_factory.mktemp("node") / "node")
    with contextlib.closing(node), TorchProcess(node, {"PYTORCH_CUDA_ALLOC_CONF": None}) as started:
        started.exec("torch.set_num_threads(1)")
        yield started


def call(process: TorchProcess, function: str, **given: Any) -> Any:
    return process.call_program("checkpointed_steps", function, **given)


def selections(results: dict[str, Any]) -> list[int | None]:
    """Return the selection of blocks of each row."""
    return [row["every"] for row in results["rows"]]


def peaks(results: dict[str, Any]) -> list[int]:
    assert all(row["exact"] for row in results["rows"]), results["text"]
    return [row["peak_bytes"] for row in results["rows"]]


def test_the_longest_list_of_blocks_of_one_class_is_recomputed_and_without_cuda_no_peak_is_known(
    process: TorchProcess,
) -> None:
    results = call(process, "plain")
    assert re.search(r"\b5 Block\b.*\bblocks\b", results["blocks"])
    assert [(row["every"], row["blocks"]) for row in results["rows"]] == [(None, 0), (2, 3), (1, 5)]
    assert [row["name"] in results["text"] for row in results["rows"]] == [True] * 3
    # 13 forward passes: for each variant a warm-up, two timed runs and a comparison, and a second comparison for `none`
    assert results["calls"] == [13 + 4 + 4, 13 + 4, 13 + 4 + 4, 13 + 4, 13 + 4 + 4]
    assert {row["peak_bytes"] for row in results["rows"]} == {None}
    assert "CUDA" in results["text"]
    assert results["same_results"] is True
    assert all(row["seconds"] > 0 for row in results["rows"])


@pytest.mark.parametrize("failing", [False, True], ids=["over", "failed on its way"])
def test_a_comparison_changes_nothing(process: TorchProcess, failing: bool) -> None:
    assert all(call(process, "left_alone", failing=failing))


def test_a_model_in_evaluation_mode_is_simulated_in_training_mode(process: TorchProcess) -> None:
    results = call(process, "simulated_in_evaluation")
    assert results["evaluating"] == results["training"]
    assert results["training"][0] > results["training"][-1] > 0
    assert results["left"] is True


def test_an_allocation_failure_of_a_library_counts_as_out_of_memory(process: TorchProcess) -> None:
    assert call(process, "without_library_memory") == [True, False]


def test_results_that_differ_are_named(process: TorchProcess) -> None:
    results = call(process, "differing")
    drawing, norms, noisy = (results[name] for name in ("drawing", "norms", "noisy"))
    assert [row["difference"] is not None for row in drawing["rows"]] == [False, True, True, True]
    assert "gradient" in drawing["text"]
    assert re.search(r"\b3 Sequential\b", norms["blocks"])
    assert [row["difference"] is not None for row in norms["rows"]] == [False, True, True]
    moved = norms["rows"][2]["difference"]["names"]
    assert {name.split()[0] for name in moved} == {"buffer"}, "gradients stay"
    assert {name.rsplit(".")[-1] for name in moved} == {"running_mean", "running_var", "num_batches_tracked"}
    assert "0.1.running_mean" in norms["text"]
    assert "loss" in noisy["text"], "a model that is never twice the same"
    assert not any(each["same_results"] for each in (drawing, norms, noisy))


def test_blocks_selections_and_batches_can_be_chosen(process: TorchProcess) -> None:
    results = call(process, "chosen")
    assert re.search(r"\b3\b", results["given"]["blocks"])
    assert selections(results["given"]) == [None, 3, 1]
    assert results["still evaluating"] is True
    for name in ("evaluating", "positional", "autocast"):
        assert selections(results[name]) == [None, 4, 2, 1]
        assert results[name]["same_results"], results[name]["text"]


def test_errors_name_the_accepted_values(process: TorchProcess) -> None:
    results = call(process, "refusals")
    expected = {
        "no blocks": r"\bLinear\b.*blocks=\[",
        "foreign blocks": "blocks",
        "every 9": r"\bevery\b.*\b9\b.*\b5\b",
        "no loss": r"\bloss\b.*\(8, 3\)",
        "nothing to train": r"\bloss\b.*\bparameter\b",
        "a hook": r"\bhead\.weight\b.*\bhook\b",
        "meta": r"\bmeta\b",
        "inference": r"torch\.inference_mode",
        "a computed batch": r"\bbatch\b.*\bdetached\b",
        "autocast": r"torch\.int8.*torch\.bfloat16.*torch\.float16",
        "reset on the CPU": r"\breset_peaks\b.*\bcpu\b",
    }
    assert results.keys() == expected.keys()
    assert [results[name] for name, pattern in expected.items() if not re.search(pattern, results[name])] == []


def test_a_figure_has_times_and_peaks_and_without_matplotlib_the_package_is_named(
    process: TorchProcess, tmp_path: Path
) -> None:
    path = tmp_path / "figure.png"
    results = call(process, "charts", path=str(path))
    assert path.read_bytes().startswith(b"\x89PNG")
    times, peaks_of_bars = results["titles"]
    assert re.search(r"\bms\b", times)
    assert re.search(r"\bpeak\b.*\bMiB\b.*\bsimulated\b", peaks_of_bars)
    assert results["labels"] == [f"{peak / 2**20:.4g}" for peak in results["peaks"]]
    assert results["pyplot"] is False, "no window and no global state"
    assert "pip install matplotlib" in results["missing"]


@pytest.fixture(scope="module")
def measured(process: TorchProcess) -> dict[str, Any]:
    return call(process, "on_device")


def test_peaks_are_measured_without_a_reset_also_below_an_earlier_peak(measured: dict[str, Any]) -> None:
    assert peaks(measured["first"]) == peaks(measured["again"]) == peaks(measured["reset"])
    assert peaks(measured["reset"]) == sorted(peaks(measured["reset"]), reverse=True)
    assert measured["fell"] == [], "peaks fall by resets alone"
    assert measured["left"] == 0


def test_a_history_that_the_user_records_stays_and_peaks_are_bounded(measured: dict[str, Any]) -> None:
    assert measured["still_recording"] is True
    for row, peak in zip(measured["recording"]["rows"], peaks(measured["reset"]), strict=True):
        assert row["peak_bytes"] <= peak <= row["peak_at_most_bytes"]
        assert row["exact"] is False
    assert "reset_peaks=True" in measured["recording"]["text"]


@with_the_planners_kernels
def test_simulated_peaks_are_within_five_percent_of_measured_peaks(measured: dict[str, Any]) -> None:
    for simulated, real in zip(peaks(measured["simulated"]), peaks(measured["reset"]), strict=True):
        assert simulated == pytest.approx(real, rel=0.05)
    assert {row["simulated"] for row in measured["simulated"]["rows"]} == {True}
    assert {row["simulated"] for row in measured["reset"]["rows"]} == {False}
    assert "simulated" in measured["simulated"]["text"]
    assert re.search(r"\bsimulate\b.*\bcuda:0\b", measured["refusal"])


def test_a_variant_that_runs_out_of_memory_is_reported_and_the_others_are_measured(process: TorchProcess) -> None:
    results = call(process, "without_room")
    first, *_, last = results["rows"]
    assert (first["every"], first["out_of_memory"], first["seconds"], first["peak_bytes"]) == (None, True, None, None)
    assert (last["every"], last["out_of_memory"]) == (1, False)
    assert last["exact"] is True
    assert last["seconds"] > 0
    assert "out of memory" in results["text"]
    assert results["left"] == 0, "the failed run has left nothing"
