"""One poll of a driver that comes late, goes, loses devices and does not answer, with a scripted driver and clock."""

from __future__ import annotations

import logging
import re
from collections.abc import Sequence

import pytest

from gpumem_exporter.core.samples import DeviceMemory, DeviceReading, NodeReading, ProcessFacts, ProcessMemory
from gpumem_exporter.errors import (
    NvmlDeviceLostError,
    NvmlError,
    NvmlNotSupportedError,
    NvmlPermissionError,
    NvmlUnavailableError,
)
from gpumem_exporter.nvml.backoff import Backoff
from gpumem_exporter.nvml.provider import DeviceIdentity
from gpumem_exporter.nvml.reader import NodeReader
from gpumem_exporter.wire.protocol import ProcessIdentity

MEMORY = DeviceMemory(80, 19, 60, 1)


class Clock:
    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


class Node:
    """A scripted driver with eight GPUs. `failures` maps (call, uuid) to what it raises."""

    source = "nvml"

    def __init__(self) -> None:
        self.listed: list[DeviceIdentity] = [DeviceIdentity(str(i), f"GPU-{i}", "H100") for i in range(8)]
        self.failures: dict[tuple[str, str], Exception] = {}
        self.opened_at: list[float] = []
        self.is_open = False
        self.released = 0
        self.clock = Clock()
        self.processes = (ProcessMemory(30, 5),)

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

    def devices(self) -> Sequence[DeviceIdentity]:
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


class Host:
    def __init__(self) -> None:
        self.processes: dict[int, ProcessFacts] = {30: ProcessFacts(30, 100, "python train.py")}
        self.asked: list[int] = []
        self.failure: Exception | None = None

    def facts(self, pid: int) -> ProcessFacts | None:
        self.asked.append(pid)
        if self.failure:
            raise self.failure
        return self.processes.get(pid)

    def host_pid(self, identity: ProcessIdentity, peer_pid: int | None) -> int | None:
        return None

    def program(self, host_pid: int) -> int | None:
        return None

    def alive(self, host_pid: int, start_time_ticks: int) -> bool:
        return False


@pytest.fixture
def node() -> Node:
    return Node()


@pytest.fixture
def host() -> Host:
    return Host()


@pytest.fixture
def reader(node: Node, host: Host) -> NodeReader:
    return NodeReader(
        node,
        host,
        clock=node.clock,
        wall_clock=lambda: node.clock.now + 1e9,
        attach_backoff=Backoff(1.0, 30.0, jitter=lambda: 0.0),
        lost_backoff=Backoff(2.0, 60.0, jitter=lambda: 0.0),
    )


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


def test_a_reading_holds_every_device_and_who_is_on_it(reader: NodeReader) -> None:
    reading = reader.read()
    assert reading.up
    assert (reading.error, reading.driver_version) == ("", "580.159.04")
    assert reading.devices[3] == DeviceReading(
        "3", "GPU-3", "H100", memory=MEMORY, processes=(ProcessMemory(30, 5),), utilization_ratio=0.5
    )
    assert reading.facts == {30: ProcessFacts(30, 100, "python train.py")}


def test_a_reading_says_when_it_was_taken_and_how_long_it_took(node: Node, host: Host) -> None:
    times = iter(range(2000, 3000))
    reader = NodeReader(node, host, clock=lambda: float(next(times)), wall_clock=lambda: 5e8)
    reading = reader.read()
    assert reading.taken_unix_seconds == 5e8
    assert reading.duration_seconds == reading.taken_seconds - 2000 > 0


def test_a_process_on_all_devices_is_asked_for_once_and_one_that_is_gone_has_no_facts(
    reader: NodeReader, node: Node, host: Host
) -> None:
    node.processes = (ProcessMemory(30, 5), ProcessMemory(31, 6))
    assert set(reader.read().facts) == {30}
    assert sorted(host.asked) == [30, 31]


