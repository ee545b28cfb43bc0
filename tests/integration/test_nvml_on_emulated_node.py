"""The driver's side on the emulated node: the real pynvml on a libnvidia-ml.so.1 that can lose, hang and restart.

The reader runs in a program of its own, which joins the node by its environment. Its clock moves with the polls that a
test asks for, so that backoff is tested by its seconds without waiting for them.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from tests.emulation.node import GIB, MIB, EmulatedNode, MigSlice
from tests.support.paths import REPOSITORY

RESERVED = 256 * MIB

READER = """
import dataclasses, json, sys
from gpumem_exporter.host import LinuxHost
from gpumem_exporter.nvml.pynvml_provider import PynvmlProvider
from gpumem_exporter.nvml.reader import NodeReader
now = 0.0
reader = NodeReader(PynvmlProvider(), LinuxHost(), clock=lambda: now, wall_clock=lambda: now)
for line in sys.stdin:
    now += float(line)
    print(json.dumps(dataclasses.asdict(reader.read())), flush=True)
reader.close()
"""

POLLER = """
import dataclasses, json, sys, time
from gpumem_exporter.host import LinuxHost
from gpumem_exporter.nvml.poller import Poller
from gpumem_exporter.nvml.pynvml_provider import PynvmlProvider
poller = Poller(PynvmlProvider(), LinuxHost(), lambda reading: None, interval_seconds=0.01)
poller.start()
for line in sys.stdin:
    if line == "stop\\n":
        print(json.dumps(poller.stop(0.05)), flush=True)
    else:
        print(json.dumps(dataclasses.asdict(poller.status(time.monotonic() + float(line)))), flush=True)
