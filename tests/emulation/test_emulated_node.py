"""The rules of the emulated driver, tested with small programs without torch."""

from __future__ import annotations

import subprocess
import sys
from contextlib import ExitStack
from pathlib import Path

import pytest

from tests.emulation.fixtures import MakeNode
from tests.emulation.node import GIB, MIB, EmulatedNode, MigSlice
from tests.emulation.programs import NVML, Program, hammer, run

CONTEXT = 512 * MIB
OUT_OF_MEMORY, INITIALIZATION_ERROR, NO_DEVICE = 2, 3, 100
CAPTURE_UNSUPPORTED, CAPTURE_INVALIDATED = 900, 901
LOST, UNINITIALIZED, NOT_SUPPORTED, NO_PERMISSION = 15, 1, 3, 4


def test_listing_devices_uses_no_memory_and_the_first_use_creates_a_context(node: EmulatedNode) -> None:
    code = """
device_count(); name_of(0); name_of(1)
say([has_context(0), has_context(1)]); wait()
cuda.cudaFree(None)
say([has_context(0), has_context(1)]); wait()
cuda.cudaSetDevice(1)
say([has_context(0), has_context(1)]); wait()
"""
    with Program(node, code) as program:
        assert program.heard() == [0, 0]
        assert [device.processes for device in node.books().devices] == [{}, {}]
        program.go()
        assert program.heard() == [1, 0]
        assert [device.processes for device in node.books().devices] == [{program.pid: CONTEXT}, {}]
        program.go()
        assert program.heard() == [1, 1]
        assert [device.used_bytes for device in node.books().devices] == [CONTEXT, CONTEXT]


def test_cuda_nvml_and_the_node_have_the_same_values(node: EmulatedNode) -> None:
    node.set_process(4711, 0, GIB)
    with Program(node, "malloc(300 << 20); say(memory()); wait()") as program:
        code, free, total = program.heard()
        book = node.books()[0]
        assert (code, free, total) == (0, book.free_bytes, book.total_bytes - book.reserved_bytes)
        assert book.processes == {program.pid: CONTEXT + 300 * MIB, 4711: GIB}
        seen = run(node, "say([memory(0), processes(0)])", NVML)
    assert seen[0] == {
        "total": book.total_bytes,
        "reserved": book.reserved_bytes,
        "used": book.used_bytes,
        "free": book.free_bytes,
    }
    assert {pid: used for pid, used, _ in seen[1]} == book.processes


def test_concurrent_threads_and_processes_account_for_every_byte(make_node: MakeNode) -> None:
    node = make_node(devices=1, total_bytes=GIB, reserved_bytes=64 * MIB, context_bytes=32 * MIB)
    with ExitStack() as stack:
        hammers = [stack.enter_context(hammer(node, threads=2, operations=10_000)) for _ in range(4)]
        for each in hammers:
            assert each.heard() == []
        for each in hammers:
            each.go()
        while any(each.silent(0) for each in hammers):
            book = node.books()[0]
            assert sum(book.processes.values()) == book.used_bytes <= GIB - 64 * MIB
        reported = [each.heard() for each in hammers]
        assert all(allocations > 1000 and refusals > 100 for _, allocations, refusals in reported)
        assert node.books()[0].processes == {
            each.pid: 32 * MIB + held for each, (held, _, _) in zip(hammers, reported, strict=True)
        }


def test_the_memory_of_a_killed_process_is_released(node: EmulatedNode) -> None:
    code = "say(1); wait(); say(malloc(6 << 30)[0]); wait()"
    with Program(node, "malloc(6 << 30); say(1); wait()") as first, Program(node, code) as second:
        first.heard()
        second.heard()
        assert node.books()[0].processes == {first.pid: CONTEXT + 6 * GIB}
        first.kill()
        assert node.books()[0].used_bytes == 0
        second.go()
        assert second.heard() == 0
        assert node.books()[0].processes == {second.pid: CONTEXT + 6 * GIB}


@pytest.mark.parametrize(
    ("chosen", "seen"),
    [
        ("1", [1]),
        ("1,0", [1, 0]),
        ("0,9,1", [0]),
        ("", []),
        ("-1", []),
        ("uuid", [1]),
        ("uuid-beginning", [1]),
        ("0,0", []),
    ],
)
def test_cuda_visible_devices_selects_and_orders_devices(make_node: MakeNode, chosen: str, seen: list[int]) -> None:
    node = make_node(devices=2, total_bytes=[8 * GIB, 16 * GIB])
    spelled = {"uuid": node.uuid(1), "uuid-beginning": node.uuid(1)[:12]}.get(chosen, chosen)
    code = """
totals = []
error, count = device_count()
for i in range(count):
    cuda.cudaSetDevice(i); malloc(2 << 20); totals.append(memory()[2])
say([error, totals]); wait()
"""
    with Program(node, code, environment={"CUDA_VISIBLE_DEVICES": spelled}) as program:
        error, totals = program.heard()
        books = node.books()
        assert error == (0 if seen else NO_DEVICE)
        assert totals == [books[i].total_bytes - books[i].reserved_bytes for i in seen]
        assert [i for i in (0, 1) if books[i].processes] == sorted(seen)


