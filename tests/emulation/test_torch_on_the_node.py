"""Compares the statistics of real PyTorch on the emulated node with the node's accounts, to the byte."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from tests.emulation.fixtures import MakeNode, StartTorch
from tests.emulation.node import GIB, MIB, EmulatedNode
from tests.emulation.torch_process import RemoteError, TorchProcess, TorchProcessError

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
    process.exec("import gc; worker.models.clear(); gc.collect()")
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


def test_a_failed_command_has_the_remote_error(lab: Lab) -> None:
    _, process = lab
    with pytest.raises(RemoteError, match="ZeroDivisionError: division by zero"):
        process.exec("1 / 0")
    assert process.exec("result = given + 1", given=41) == 42


def test_the_bytes_of_eight_random_processes_add_up(make_node: MakeNode) -> None:
    node = make_node(devices=2, total_bytes=6 * GIB, context_bytes=256 * MIB)
    limits = [book.total_bytes - book.reserved_bytes for book in node.books().devices]
    with ExitStack() as stack:
        processes = [stack.enter_context(TorchProcess(node)) for _ in range(8)]
        assert [process.call("contexts") for process in processes] == [[]] * 8
        assert [book.used_bytes for book in node.books().devices] == [0, 0], "counting devices is no use of them"
        for process in processes:
            process.exec(
                "for device in (0, 1): torch.cuda.mem_get_info(device)"
            )  # a context that does not fit is fatal
        requests = [
            process.send(
                "churn", devices=[0, 1], seed=seed, operations=1500, largest_bytes=256 * MIB, held=30, clear_every=50
            )
            for seed, process in enumerate(processes)
        ]
        while True:
            books = node.books()
            for book, limit in zip(books.devices, limits, strict=True):
                assert sum(book.processes.values()) == book.used_bytes <= limit
            if all(process.answered() for process in processes):
                break
        counts = [process.receive(number) for process, number in zip(processes, requests, strict=True)]
        assert sum(count["ooms"] for count in counts) > 0, "the device was never full"
        books = node.books()
        for device in (0, 1):
            expected = {process.pid: 256 * MIB + reserved(process, device) for process in processes}
            assert books[device].processes == expected
        processes[3].kill()
        assert processes[3].pid not in node.books()[0].processes


def test_empty_cache_in_another_thread_invalidates_a_graph_capture(start_torch: StartTorch) -> None:
    process = start_torch()
    captured = process.exec("""
x = torch.randn(1000, device="cuda")
graph = torch.cuda.CUDAGraph()
with torch.cuda.graph(graph):
    capturing = torch.cuda.is_current_stream_capturing()
    y = (x + 1) * 2
graph.replay()
result = [capturing, torch.cuda.is_current_stream_capturing(), y.shape[0]]
""")
    assert captured == [True, False, 1000]
    refused, capture = process.exec("""
import threading
cached = torch.empty(100 << 20, dtype=torch.uint8, device="cuda")
errors = []
def clear():
    try:
        torch.cuda.empty_cache()
    except Exception as error:
        errors.append(str(error))
second = torch.cuda.CUDAGraph()
try:
    with torch.cuda.graph(second):
        del cached
        thread = threading.Thread(target=clear); thread.start(); thread.join()
        z = x + 3
    outcome = "captured"
except Exception as error:
    outcome = str(error)
result = [errors, outcome]
""")
    assert len(refused) == 1
    assert re.search("not permitted when stream is capturing", refused[0])
    assert re.search("failed due to a previous error during capture|capturing", capture)


def test_a_process_that_hangs_or_dies_is_reported_with_its_stderr(start_torch: StartTorch) -> None:
    process = start_torch()
    process.exec("print('about to hang')")
    with pytest.raises(
        TorchProcessError, match=r"did not answer within [\d.]+ s(.|\n)*about to hang(.|\n)*from the test"
    ):
        process.exec("import time\nwhile True: time.sleep(0.01)", timeout_seconds=0.3)
    process.kill()
    with pytest.raises(TorchProcessError, match=r"ended with -9|could not be sent"):
        process.call("hello")