def test_what_the_host_fails_to_say_costs_nothing_of_what_the_driver_said(
    reader: NodeReader, host: Host, caplog: pytest.LogCaptureFixture
) -> None:
    host.failure = ZeroDivisionError("unforeseen")
    reader.read()
    reading = reader.read()
    assert len(up(reading)) == 8
    assert reading.facts == {}
    (record,) = caplog.records
    assert record.message.endswith(": ZeroDivisionError: unforeseen")


def test_a_driver_that_comes_late_is_attached_when_it_comes(reader: NodeReader, node: Node) -> None:
    node.failures["open", ""] = NvmlUnavailableError("no driver")
    reading = reader.read()
    assert (reading.up, reading.error, reading.devices) == (False, "no driver", ())
    assert poll_for(reader, node, 3).error == "no driver"
    node.failures.clear()
    assert len(up(poll_for(reader, node, 4))) == 8


def test_a_missing_driver_is_sought_after_1_2_4_8_16_and_then_every_30_seconds(reader: NodeReader, node: Node) -> None:
    node.failures["open", ""] = NvmlUnavailableError("no driver")
    reader.read()
    poll_for(reader, node, 130)
    assert [at - node.opened_at[0] for at in node.opened_at] == [0, 1, 3, 7, 15, 31, 61, 91, 121]


def test_a_driver_that_was_found_and_goes_again_is_sought_soon(reader: NodeReader, node: Node) -> None:
    node.failures["open", ""] = NvmlUnavailableError("no driver")
    reader.read()
    poll_for(reader, node, 60)
    node.failures.clear()
    assert poll_for(reader, node, 30).up
    node.failures["devices", ""] = NvmlUnavailableError("uninitialized")
    assert not poll_for(reader, node, 1).up
    node.failures.clear()
    assert poll_for(reader, node, 1).up


@pytest.mark.parametrize("error", [NvmlUnavailableError("gone"), NvmlError("unknown"), KeyError("unforeseen")])
def test_a_driver_that_does_not_list_its_devices_is_closed_and_opened_again(
    reader: NodeReader, node: Node, error: Exception
) -> None:
    reader.read()
    node.failures["devices", ""] = error
    assert not poll_for(reader, node, 1).up
    assert not node.is_open
    node.failures.clear()
    assert poll_for(reader, node, 1).up
    assert len(node.opened_at) == 2


def test_a_driver_that_does_not_say_its_version_is_read_without(reader: NodeReader, node: Node) -> None:
    node.failures["driver_version", ""] = NvmlNotSupportedError("no")
    reading = reader.read()
    assert (reading.up, reading.driver_version) == (True, "")


def test_a_device_lost_while_it_is_read_keeps_its_identity_and_has_no_figures(reader: NodeReader, node: Node) -> None:
    for call in ("memory", "processes", "utilization"):
        node.failures = {(call, "GPU-3"): NvmlDeviceLostError("GPU is lost")}
        reading = reader.read()
        assert device(reading, "GPU-3") == DeviceReading("3", "GPU-3", "H100", error="GPU is lost")
        assert up(reading) == [f"GPU-{i}" for i in (0, 1, 2, 4, 5, 6, 7)]


def test_a_lost_device_that_no_longer_says_its_name_keeps_the_one_it_had(reader: NodeReader, node: Node) -> None:
    reader.read()
    node.listed[3] = DeviceIdentity("3", "", error="GPU is lost")
    for _ in range(3):
        assert device(reader.read(), "GPU-3") == DeviceReading("3", "GPU-3", "H100", error="GPU is lost")


def test_a_device_lost_from_the_start_is_told_by_its_index(reader: NodeReader, node: Node) -> None:
    node.listed[3] = DeviceIdentity("3", "", error="GPU is lost")
    assert device(reader.read(), "") == DeviceReading("3", "", error="GPU is lost")


