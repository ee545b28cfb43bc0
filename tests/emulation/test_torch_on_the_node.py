"""Compares the statistics of real PyTorch on the emulated node with the node's accounts, to the byte."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.emulation.node import GIB, MIB, EmulatedNode
from tests.emulation.torch_process import RemoteError, TorchProcess

CONTEXT = 512 * MIB
Lab = tuple[EmulatedNode, TorchProcess]


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory, emulation: Path) -> Iterator[Lab]:
    with EmulatedNode(tmp_path_factory.mktemp("shared")) as node, TorchProcess(node) as process:
        yield node, process


@pytest.fixture
def lab(shared: Lab) -> Lab:
    """A node of two 8 GiB GPUs and a PyTorch process with a context on both and without tensors.

    The module shares one process. This fixture creates the contexts, so that no test depends on another test.
    """
    _, process = shared
    process.exec("for device in (0, 1): torch.empty(1, device=f'cuda:{device}')")
    process.call("free")
    process.exec("import gc; worker.models.clear(); gc.collect(); torch._C._cuda_clearCublasWorkspaces()")
    process.call("empty_cache")
    return shared


def reserved(process: TorchProcess, device: int = 0) -> int:
    return int(process.call("stats", device=device)["reserved_bytes.all.current"])


def test_the_accounts_are_the_reserved_bytes_and_the_context(lab: Lab) -> None:
    node, process = lab
    for seed in range(5):
        for device in (0, 1):
            process.call("random_heap", device=device, seed=seed, blocks=60)
            book = node.books()[device]
            assert book.processes == {process.pid: CONTEXT + reserved(process, device)}
    before, held = node.books()[0].used_bytes, reserved(process)
    process.call("empty_cache")
    assert 0 < before - node.books()[0].used_bytes == held - reserved(process)


@pytest.mark.parametrize("model", ["linear", "transformer"])
def test_training_has_the_expected_memory_pattern(lab: Lab, model: str) -> None:
    node, process = lab
    process.call("train", steps=2, model=model)
    process.call("reset_peak")
    second = process.call("train", steps=1, model=model)
    process.call("reset_peak")
    third = process.call("train", steps=3, model=model)
    assert 0 < second["allocated"] < second["peak"]
    assert second == third
    assert node.books()[0].processes[process.pid] == CONTEXT + reserved(process)


def test_an_out_of_memory_error_has_the_text_of_torch(lab: Lab) -> None:
    node, process = lab
    node.set_process(4711, 0, GIB)
    try:
        process.call("alloc", nbytes=2 * GIB)
        ooms = process.call("stats")["num_ooms"]
        with pytest.raises(RemoteError) as caught:
            process.call("alloc", nbytes=5 * GIB)
    finally:
        node.remove_process(4711)
    assert caught.value.type == "OutOfMemoryError"
    for part in (
        "Tried to allocate 5.00 GiB. GPU 0 has a total capacity of 7.75 GiB of which 4.25 GiB is free.",
        "Process 4711 has 1024.00 MiB memory in use.",
        "this process has 2.50 GiB memory in use.",
        "Of the allocated memory 2.00 GiB is allocated by PyTorch",
    ):
        assert part in caught.value.message
    stats = process.call("stats")
    assert (stats["num_ooms"], stats["num_alloc_retries"] > 0) == (ooms + 1, True)
