"""Checkpoints: whole or not at all, as torch would load them, and without taking device memory."""

from __future__ import annotations

import errno
import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.emulation.fixtures import StartTorch
from tests.emulation.torch_process import TorchProcess

MIB = 1 << 20


@pytest.fixture(scope="module")
def process() -> Iterator[TorchProcess]:
    """One without any driver."""
    with TorchProcess(None) as started:
        started.exec("torch.set_num_threads(1)")
        yield started


def call(process: TorchProcess, function: str, **arguments: Any) -> Any:
    code = f"from tests.programs import saved_checkpoints\nresult = saved_checkpoints.{function}(**given)"
    return process.exec(code, given=arguments, timeout_seconds=110)


def test_a_training_goes_on_from_its_checkpoint_to_the_bit(process: TorchProcess, tmp_path: Path) -> None:
    on, from_checkpoint = call(process, "resumed", path=str(tmp_path / "a.pt"))
    assert on == from_checkpoint


def test_tied_weights_views_and_strides_are_kept_as_torch_keeps_them(process: TorchProcess, tmp_path: Path) -> None:
    told = call(process, "kept_as_torch_keeps", folder=str(tmp_path))
    assert [name for name, right in told.items() if not right] == []


def test_whatever_fails_the_checkpoint_of_before_stays_and_nothing_else(process: TorchProcess, tmp_path: Path) -> None:
    told = call(process, "failing", folder=str(tmp_path))
    assert [name for name, (*_, intact) in told.items() if not intact] == []
    assert {name: kind for name, (_, kind, _, _) in told.items()} == {
        "full": "StorageError",
        "full at the end": "StorageError",
        "unknown class": "ConfigurationError",
        "unpicklable": "TypeError",
        "interrupted": "KeyboardInterrupt",
        "interrupted in writing": "KeyboardInterrupt",
        "nothing": "ConfigurationError",
        "folder": "ConfigurationError",
        "too long a name": "StorageError",
        "no folder": "StorageError",
    }
    for name in ("full", "full at the end"):
        text = told[name][2]
        needed = {"full": "16.0 MiB", "full at the end": "1.0 MiB"}[name]
        assert re.search(
            rf"{tmp_path}/last\.pt\b.*{os.strerror(errno.EFBIG)}.*\b{re.escape(needed)}\b.*\b\d[\d.]* [KMGT]iB\b", text
        )
    assert re.search(r"\bUnknown\b.*weights_only=True", told["unknown class"][2])
    assert "save_checkpoint(path, model=model)" in told["nothing"][2]


def test_a_signal_s_handler_that_saves_while_another_checkpoint_is_written_leaves_that_as_it_would_be(
    start_torch: StartTorch, tmp_path: Path
) -> None:
    told = call(start_torch(), "saved_by_a_handler_meanwhile", folder=str(tmp_path))
    assert len(told["handled"]) == 1
    assert (told["inner"], told["outer"]) == (["cpu"], ["cpu"] * 4)
    assert told["staged"] == 4 * MIB


def test_a_link_and_the_permissions_of_a_replaced_file_stay(process: TorchProcess, tmp_path: Path) -> None:
    told = call(process, "replaced", folder=str(tmp_path))
    assert told == {"fresh": "0o640", "kept": "0o664", "link": True, "step": 2}


def test_threads_that_save_at_once_share_one_tagger_which_is_removed_with_the_last_save(
    start_torch: StartTorch, tmp_path: Path
) -> None:
    told = call(start_torch(), "saves_at_once", folder=str(tmp_path))
    assert told == {"present": [1], "left": 0, "devices": ["cpu"]}


def test_a_part_of_a_sharded_tensor_is_refused_by_its_name(process: TorchProcess, tmp_path: Path) -> None:
    said = call(process, "sharded", path=str(tmp_path / "a.pt"))
    assert re.match(r"model\.layers\[0\]\.weight\b.*\bDTensor\b", said)
    assert "full_state_dict=True" in said
    assert list(tmp_path.iterdir()) == []


def test_a_model_whose_state_all_ranks_gather_is_refused_before_any_is_waited_for(
    process: TorchProcess, tmp_path: Path
) -> None:
    said = call(process, "fully_sharded", path=str(tmp_path / "a.pt"))
    assert re.match(r"model\b.*\bFullyShardedDataParallel\b", said)
    assert "full_state_dict=True" in said
    assert list(tmp_path.iterdir()) == []


def test_saving_takes_no_device_memory_and_of_the_host_s_the_largest_tensor(
    process: TorchProcess, start_torch: StartTorch, tmp_path: Path
) -> None:
    told = call(start_torch(PYTORCH_CUDA_ALLOC_CONF=None), "from_device", folder=str(tmp_path))
    assert told["allocations"] == told["peak"] == 0
    assert told["changed"] == [], "not one statistic of the allocator"
    assert told["staged"] == 16 * MIB, "the largest of 76 MiB of weights and twice that of state"
    assert told["file"] > 3 * 76 * MIB
    assert told["host"] == 16 * MIB, "one at a time: the one before is gone when the next is made"
    assert (told["device"], told["device of plain"]) == ("cpu", "cuda:0")
    read = call(process, "read", folder=str(tmp_path))
    assert (read["devices"], read["stride"]) == (["cpu"], [2, 32])
    assert "CUDA" in read["plain"], "a file of torch.save's own asks for the device"
