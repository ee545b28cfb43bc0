"""The search for a batch size with real training steps on an emulated device of 2 GiB."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import pytest

from tests.emulation.fixtures import MakeNode
from tests.emulation.torch_process import TorchProcess

MIB = 1 << 20
GIB = 1 << 30


@pytest.fixture
def process(make_node: MakeNode) -> Iterator[TorchProcess]:
    node = make_node(devices=1, total_bytes=2 * GIB)
    with TorchProcess(node, {"PYTORCH_CUDA_ALLOC_CONF": None}) as started:
        started.exec("torch.set_num_threads(1)")
        yield started


def call(process: TorchProcess, function: str, **given: Any) -> Any:
    return process.call_program("searched_batches", function, **given)


def test_the_found_size_trains_the_next_one_does_not_and_no_statistic_is_reset(
    process: TorchProcess,
) -> None:
    results = call(process, "found")
    sizes = [size for size, *_ in results["tries"]]
    assert sizes[:2] == [768, 1536], "the start, rounded down, and twice that"
    assert results["size"] == results["largest"] == max(size for size, fits, *_ in results["tries"] if fits)
    assert min(size for size, fits, *_ in results["tries"] if not fits) == results["size"] + 256
    assert results["in a range"] == results["size"]
    assert (results["trains"], results["more"]) == (True, False)

    peaks = [peak for *_, peak in results["tries"] if peak is not None]
    assert len(peaks) > 3, "each size larger than those before raises PyTorch's own peak"
    assert peaks == sorted(set(peaks))
    assert peaks[-1] == results["peak"]
    assert all(peak is None or peak > results["peak"] for peak in results["again_peaks"])
    assert results["again"] == [int(results["size"] / 256 * 0.9) * 256, results["size"]], (
        "from above, and less a margin"
    )
    assert (results["resets"], results["ooms"], results["peak_kept"]) == (0, 0, True)
    assert results["left"] == 0, "failed tries leave nothing behind"
    assert results["reserved"] < GIB / 4, "and nor does the last one leave its cache"


def test_the_found_size_is_tried_until_its_memory_stops_growing(process: TorchProcess) -> None:
    results = call(process, "filling")
    assert results["trains"] == [True, False], "two runs of a size do not fill the buffer"
    fitting = [[size, runs] for size, fits, runs in results["tries"] if fits and runs > 2]
    size, runs = max(fitting)
    assert size == results["largest"]
    assert 38 <= runs < 46, "30 runs fill the buffer, and the last 8 reach no new maximum"
    assert all(fits for size, fits, runs in results["tries"] if size <= results["size"])


def test_the_advice_of_a_guard_is_measured_although_the_search_had_a_higher_peak(process: TorchProcess) -> None:
    results = call(process, "guarded")
    found, proposed = results["found"], results["proposed"]
    assert found * 0.7 < proposed["after a search"] <= found, "the first guess would be eight times as much"
    assert found * 0.4 < proposed["with a full cache"] <= found, "at least about the size that is known to fit"
    assert results["trains"] == [True, True]


def test_a_search_ends_with_an_error_of_the_step_without_a_fitting_size_or_at_its_limits(process: TorchProcess) -> None:
    results = call(process, "ends")
    assert results["own error"] == [True, [], [4, 8, 16]]
    text, cause, *notes = results["none fits"]
    assert "4, 2, 1" in text
    assert cause == "OutOfMemoryError"
    assert notes, "the error says why"
    assert results["left"] == 0
    assert results["maximum"] == 50
    assert results["bounded"] == [4, 4], "three tries, and the found size once more"
    assert "64, 32" in results["bounded, none fits"]
    assert results["wrapped"] is True


def test_without_cuda_nothing_is_tried_and_invalid_arguments_are_rejected() -> None:
    with TorchProcess(None, {"CUDA_VISIBLE_DEVICES": ""}) as process:
        results = call(process, "without_cuda")
        assert re.search(r"\b24\b.*\bCUDA\b", results.pop("printed"))
        assert results == {"size": 24, "sizes": [], "largest": None}
        assert re.search(r"find_batch_size\b.*\bCUDA\b", process.stderr())
        refused = call(process, "refusals")
    expected = [
        r"start.*\b64\b.*multiple.*\b1\b.*maximum.*\b32\b",
        r"start.*\b4\b.*multiple.*\b8\b.*maximum.*\b65536\b",
        r"margin.*\b1\.0\b.*\b0\b.*\b1\b",
        r"tries.*\b0\b.*\b1\b",
    ]
    assert [text for wanted, text in zip(expected, refused, strict=True) if not re.search(wanted, text)] == []