def test_a_lost_device_that_the_driver_stops_counting_stays_lost_until_it_is_back(
    reader: NodeReader, node: Node
) -> None:
    reader.read()
    node.failures["memory", "GPU-3"] = NvmlDeviceLostError("GPU is lost")
    reader.read()
    back = node.listed.copy()
    node.listed = [DeviceIdentity(str(i), uuid) for i, uuid in enumerate(f"GPU-{n}" for n in (0, 1, 2, 4, 5, 6, 7))]
    reading = poll_for(reader, node, 200)
    assert len(up(reading)) == 7
    assert device(reading, "GPU-3").error == "GPU is lost"
    node.listed = back
    node.failures.clear()
    assert len(up(poll_for(reader, node, 1))) == 8


@pytest.mark.parametrize(("lost", "keeps"), [(3, False), (7, True)])
def test_a_lost_device_keeps_its_index_until_the_driver_gives_it_to_another(
    reader: NodeReader, node: Node, lost: int, keeps: bool
) -> None:
    reader.read()
    back = node.listed.copy()
    node.failures["memory", f"GPU-{lost}"] = NvmlDeviceLostError("GPU is lost")
    assert device(reader.read(), f"GPU-{lost}").gpu == str(lost)
    rest = [identity for identity in back if identity.uuid != f"GPU-{lost}"]
    node.listed = [DeviceIdentity(str(index), identity.uuid) for index, identity in enumerate(rest)]
    for _ in range(3):
        reading = reader.read()
        assert (device(reading, f"GPU-{lost}").gpu, device(reading, f"GPU-{lost}").up) == (str(lost) * keeps, False)
        assert len({each.gpu for each in reading.devices}) == 8
    node.listed = [DeviceIdentity(str(lost), "", error="GPU is lost") if i == lost else d for i, d in enumerate(back)]
    assert device(reader.read(), f"GPU-{lost}").gpu == str(lost)


def test_a_nameless_device_does_not_take_the_name_of_one_that_is_there_under_another_index(
    reader: NodeReader, node: Node
) -> None:
    reader.read()
    node.listed = [DeviceIdentity("0", "GPU-3"), DeviceIdentity("3", "", error="GPU is lost")]
    reading = reader.read()
    assert [(d.gpu, d.uuid, d.error) for d in reading.devices] == [("0", "GPU-3", ""), ("3", "", "GPU is lost")]


def test_a_device_that_goes_in_good_health_is_gone(reader: NodeReader, node: Node) -> None:
    reader.read()
    del node.listed[7]
    assert [reading.uuid for reading in reader.read().devices] == [f"GPU-{i}" for i in range(7)]


def test_a_lost_gpu_takes_its_mig_devices_with_it_by_name(reader: NodeReader, node: Node) -> None:
    node.listed[1:] = [DeviceIdentity(f"1:{i}", f"MIG-{i}", parent_uuid="GPU-1") for i in (0, 2)]
    reader.read()
    node.listed[1:] = [DeviceIdentity("1", "", error="GPU is lost")]
    reading = reader.read()
    assert [(d.gpu, d.uuid, d.error) for d in reading.devices] == [
        ("0", "GPU-0", ""),
        ("1:0", "MIG-0", "GPU is lost"),
        ("1:2", "MIG-2", "GPU is lost"),
    ]


def test_a_mig_device_that_is_destroyed_while_it_is_read_is_gone_at_the_next_poll(
    reader: NodeReader, node: Node
) -> None:
    node.listed[1:] = [DeviceIdentity(f"1:{i}", f"MIG-{i}", parent_uuid="GPU-1") for i in (0, 2)]
    node.failures["memory", "MIG-2"] = NvmlError("not found")
    assert up(reader.read()) == ["GPU-0", "MIG-0"]
    del node.listed[2]
    assert [reading.uuid for reading in reader.read().devices] == ["GPU-0", "MIG-0"]


def test_a_lost_device_is_sought_by_initializing_the_driver_ever_more_rarely(reader: NodeReader, node: Node) -> None:
    reader.read()
    node.failures["memory", "GPU-3"] = NvmlDeviceLostError("GPU is lost")
    poll_for(reader, node, 200)
    assert [at - node.opened_at[0] for at in node.opened_at] == [0, 3, 7, 15, 31, 63, 123, 183]


