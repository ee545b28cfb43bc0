"""The driver interface on the emulated node, with the real pynvml.

The reader runs in a separate program in the environment of the node, with a clock that each poll advances.
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

Ask = Callable[[object], Any]


@pytest.fixture
def start() -> Iterator[Callable[[EmulatedNode], Ask]]:
    """Return a function that starts the reader on a node, and returns a function that polls it after some seconds."""
    programs: list[subprocess.Popen[str]] = []

    def started(node: EmulatedNode) -> Ask:
        process = subprocess.Popen(
            [sys.executable, "-c", READER],
            cwd=REPOSITORY,
            env=node.environment(),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        programs.append(process)

        def ask(seconds: object) -> Any:
            assert process.stdin is not None
            assert process.stdout is not None
            process.stdin.write(f"{seconds}\n")
            process.stdin.flush()
            return json.loads(process.stdout.readline())

        return ask

    yield started
    for process in programs:
        process.kill()
        process.communicate()


@pytest.fixture
def poll(node: EmulatedNode, start: Callable[[EmulatedNode], Ask]) -> Ask:
    """Return a function that polls `node`."""
    return start(node)


def test_five_hundred_processes_on_a_device_are_read(node: EmulatedNode, poll: Ask) -> None:
    assert poll(0)["devices"][0]["processes"] == []
    expected = {4_000_000 + i: i * 1024 for i in range(1, 501)}
    for pid, used_bytes in expected.items():
        node.set_process(pid, 0, used_bytes)
    assert {p["pid"]: p["used_bytes"] for p in poll(1)["devices"][0]["processes"]} == expected


def test_without_the_second_memory_call_reserved_is_unknown_and_part_of_used(node: EmulatedNode, poll: Ask) -> None:
    node.set_process(4_000_001, 0, GIB)
    node.fail("nvmlDeviceGetMemoryInfo_v2", 13)
    assert poll(0)["devices"][0]["memory"] == {
        "total_bytes": 8 * GIB,
        "used_bytes": GIB + RESERVED,
        "free_bytes": 7 * GIB - RESERVED,
        "reserved_bytes": None,
        "of_host": False,
    }


def test_an_unsupported_value_of_one_device_is_read_on_the_other(node: EmulatedNode, poll: Ask) -> None:
    node.set_process(4_000_001, 0, GIB)
    node.set_process(4_000_002, 1, GIB)
    node.fail("nvmlDeviceGetMemoryInfo*", 3, device=0)
    node.fail("nvmlDeviceGetComputeRunningProcesses*", 4, device=0)
    node.set_utilization(0, None)
    first, second = poll(0)["devices"]
    assert (first["error"], first["memory"], first["processes"], first["utilization_ratio"]) == ("", None, None, None)
    assert second["memory"]["used_bytes"] == GIB
    assert second["processes"] == [{"pid": 4_000_002, "used_bytes": GIB}]


def test_mig_devices_replace_their_gpu(
    make_node: Callable[..., EmulatedNode], start: Callable[[EmulatedNode], Ask]
) -> None:
    node = make_node(mig={1: [MigSlice("1g.1gb", GIB), MigSlice("2g.2gb", 2 * GIB)]})
    parent = node.uuid(1)
    node.set_process(4_000_001, 3, 300 * MIB)
    devices = start(node)(0)["devices"]
    assert [(d["gpu"], d["uuid"], d["mig_profile"], d["parent_uuid"]) for d in devices] == [
        ("0", node.uuid(0), "", ""),
        ("1:0", node.uuid(2), "1g.1gb", parent),
        ("1:1", node.uuid(3), "2g.2gb", parent),
    ]
    assert [d["memory"]["total_bytes"] for d in devices] == [8 * GIB, GIB, 2 * GIB]
    assert devices[2]["processes"] == [{"pid": 4_000_001, "used_bytes": 300 * MIB}]
    assert devices[1]["processes"] == []
    assert devices[1]["utilization_ratio"] is None
