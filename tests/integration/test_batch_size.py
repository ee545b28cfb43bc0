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


def call(process: TorchProcess, function: str) -> Any:
    return process.exec(f"from tests.programs import searched_batches\nresult = searched_batches.{function}()")


def test_the_size_that_is_found_trains_and_the_next_one_does_not_and_no_statistic_is_reset(
    process: TorchProcess,
) -> None:
    told = call(process, "found")
    print(told["printed"])
    sizes = [size for size, *_ in told["tries"]]
    assert sizes[:2] == [768, 1536], "the start, rounded down, and twice that"
    assert told["size"] == told["largest"] == max(size for size, fits, *_ in told["tries"] if fits)
    assert min(size for size, fits, *_ in told["tries"] if not fits) == told["size"] + 256
    assert told["in a range"] == told["size"]
    assert (told["trains"], told["more"]) == (True, False)

    peaks = [peak for *_, peak in told["tries"] if peak is not None]
    assert len(peaks) > 3, "each size larger than those before raises PyTorch's own peak"
    assert peaks == sorted(set(peaks))
    assert peaks[-1] == told["peak"]
    assert all(peak is None or peak > told["peak"] for peak in told["again_peaks"])
    assert told["again"] == [int(told["size"] / 256 * 0.9) * 256, told["size"]], "from above, and less a margin"
    assert (told["resets"], told["ooms"], told["peak_kept"]) == (0, 0, True)
    assert told["left"] == 0, "failed tries leave nothing behind"
    assert told["reserved"] < GIB / 4, "and nor does the last one leave its cache"


def test_a_search_ends_with_the_steps_own_error_with_none_that_fits_or_at_its_bounds(process: TorchProcess) -> None:
    told = call(process, "ends")
    assert told["own error"] == [True, [], [4, 8, 16]]
    text, cause, *notes = told["none fits"]
    assert "4, 2, 1" in text
    assert cause == "OutOfMemoryError"
    assert notes, "the error says why"
    assert told["left"] == 0
    assert told["maximum"] == 50
    assert told["bounded"] == [4, 3]
    assert "64, 32" in told["bounded, none fits"]
    assert told["wrapped"] is True


def test_without_cuda_nothing_is_tried_and_wrong_arguments_are_told() -> None:
    with TorchProcess(None, {"CUDA_VISIBLE_DEVICES": ""}) as process:
        told = call(process, "without_cuda")
        assert re.search(r"\b24\b.*\bCUDA\b", told.pop("printed"))
        assert told == {"size": 24, "asked": [], "largest": None}
        assert re.search(r"find_batch_size\b.*\bCUDA\b", process.stderr())
        refused = call(process, "refusals")
    expected = [
        r"start.*\b0\b.*multiple.*\b1\b.*maximum.*\b65536\b",
        r"start.*\b64\b.*multiple.*\b1\b.*maximum.*\b32\b",
        r"start.*\b4\b.*multiple.*\b8\b.*maximum.*\b65536\b",
        r"multiple.*\b0\b.*\b1\b",
        r"margin.*\b1\.0\b.*\b0\b.*\b1\b",
        r"runs.*\b0\b.*\b1\b",
        r"tries.*\b0\b.*\b1\b",
    ]
    assert [text for wanted, text in zip(expected, refused, strict=True) if not re.search(wanted, text)] == []