def test_the_healthy_devices_have_figures_in_every_poll_while_a_lost_one_is_sought(
    reader: NodeReader, node: Node
) -> None:
    node.failures["memory", "GPU-3"] = NvmlDeviceLostError("GPU is lost")
    for _ in range(200):
        assert len(up(poll_for(reader, node, 1))) == 7


def test_a_lost_device_that_comes_back_is_read_again(reader: NodeReader, node: Node) -> None:
    node.failures["memory", "GPU-3"] = NvmlDeviceLostError("GPU is lost")
    poll_for(reader, node, 10)
    node.failures.clear()
    assert device(poll_for(reader, node, 1), "GPU-3").memory == MEMORY
    opened = len(node.opened_at)
    poll_for(reader, node, 200)
    assert len(node.opened_at) == opened


def test_a_driver_without_devices_is_up_and_asked_again_for_some(reader: NodeReader, node: Node) -> None:
    listed, node.listed = node.listed, []
    reading = reader.read()
    assert (reading.up, reading.devices) == (True, ())
    poll_for(reader, node, 10)
    assert len(node.opened_at) > 1
    node.listed = listed
    assert len(up(poll_for(reader, node, 1))) == 8


def test_nvml_gone_for_one_device_is_that_devices_trouble(reader: NodeReader, node: Node) -> None:
    node.failures["memory", "GPU-3"] = NvmlUnavailableError("NVML is not initialized")
    reading = reader.read()
    assert reading.up
    assert len(up(reading)) == 7


def test_nvml_gone_for_every_device_is_the_drivers_trouble(reader: NodeReader, node: Node) -> None:
    reader.read()
    for i in range(8):
        node.failures["memory", f"GPU-{i}"] = NvmlUnavailableError("NVML is not initialized")
    reading = reader.read()
    assert (reading.up, reading.error, reading.devices) == (False, "NVML is not initialized", ())
    assert not node.is_open


def test_all_devices_lost_is_a_driver_that_is_up(reader: NodeReader, node: Node) -> None:
    for i in range(8):
        node.failures["memory", f"GPU-{i}"] = NvmlDeviceLostError("GPU is lost")
    reading = reader.read()
    assert reading.up
    assert [d.error for d in reading.devices] == ["GPU is lost"] * 8


@pytest.mark.parametrize("error", [NvmlNotSupportedError("no"), NvmlPermissionError("no")])
def test_a_device_without_a_memory_figure_is_up_and_has_its_other_figures(
    reader: NodeReader, node: Node, error: Exception
) -> None:
    node.failures["memory", "GPU-3"] = error
    assert device(reader.read(), "GPU-3") == DeviceReading(
        "3", "GPU-3", "H100", processes=(ProcessMemory(30, 5),), utilization_ratio=0.5
    )


@pytest.mark.parametrize("error", [NvmlNotSupportedError("no"), NvmlPermissionError("no"), NvmlError("timeout")])
def test_a_process_list_that_cannot_be_read_is_unknown_and_not_empty(
    reader: NodeReader, node: Node, error: Exception
) -> None:
    node.failures["processes", "GPU-3"] = error
    reading = device(reader.read(), "GPU-3")
    assert (reading.up, reading.memory, reading.processes) == (True, MEMORY, None)


@pytest.mark.parametrize("error", [NvmlNotSupportedError("no"), NvmlError("timeout")])
def test_a_utilization_that_cannot_be_read_is_unknown(reader: NodeReader, node: Node, error: Exception) -> None:
    node.failures["utilization", "GPU-3"] = error
    reading = device(reader.read(), "GPU-3")
    assert (reading.up, reading.memory, reading.utilization_ratio) == (True, MEMORY, None)


@pytest.mark.parametrize("error", [NvmlError("timeout"), KeyError("unforeseen")])
def test_a_device_that_does_not_answer_fails_alone(reader: NodeReader, node: Node, error: Exception) -> None:
    node.failures["memory", "GPU-3"] = error
    reading = reader.read()
    assert len(up(reading)) == 7
    assert device(reading, "GPU-3").memory is None
    assert device(reading, "GPU-3").error