"""

Ask = Callable[[object], Any]


@pytest.fixture
def start() -> Iterator[Callable[[EmulatedNode, str], Ask]]:
    """Starts a program on a node; what it returns sends the program a line and reads its answer."""
    programs: list[subprocess.Popen[str]] = []

    def started(node: EmulatedNode, program: str) -> Ask:
        process = subprocess.Popen(
            [sys.executable, "-c", program],
            cwd=REPOSITORY,
            env=node.environment(),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        programs.append(process)

        def ask(line: object) -> Any:
            assert process.stdin is not None
            assert process.stdout is not None
            process.stdin.write(f"{line}\n")
            process.stdin.flush()
            return json.loads(process.stdout.readline())

        return ask

    yield started
    for process in programs:
        process.kill()
        process.communicate()


@pytest.fixture
def poll(node: EmulatedNode, start: Callable[[EmulatedNode, str], Ask]) -> Ask:
    """Polls `node` once, so many seconds after the last time."""
    return start(node, READER)


def up(reading: dict[str, Any]) -> list[str]:
    return [device["uuid"] for device in reading["devices"] if not device["error"]]


def test_every_byte_that_the_node_books_is_read(node: EmulatedNode, poll: Ask) -> None:
    node.set_process(4_000_001, 0, 3 * GIB + 1)
    node.set_process(4_000_001, 1, 5)
    node.set_process(4_000_002, 0, 1 * GIB)
    node.set_unattributed(1, 77 * MIB)
    node.set_utilization(0, 37)
    reading = poll(0)
    assert (reading["up"], reading["error"], reading["driver_version"]) == (True, "", "580.159.04")
    for device, book in zip(reading["devices"], node.books().devices, strict=True):
        assert (device["gpu"], device["uuid"], device["name"]) == (str(book.index), book.uuid, book.name)
        assert device["memory"] == {
            "total_bytes": book.total_bytes,
            "used_bytes": book.used_bytes,
            "free_bytes": book.free_bytes,
            "reserved_bytes": RESERVED,
            "of_host": False,
        }
        assert {p["pid"]: p["used_bytes"] for p in device["processes"]} == book.processes
    assert reading["devices"][0]["utilization_ratio"] == 0.37


def test_five_hundred_processes_on_a_device_are_all_read(node: EmulatedNode, poll: Ask) -> None:
    assert poll(0)["devices"][0]["processes"] == []
    expected = {4_000_000 + i: i * 1024 for i in range(1, 501)}
    for pid, used_bytes in expected.items():
        node.set_process(pid, 0, used_bytes)
    assert {p["pid"]: p["used_bytes"] for p in poll(1)["devices"][0]["processes"]} == expected


def test_a_driver_without_the_second_memory_call_leaves_reserved_unknown_and_in_used(
    node: EmulatedNode, poll: Ask
) -> None:
    node.set_process(4_000_001, 0, GIB)
    node.fail("nvmlDeviceGetMemoryInfo_v2", 13)
    assert poll(0)["devices"][0]["memory"] == {
        "total_bytes": 8 * GIB,
        "used_bytes": GIB + RESERVED,
        "free_bytes": 7 * GIB - RESERVED,
        "reserved_bytes": None,
        "of_host": False,
    }


def test_what_one_device_does_not_support_is_unknown_there_and_read_on_the_other(node: EmulatedNode, poll: Ask) -> None:
    node.set_process(4_000_001, 0, GIB)
    node.set_process(4_000_002, 1, GIB)
    node.fail("nvmlDeviceGetMemoryInfo*", 3, device=0)
    node.fail("nvmlDeviceGetComputeRunningProcesses*", 4, device=0)
    node.set_utilization(0, None)
    first, second = poll(0)["devices"]
    assert (first["error"], first["memory"], first["processes"], first["utilization_ratio"]) == ("", None, None, None)
    assert second["memory"]["used_bytes"] == GIB
    assert second["processes"] == [{"pid": 4_000_002, "used_bytes": GIB}]


def test_memory_of_processes_that_the_driver_keeps_to_itself_is_unknown(node: EmulatedNode, poll: Ask) -> None:
    node.set_process(4_000_001, 0, GIB)
    node.hide_process_memory(0)
    assert poll(0)["devices"][0]["processes"] == [{"pid": 4_000_001, "used_bytes": None}]


def test_a_lost_device_is_named_has_no_figures_and_comes_back_by_itself_once_healed(
    node: EmulatedNode, poll: Ask
) -> None:
    both = [node.uuid(0), node.uuid(1)]
    assert up(poll(0)) == both
    node.lose_device(0)
    lost, healthy = poll(1)["devices"]
    assert (lost["gpu"], lost["uuid"], lost["memory"], lost["processes"]) == ("0", both[0], None, None)
    assert "GPU is lost" in lost["error"]
    assert healthy["memory"]["total_bytes"] == 8 * GIB
    node.heal_device(0)
    # Until NVML is initialised again the device stays lost; that is tried within two seconds of the loss.
    assert up(poll(0.1)) == both[1:]
    assert up(poll(2)) == both


def test_while_a_lost_device_is_sought_the_other_is_read_in_every_poll(node: EmulatedNode, poll: Ask) -> None:
    node.lose_device(0)
    init = node.slow("nvmlInit*", 0)
    for _ in range(60):
        reading = poll(1)
        assert up(reading) == [node.uuid(1)]
        assert len(reading["devices"]) == 2
    assert 3 <= init.hits <= 8


@pytest.mark.parametrize("code", [9, 12, 18, 999])
def test_a_driver_that_comes_later_is_attached_within_the_backoff(node: EmulatedNode, poll: Ask, code: int) -> None:
    node.set_init_error(code)
    for _ in range(40):
        reading = poll(1)
        assert (reading["up"], reading["devices"]) == (False, [])
        assert reading["error"].startswith("nvmlInit: ")
    node.set_init_error(0)
    assert len(up(poll(30))) == 2


def test_a_driver_that_restarts_is_attached_again_a_second_later(node: EmulatedNode, poll: Ask) -> None:
    assert poll(0)["up"]
    node.restart_driver()
    assert poll(1)["up"] is False
    assert len(up(poll(1))) == 2


def test_mig_devices_stand_for_their_gpu(
    make_node: Callable[..., EmulatedNode], start: Callable[[EmulatedNode, str], Ask]
) -> None:
    node = make_node(mig={1: [MigSlice("1g.1gb", GIB), MigSlice("2g.2gb", 2 * GIB)]})
    parent = node.uuid(1)
    node.set_process(4_000_001, 3, 300 * MIB)
    devices = start(node, READER)(0)["devices"]
    assert [(d["gpu"], d["uuid"], d["mig_profile"], d["parent_uuid"]) for d in devices] == [
        ("0", node.uuid(0), "", ""),
        ("1:0", node.uuid(2), "1g.1gb", parent),
        ("1:1", node.uuid(3), "2g.2gb", parent),
    ]
    assert [d["memory"]["total_bytes"] for d in devices] == [8 * GIB, GIB, 2 * GIB]
    assert devices[2]["processes"] == [{"pid": 4_000_001, "used_bytes": 300 * MIB}]
    assert devices[1]["processes"] == []
    assert devices[1]["utilization_ratio"] is None


def test_a_hanging_driver_hangs_the_poller_alone_which_goes_on_when_it_answers(
    node: EmulatedNode, start: Callable[[EmulatedNode, str], Ask]
) -> None:
    with node.hang("nvmlDeviceGetMemoryInfo*") as hang:
        ask = start(node, POLLER)
        hang.wait_for_waiting()
        assert ask(0)["stuck"] is False
        status = ask(5.1)
        assert (status["alive"], status["stuck"], status["polls"]) == (True, True, 0)
    polled = node.slow("nvmlDeviceGetMemoryInfo*", 0)
    polled.wait_for_hits(20)
    status = ask(0)
    assert (status["alive"], status["stuck"], status["error"]) == (True, False, "")


def test_stopping_does_not_wait_for_a_driver_that_hangs(
    node: EmulatedNode, start: Callable[[EmulatedNode, str], Ask]
) -> None:
    with node.hang("nvmlDeviceGetMemoryInfo*") as hang:
        ask = start(node, POLLER)
        hang.wait_for_waiting()
        assert ask("stop") is False
