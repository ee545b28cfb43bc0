"""Comparisons of checkpointing: what they measure, that they change nothing, and that they say what differs."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.emulation.node import EmulatedNode
from tests.emulation.torch_process import TorchProcess


@pytest.fixture(scope="module")
def process(tmp_path_factory: pytest.TempPathFactory, emulation: Path) -> Iterator[TorchProcess]:
    node = EmulatedNode(tmp_path_factory.mktemp("node") / "node")
    with contextlib.closing(node), TorchProcess(node, {"PYTORCH_CUDA_ALLOC_CONF": None}) as started:
        started.exec("torch.set_num_threads(1)")
        yield started


def call(process: TorchProcess, function: str, **arguments: Any) -> Any:
    code = f"from tests.programs import checkpointed_steps\nresult = checkpointed_steps.{function}(**given)"
    return process.exec(code, given=arguments, timeout_seconds=110)


def ways(told: dict[str, Any]) -> list[int | None]:
    """Every which block is recomputed in each row; None without checkpoints."""
    return [row["every"] for row in told["rows"]]


def peaks(told: dict[str, Any]) -> list[int]:
    assert all(row["exact"] for row in told["rows"]), told["text"]
    return [row["peak_bytes"] for row in told["rows"]]


def test_the_longest_list_of_blocks_of_one_class_is_recomputed_and_without_cuda_no_peak_is_told(
    process: TorchProcess,
) -> None:
    told = call(process, "plain")
    assert re.search(r"\b5 Block\b.*\bblocks\b", told["blocks"])
    assert [(row["every"], row["blocks"]) for row in told["rows"]] == [(None, 0), (2, 3), (1, 5)]
    assert [row["name"] in told["text"] for row in told["rows"]] == [True] * 3
    # a warm-up, two timed runs and one to compare, and a second one without checkpoints: 13 forward passes each
    assert told["calls"] == [13 + 4 + 4, 13 + 4, 13 + 4 + 4, 13 + 4, 13 + 4 + 4]
    assert {row["peak_bytes"] for row in told["rows"]} == {None}
    assert "CUDA" in told["text"]
    assert told["same_results"] is True
    assert all(row["seconds"] > 0 for row in told["rows"])


@pytest.mark.parametrize("failing", [False, True], ids=["over", "failed on its way"])
def test_a_comparison_leaves_everything_as_it_was(process: TorchProcess, failing: bool) -> None:
    assert all(call(process, "left_alone", failing=failing))


def test_a_model_in_evaluation_is_simulated_in_training_and_left_as_it_was(process: TorchProcess) -> None:
    told = call(process, "simulated_in_evaluation")
    assert told["evaluating"] == told["training"]
    assert told["training"][0] > told["training"][-1] > 0
    assert told["left"] is True


def test_memory_that_a_library_lacks_is_lacking_too(process: TorchProcess) -> None:
    assert call(process, "without_library_memory") == [True, False]


def test_a_training_with_comparisons_between_its_steps_has_the_same_losses_to_the_bit(process: TorchProcess) -> None:
    assert call(process, "losses", watched=True) == call(process, "losses", watched=False)


def test_results_that_checkpointing_moves_are_named(process: TorchProcess) -> None:
    told = call(process, "differing")
    drawing, norms, noisy = (told[name] for name in ("drawing", "norms", "noisy"))
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


def test_blocks_selections_and_batches_are_as_the_caller_says(process: TorchProcess) -> None:
    told = call(process, "chosen")
    assert re.search(r"\b3\b", told["given"]["blocks"])
    assert ways(told["given"]) == [None, 3, 1]
    assert told["still evaluating"] is True
    for name in ("evaluating", "positional", "autocast"):
        assert ways(told[name]) == [None, 4, 2, 1]
        assert told[name]["same_results"], told[name]["text"]


def test_what_cannot_be_compared_is_refused_with_what_would_be_right(process: TorchProcess) -> None:
    told = call(process, "refusals")
    expected = {
        "no blocks": r"\bLinear\b.*blocks=\[",
        "foreign blocks": "blocks",
        "the model as a block": "blocks",
        "no blocks given": "blocks",
        "every 9": r"\bevery\b.*\b9\b.*\b5\b",
        "every 0": r"\bevery\b.*\b0\b.*\b5\b",
        "no repeats": r"\brepeats\b.*\b0\b.*\b1\b",
        "no loss": r"\bloss\b.*\(8, 3\)",
        "text for a loss": r"\bloss\b.*\bstr\b",
        "nothing to train": r"\bloss\b.*\bparameter\b",
        "a hook": r"\bhead\.weight\b.*\bhook\b",
        "meta": r"\bmeta\b",
        "inference": r"torch\.inference_mode",
        "lazy": r"\b5\.weight\b",
        "a computed batch": r"\bbatch\b.*\bdetached\b",
        "autocast": r"torch\.int8.*torch\.bfloat16.*torch\.float16",
        "no parameters": r"\bSequential\b.*\bparameters\b",
        "reset on the CPU": r"\breset_peaks\b.*\bcpu\b",
    }
    assert told.keys() == expected.keys()
    assert [told[name] for name, pattern in expected.items() if not re.search(pattern, told[name])] == []


def test_a_figure_has_times_and_peaks_and_without_matplotlib_the_extra_is_named(
    process: TorchProcess, tmp_path: Path
) -> None:
    path = tmp_path / "figure.png"
    told = call(process, "figures", path=str(path))
    assert path.read_bytes().startswith(b"\x89PNG")
    times, peaks_of_bars = told["titles"]
    assert re.search(r"\bms\b", times)
    assert re.search(r"\bpeak\b.*\bMiB\b.*\bsimulated\b", peaks_of_bars)
    assert told["labels"] == [f"{peak / 2**20:.4g}" for peak in told["peaks"]]
    assert told["pyplot"] is False, "no window and no state of the process'"
    assert "gpumem-exporter[plot]" in told["missing"]


@pytest.fixture(scope="module")
def measured(process: TorchProcess) -> dict[str, Any]:
    return call(process, "on_device")


def test_peaks_are_exact_without_a_reset_in_a_process_without_a_higher_one(measured: dict[str, Any]) -> None:
    assert peaks(measured["first"]) == peaks(measured["reset"]) == sorted(peaks(measured["reset"]), reverse=True)
    assert measured["fell"] == [], "peaks fall by resets alone"
    assert measured["left"] == 0


def test_a_peak_below_an_earlier_one_is_bounded_and_said_to_be(measured: dict[str, Any]) -> None:
    rows = measured["again"]["rows"]
    assert [row["exact"] for row in rows] == [False] * 4
    for row, peak in zip(rows, peaks(measured["reset"]), strict=True):
        assert 0 < row["peak_bytes"] <= peak <= row["peak_at_most_bytes"]
    assert "reset_peaks=True" in measured["again"]["text"]


def test_simulated_peaks_are_within_five_per_cent_of_the_allocators(measured: dict[str, Any]) -> None:
    for simulated, real in zip(peaks(measured["simulated"]), peaks(measured["reset"]), strict=True):
        assert simulated == pytest.approx(real, rel=0.05)
    assert {row["simulated"] for row in measured["simulated"]["rows"]} == {True}
    assert {row["simulated"] for row in measured["reset"]["rows"]} == {False}
    assert "simulated" in measured["simulated"]["text"]
    assert re.search(r"\bsimulate\b.*\bcuda:0\b", measured["refusal"])


def test_a_way_without_enough_memory_is_told_as_such_and_the_others_are_measured(process: TorchProcess) -> None:
    told = call(process, "without_room")
    first, *_, last = told["rows"]
    assert (first["every"], first["out_of_memory"], first["seconds"], first["peak_bytes"]) == (None, True, None, None)
    assert (last["every"], last["out_of_memory"]) == (1, False)
    assert last["exact"] is True
    assert last["seconds"] > 0
    assert "out of memory" in told["text"]
    assert told["left"] == 0, "the failed run has left nothing"