def test_a_released_driver_is_let_go_whole_and_taken_up_at_the_next_reading(reader: NodeReader, node: Node) -> None:
    reader.read()
    reading = reader.release("released on request")
    assert (reading.up, reading.error, reading.devices) == (False, "released on request", ())
    assert (node.is_open, node.released) == (False, 1)
    assert len(up(reader.read())) == 8


def test_releasing_a_driver_that_is_not_there_lets_go_of_its_library_and_it_is_tried_again_at_once(
    reader: NodeReader, node: Node
) -> None:
    node.failures["open", ""] = NvmlUnavailableError("no driver")
    poll_for(reader, node, 20)
    attempts = len(node.opened_at)
    reader.release("released on request")
    assert node.released == 1
    reader.read()
    assert len(node.opened_at) == attempts + 1


def test_a_device_that_was_lost_before_a_release_is_not_remembered_after_it(reader: NodeReader, node: Node) -> None:
    reader.read()
    node.failures["memory", "GPU-3"] = NvmlDeviceLostError("GPU is lost")
    reader.read()
    reader.release("a GPU is taken out")
    del node.listed[3]
    assert "GPU-3" not in [device.uuid for device in reader.read().devices]


def test_a_driver_that_is_asked_for_is_tried_however_lately_it_was_tried(reader: NodeReader, node: Node) -> None:
    node.failures["open", ""] = NvmlUnavailableError("no driver")
    poll_for(reader, node, 20)
    node.failures.clear()
    assert not reader.read().up
    reader.retry_attach_now()
    assert reader.read().up


def test_a_trouble_is_logged_when_it_begins_and_when_it_ends_and_not_each_second(
    reader: NodeReader, node: Node, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    node.failures["open", ""] = NvmlUnavailableError("no driver")
    reader.read()
    poll_for(reader, node, 100)
    node.failures = {
        ("memory", "GPU-3"): NvmlDeviceLostError("GPU is lost"),
        ("processes", "GPU-2"): NvmlPermissionError("no permission"),
    }
    poll_for(reader, node, 200)
    node.failures.clear()
    poll_for(reader, node, 2)
    expected = [
        ("WARNING", "NVML: no driver"),
        ("WARNING", r"processes\b.*\b2: no permission"),
        ("WARNING", "3 GPU-3: GPU is lost"),
        ("INFO", "NVML: "),
        ("INFO", r"processes\b.*\b2: "),
        ("INFO", "3 GPU-3: "),
    ]
    assert [record.levelname for record in caplog.records] == [level for level, _ in expected]
    assert all(re.search(named, record.message) for record, (_, named) in zip(caplog.records, expected, strict=True))


def test_a_trouble_that_comes_and_goes_each_second_is_told_once_a_minute(
    reader: NodeReader, node: Node, caplog: pytest.LogCaptureFixture
) -> None:
    for _ in range(59):
        node.failures["memory", "GPU-3"] = NvmlError("timeout")
        poll_for(reader, node, 1)
        node.failures.clear()
        poll_for(reader, node, 1)
    assert len(caplog.records) == 2
    assert all("GPU-3: timeout" in record.message for record in caplog.records)


@pytest.mark.parametrize(("jitter", "delay"), [(0.0, 8.0), (1.0, 4.0), (0.5, 6.0)])
def test_a_delay_is_cut_by_up_to_half_of_itself(jitter: float, delay: float) -> None:
    backoff = Backoff(2.0, 60.0, jitter=lambda: jitter)
    for _ in range(3):
        backoff.failed(100.0)
    assert not backoff.due(100.0 + delay - 0.001)
    assert backoff.due(100.0 + delay)


def test_a_delay_never_exceeds_its_cap_however_often_it_failed() -> None:
    backoff = Backoff(1.0, 30.0, jitter=lambda: 0.0)
    for _ in range(5000):
        backoff.failed(100.0)
    assert backoff.due(130.0)
    backoff.succeeded()
    assert backoff.due(0.0)
