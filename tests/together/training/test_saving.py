"""Checkpoints: written completely or not at all, loadable by torch, and without device memory."""

from __future__ import annotations

import errno
import os
import re
from pathlib import Path
from typing import Any

from tests.emulation.fixtures import StartTorch
from tests.emulation.torch_process import TorchProcess

MIB = 1 << 20


def call(process: TorchProcess, function: str, **given: Any) -> Any:
    return process.call_program("saved_checkpoints", function, **given)


def test_training_resumes_from_a_checkpoint_with_the_same_losses(process: TorchProcess, tmp_path: Path) -> None:
    on, from_checkpoint = call(process, "resumed", path=str(tmp_path / "a.pt"))
    assert on == from_checkpoint


def test_tied_weights_views_and_strides_are_saved_as_torch_saves_them(process: TorchProcess, tmp_path: Path) -> None:
    results = call(process, "kept_as_torch_keeps", folder=str(tmp_path))
    assert [name for name, right in results.items() if not right] == []


def test_after_any_error_only_the_previous_checkpoint_exists(process: TorchProcess, tmp_path: Path) -> None:
    results = call(process, "failing", folder=str(tmp_path))
    assert [name for name, (*_, intact) in results.items() if not intact] == []
    assert {name: kind for name, (kind, _, _) in results.items()} == {
        "full": "StorageError",
        "full at the end": "StorageError",
        "unknown class": "ConfigurationError",
        "unpicklable": "TypeError",
        "interrupted": "KeyboardInterrupt",
        "interrupted in writing": "KeyboardInterrupt",
        "no folder": "StorageError",
    }
    for name, needed in (("full", "16.0 MiB"), ("full at the end", "1.0 MiB")):
        assert re.search(rf"{tmp_path}/last\.pt\b.*{os.strerror(errno.EFBIG)}.*\b{needed}\b", results[name][1])
    assert re.search(r"\bUnknown\b.*weights_only=True", results["unknown class"][1])


def test_a_signal_handler_can_save_while_another_checkpoint_is_written(start_torch: StartTorch, tmp_path: Path) -> None:
    results = call(start_torch(), "saved_by_a_signal_handler", folder=str(tmp_path))
    assert len(results["handled"]) == 1
    assert (results["inner"], results["outer"]) == (["cpu"], ["cpu"] * 4)
    assert results["staged"] == 4 * MIB


def test_a_link_and_the_permissions_of_a_replaced_file_stay(process: TorchProcess, tmp_path: Path) -> None:
    results = call(process, "replaced", folder=str(tmp_path))
    assert results == {"fresh": "0o640", "kept": "0o664", "link": True, "step": 2}


def test_threads_that_save_at_once_share_one_tagger_which_is_removed_with_the_last_save(
    start_torch: StartTorch, tmp_path: Path
) -> None:
    results = call(start_torch(), "saves_at_once", folder=str(tmp_path))
    assert results == {"present": [1], "left": 0, "devices": ["cpu"]}


def test_a_part_of_a_sharded_tensor_is_refused(process: TorchProcess, tmp_path: Path) -> None:
    message = call(process, "sharded", path=str(tmp_path / "a.pt"))
    assert re.match(r"model\.layers\[0\]\.weight\b.*\bDTensor\b", message)
    assert "full_state_dict=True" in message
    assert list(tmp_path.iterdir()) == []


def test_a_model_whose_state_all_ranks_gather_is_refused_without_waiting(process: TorchProcess, tmp_path: Path) -> None:
    message = call(process, "fully_sharded", path=str(tmp_path / "a.pt"))
    assert re.match(r"model\b.*\bFullyShardedDataParallel\b", message)
    assert "full_state_dict=True" in message
    assert list(tmp_path.iterdir()) == []


def test_saving_takes_no_device_memory_and_host_memory_for_the_largest_tensor(
    process: TorchProcess, start_torch: StartTorch, tmp_path: Path
) -> None:
    results = call(start_torch(PYTORCH_CUDA_ALLOC_CONF=None), "from_device", folder=str(tmp_path))
    assert results["allocations"] == results["peak"] == 0
    assert results["changed"] == [], "not one statistic of the allocator"
    assert results["staged"] == 16 * MIB, "the largest of 76 MiB of weights and twice that of state"
    assert results["file"] > 3 * 76 * MIB
    assert results["host"] == 16 * MIB, "one at a time: each copy is freed before the next"
    assert (results["device"], results["device of plain"]) == ("cpu", "cuda:0")
    read = call(process, "read", folder=str(tmp_path))
    assert (read["devices"], read["stride"]) == (["cpu"], [2, 32])
    assert "CUDA" in read["plain"], "a file of torch.save needs the device"
