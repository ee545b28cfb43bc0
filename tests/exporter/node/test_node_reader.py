"""Polls of a scripted driver that is loaded late, is unloaded, loses devices or does not answer."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest

from gpumem_exporter.core.readings import DeviceMemory, DeviceReading, NodeReading, ProcessFacts, ProcessMemory
from gpumem_exporter.errors import (
    NvmlDeviceLostError,
    NvmlError,
    NvmlNotSupportedError,
    NvmlPermissionError,
    NvmlUnavailableError,
)
from gpumem_exporter.node.failures import FailureLog
from gpumem_exporter.node.reader import NodeReader
from tests.support.builders.builders import Clock, NobodyHost

MEMORY = DeviceMemory(80, 19, 60, 1)


class Node:
    """A scripted driver with eight GPUs. `failures` maps (call, uuid) to an exception."""

    source = "nvml"

    def __init__(self) -> None:
        self.listed: list[DeviceReading] = [DeviceReading(str(i), f"GPU-{i}", "H100") for i in range(8)]
        self.failures: dict[tuple[str, str], Exception] = {}
        self.opened_at: list[float] = []
        self.is_open = False
        self.released = 0
        self.clock = Clock(1000.0)
        self.processes = (ProcessMemory(30, 5),)
        self.activity_reads = 0

    def _fail(self, call: str, uuid: str = "") -> None:
        if (call, uuid) in self.failures:
            raise self.failures[call, uuid]

    def open(self) -> None:
        self.opened_at.append(self.clock.now)
        self._fail("open")
        self.is_open = True

    def close(self) -> None:
        self.is_open = False

    def release(self) -> None:
        self.close()
        self.released += 1

    def driver_version(self) -> str:
        self._fail("driver_version")
        return "580.159.04"

    def devices(self) -> Sequence[DeviceReading]:
        assert self.is_open
        self._fail("devices")
        return tuple(self.listed)

    def read_memory(self, uuid: str) -> DeviceMemory:
        self._fail("memory", uuid)
        return MEMORY

    def read_processes(self, uuid: str) -> tuple[ProcessMemory, ...]:
        self._fail("processes", uuid)
        return self.processes

    def read_utilization_ratio(self, uuid: str) -> float:
        self._fail("utilization", uuid)
        return 0.5

    def read_active_pids(self, uuid: str) -> frozenset[int]:
        self.activity_reads += 1
        self._fail("activity", uuid)
        return frozenset({30})


class Host(NobodyHost):
    def __init__(self) -> None:
        self.processes: dict[int, ProcessFacts] = {30: ProcessFacts(30, 100, "python train.py")}
        self.requested_pids: list[int] = []
        self.failure: Exception | None = None

    def facts(self, pid: int) -> ProcessFacts | None:
        self.requested_pids.append(pid)
        if self.failure:
            raise self.failure
        return self.processes.get(pid)


@pytest.fixture
def node() -> Node:
    return Node()


@pytest.fixture
def host() -> Host:
    return Host()


@pytest.fixture
def reader(node: Node, host: Host) -> NodeReader:
    return NodeReader(node, host, clock=node.clock, wall_clock=lambda: node.clock.now + 1e9, jitter=lambda: 0.0)


def poll_for(reader: NodeReader, node: Node, seconds: int) -> NodeReading:
    """Poll once a second."""
    for _ in range(seconds):
        node.clock.now += 1
        reading = reader.read()
    return reading


def up(reading: NodeReading) -> list[str]:
    return [device.uuid for device in reading.devices if device.up]


def device(reading: NodeReading, uuid: str) -> DeviceReading:
    (found,) = (device for device in reading.devices if device.uuid == uuid)
    return found


def test_a_failing_host_does_not_affect_the_values_of_the_driver(
    reader: NodeReader, host: Host, caplog: pytest.LogCaptureFixture
) -> None:
    host.failure = ZeroDivisionError("unforeseen")
    reader.read()
    reading = reader.read()
    assert len(up(reading)) == 8
    assert reading.facts == {}
    (record,) = caplog.records
    assert record.message.endswith(": ZeroDivisionError: unforeseen")


def test_a_missing_driver_is_retried_after_1_2_4_8_16_and_then_every_30_seconds(reader: NodeReader, node: Node) -> None:
    node.failures["open", ""] = NvmlUnavailableError("no driver")
    reader.read()
    poll_for(reader, node, 130)
    assert [at - node.opened_at[0] for at in node.opened_at] == [0, 1, 3, 7, 15, 31, 61, 91, 121]


@pytest.mark.parametrize(
    "failures",
    [
        {("devices", ""): NvmlUnavailableError("unavailable")},
        {("devices", ""): KeyError("unforeseen")},
        {("memory", f"GPU-{number}"): NvmlUnavailableError("NVML is not initialized") for number in range(8)},
    ],
)
def test_a_driver_that_lists_or_reads_no_device_is_closed_and_opened_again(
    reader: NodeReader, node: Node, failures: dict[tuple[str, str], Exception]
) -> None:
    reader.read()
    node.failures |= failures
    reading = poll_for(reader, node, 1)
    assert (reading.up, reading.devices) == (False, ())
    assert reading.error
    assert not node.is_open
    node.failures.clear()
    assert poll_for(reader, node, 1).up
    assert len(node.opened_at) == 2


def test_a_device_lost_during_a_read_keeps_its_identity_and_has_no_values(reader: NodeReader, node: Node) -> None:
    for call in ("memory", "processes", "utilization"):
        node.failures = {(call, "GPU-3"): NvmlDeviceLostError("GPU is lost")}
        reading = reader.read()
        assert device(reading, "GPU-3") == DeviceReading("3", "GPU-3", "H100", error="GPU is lost")
        assert up(reading) == [f"GPU-{i}" for i in (0, 1, 2, 4, 5, 6, 7)]
    node.failures = {("memory", "GPU-3"): KeyError("unforeseen")}
    reading = reader.read()
    assert (len(up(reading)), device(reading, "GPU-3").error) == (7, "KeyError: 'unforeseen'")


@pytest.mark.parametrize(("lost", "keeps"), [(3, False), (7, True)])
def test_a_lost_device_keeps_its_index_until_another_device_gets_it(
    reader: NodeReader, node: Node, lost: int, keeps: bool
) -> None:
    reader.read()
    back = node.listed.copy()
    node.failures["memory", f"GPU-{lost}"] = NvmlDeviceLostError("GPU is lost")
    assert device(reader.read(), f"GPU-{lost}").gpu == str(lost)
    rest = [identity for identity in back if identity.uuid != f"GPU-{lost}"]
    node.listed = [DeviceReading(str(index), identity.uuid) for index, identity in enumerate(rest)]
    for _ in range(200):
        reading = poll_for(reader, node, 1)
        assert (device(reading, f"GPU-{lost}").gpu, device(reading, f"GPU-{lost}").up) == (str(lost) * keeps, False)
        assert len({each.gpu for each in reading.devices}) == 8
    node.listed = [DeviceReading(str(lost), "", error="GPU is lost") if i == lost else d for i, d in enumerate(back)]
    assert device(reader.read(), f"GPU-{lost}").gpu == str(lost)
    node.listed = back
    node.failures.clear()
    assert len(up(reader.read())) == 8


def test_nvml_is_initialized_again_with_backoff_to_recover_a_lost_device(reader: NodeReader, node: Node) -> None:
    reader.read()
    node.failures["memory", "GPU-3"] = NvmlDeviceLostError("GPU is lost")
    poll_for(reader, node, 200)
    assert [at - node.opened_at[0] for at in node.opened_at] == [0, 3, 7, 15, 31, 63, 123, 183]
    node.listed = []
    reading = poll_for(reader, node, 60)
    assert (reading.up, len(node.opened_at)) == (True, 9)


@pytest.mark.parametrize(
    ("call", "value", "errors"),
    [
        ("memory", "memory", (NvmlNotSupportedError, NvmlPermissionError)),
        ("processes", "processes", (NvmlNotSupportedError, NvmlPermissionError, NvmlError)),
        ("utilization", "utilization_ratio", (NvmlNotSupportedError, NvmlError)),
    ],
)
def test_a_value_that_cannot_be_read_is_unknown_and_the_others_stay(
    reader: NodeReader, node: Node, call: str, value: str, errors: tuple[type[NvmlError], ...]
) -> None:
    unknown: dict[str, Any] = {value: None}
    whole = device(reader.read(), "GPU-3")
    for error in errors:
        node.failures[call, "GPU-3"] = error("no")
        assert device(reader.read(), "GPU-3") == replace(whole, **unknown)


def test_a_release_forgets_lost_devices(reader: NodeReader, node: Node) -> None:
    reader.read()
    node.failures["memory", "GPU-3"] = NvmlDeviceLostError("GPU is lost")
    reader.read()
    assert reader.release("a GPU is taken out").error == "a GPU is taken out"
    del node.listed[3]
    assert "GPU-3" not in [device.uuid for device in reader.read().devices]


def test_a_failure_that_comes_and_goes_each_second_is_logged_once_a_minute(
    reader: NodeReader, node: Node, caplog: pytest.LogCaptureFixture
) -> None:
    for _ in range(59):
        node.failures["memory", "GPU-3"] = NvmlError("timeout")
        poll_for(reader, node, 1)
        node.failures.clear()
        poll_for(reader, node, 1)
    assert len(caplog.records) == 2
    assert all("GPU-3: timeout" in record.message for record in caplog.records)


def test_the_active_processes_are_read_every_few_seconds_and_are_unknown_where_the_driver_does_not_show_them(
    node: Node, reader: NodeReader
) -> None:
    node.failures["activity", node.listed[1].uuid] = NvmlNotSupportedError("not supported")
    last = poll_for(reader, node, 10)
    assert [device.active_pids for device in last.devices[:2]] == [frozenset({30}), None]
    assert node.activity_reads == 2 * len(node.listed)
    assert all(device.up for device in last.devices)


def test_a_failure_that_stays_is_logged_though_another_one_was_logged_before(caplog: pytest.LogCaptureFixture) -> None:
    times = iter((0.0, 30.0, 59.0, 60.0))
    failures = FailureLog(logging.getLogger("test"), lambda: next(times))
    failures.failed("kubelet", "unavailable")
    failures.recovered("kubelet")
    for _ in range(9):
        failures.failed("kubelet", "permission denied")
    assert [record.getMessage() for record in caplog.records] == ["kubelet: unavailable", "kubelet: permission denied"]