def test_a_lost_device_does_not_affect_others_and_stays_lost_in_open_sessions(node: EmulatedNode) -> None:
    code = """
handle = nvml.nvmlDeviceGetHandleByIndex(0)
def look():
    say([code(nvml.nvmlDeviceGetMemoryInfo, handle), code(nvml.nvmlDeviceGetHandleByIndex, 0), code(memory, 1),
         nvml.nvmlDeviceGetCount()]); wait()
look(); look(); look()
nvml.nvmlShutdown(); nvml.nvmlInit()
look()
"""
    with Program(node, code, NVML) as program:
        assert program.heard() == [0, 0, 0, 2]
        node.lose_device(0)
        program.go()
        assert program.heard() == [LOST, LOST, 0, 2]
        node.heal_device(0)
        program.go()
        assert program.heard() == [LOST, LOST, 0, 2]
        program.go()
        assert program.heard() == [0, 0, 0, 2]


def test_nvml_lists_a_process_of_another_pid_namespace_with_its_outer_pid(node: EmulatedNode) -> None:
    launcher = ("unshare", "--user", "--map-root-user", "--pid", "--fork", "--kill-child", "--mount-proc")
    with Program(node, "malloc(2 << 20); say(os.getpid()); wait()", launcher=launcher) as program:
        assert program.heard() == 1
        outer = int(Path(f"/proc/{program.pid}/task/{program.pid}/children").read_text())
        assert node.books()[0].processes == {outer: CONTEXT + 2 * MIB}
        assert run(node, "say(processes(0))", NVML) == [[outer, CONTEXT + 2 * MIB, 2**32 - 1]]


def test_unsafe_calls_of_any_thread_fail_and_invalidate_a_capture(node: EmulatedNode) -> None:
    code = """
stream, graph = ctypes.c_void_p(), ctypes.c_void_p()
cuda.cudaStreamCreateWithFlags(ctypes.byref(stream), 1)
def capture(mode, meanwhile):
    cuda.cudaStreamBeginCapture(stream, mode)
    thread = threading.Thread(target=meanwhile); thread.start(); thread.join()
    status = ctypes.c_int(); cuda.cudaStreamIsCapturing(stream, ctypes.byref(status))
    return status.value, cuda.cudaStreamEndCapture(stream, ctypes.byref(graph))
answers = []
allocate = lambda: answers.append(malloc(2 << 20)[0])
GLOBAL, LOCAL = 0, 1
captures = [capture(GLOBAL, lambda: None), capture(GLOBAL, allocate), capture(LOCAL, allocate)]
say([captures, answers, malloc(2 << 20)[0]])
"""
    assert run(node, code) == [[[1, 0], [2, CAPTURE_INVALIDATED], [1, 0]], [CAPTURE_UNSUPPORTED, 0], 0]


def test_mig_devices_have_their_own_accounts_within_their_gpu(make_node: MakeNode) -> None:
    node = make_node(mig={1: [MigSlice("1g.10gb", GIB), MigSlice("2g.20gb", 2 * GIB)]})
    mig = node.uuid(3)
    assert mig.startswith("MIG-")
    code = """
whole = nvml.nvmlDeviceGetHandleByIndex(1)
parts = [nvml.nvmlDeviceGetMigDeviceHandleByIndex(whole, i) for i in (0, 1)]
say([nvml.nvmlDeviceGetCount(), nvml.nvmlDeviceGetMigMode(whole), [nvml.nvmlDeviceGetUUID(part) for part in parts],
     nvml.nvmlDeviceGetName(parts[1]), memory(parts[1])["used"], memory(whole)["used"],
     processes(whole), processes(parts[1]), processes(parts[0])])
"""
    with Program(
        node, "say([malloc(1 << 30)[0], malloc(1 << 30)[0]]); wait()", environment={"CUDA_VISIBLE_DEVICES": mig}
    ) as program:
        assert program.heard() == [0, OUT_OF_MEMORY]
        used = CONTEXT + GIB
        count, mode, uuids, name, part_used, whole_used, whole, second, first = run(node, code, NVML)
        assert (count, mode, uuids) == (2, [1, 1], [node.uuid(2), mig])
        assert name.endswith("MIG 2g.20gb")
        assert (part_used, whole_used) == (used, used)
        assert whole == second == [[program.pid, used, 8]]
        assert first == []
        assert node.books().by_uuid(mig).parent_uuid == node.uuid(1)


def test_gpustat_shows_the_nodes_processes(node: EmulatedNode) -> None:
    with Program(node, "malloc(1 << 30); say(1); wait()") as program:
        program.heard()
        shown = subprocess.run(
            [sys.executable, "-m", "gpustat", "--show-pid", "--no-color"],
            env=node.environment(),
            capture_output=True,
            text=True,
            timeout=30,
            check=True,
        )
    assert f"/{program.pid}(1536M)" in shown.stdout
    assert "1536 /  8192 MB" in shown.stdout
