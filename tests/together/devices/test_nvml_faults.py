"""A driver that is missing, fails, restarts or hangs: the exporter continues, and its values are exact.

The real exporter runs on an emulated node with a reporting PyTorch process. Every scrape checks that ledgers add up.
"""

from __future__ import annotations

import json
import re
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest

from tests.conftest import StartExporter
from tests.emulation.fixtures import StartTorch
from tests.emulation.node import GIB, MIB, NVML_ERROR_DRIVER_NOT_LOADED, NVML_ERROR_NO_PERMISSION, EmulatedNode
from tests.emulation.torch_process import TorchProcess
from tests.support.servers.exporter_process import QUICK, ExporterProcess, Metrics
from tests.support.truth.device_truth import (
    ATTACH_SECONDS,
    FOREIGN_PID,
    scrape,
    start_reporting,
    truth,
    wait_until_right,
)
from tests.support.waiting import eventually, patient, wait_for, wait_until_equal

ANSWER_SECONDS = patient(20.0)
"""The limit for an answer while a driver call hangs."""
DEVICE_SERIES = (
    "gpumem_device_memory_total_bytes",
    "gpumem_device_memory_used_bytes",
    "gpumem_device_memory_free_bytes",
    "gpumem_device_memory_reserved_bytes",
    "gpumem_device_utilization_ratio",
    "gpumem_ledger_bytes",
    "gpumem_process_memory_used_bytes",
)
"""Every series of a device with values of the driver, except `_info` and `_up`."""


@dataclass(frozen=True)
class Watched:
    """An exporter and the PyTorch process that reports to it."""

    node: EmulatedNode
    exporter: ExporterProcess
    process: TorchProcess

    def scrape(self) -> Metrics:
        return scrape(self.exporter)

    def wait_for_health(self, status: int, word: str) -> Any:
        def read() -> tuple[int, Any]:
            answer = self.exporter.request("GET", "/health")
            return answer.status, json.loads(answer.body)

        return eventually(read, lambda found: (found[0], found[1]["status"]) == (status, word), what=word)[1]

    def devices_up(self) -> list[int]:
        """Return the values of `gpumem_device_up` in the driver's order; empty without devices."""
        found = self.scrape().samples.get("gpumem_device_up", {}).items()
        return [int(value) for _, value in sorted((int(dict(labels)["gpu"]), value) for labels, value in found)]

    def assert_torch_series_flow(self, device: int, gpu: str) -> None:
        """Allocate, and wait for the value in a scrape, with the label `gpu` ("" while it is unknown)."""
        self.process.call("alloc", nbytes=6 * MIB, device=device)
        now = float(self.process.call("stats", device=device)["allocated_bytes.all.current"])
        wanted = {"uuid": self.node.uuid(device), "pid": str(self.process.pid), "gpu": gpu}
        wait_until_equal(
            lambda: self.scrape().values("gpumem_torch_allocated_bytes", **wanted), [now], f"bytes on {wanted}"
        )

    def wait_until_all_is_right(self, *devices: int) -> Metrics:
        """Wait for a scrape with the expected values of these devices."""
        reporting = {device: [self.process] for device in devices}
        return wait_until_right(self.exporter, self.node, devices, reporting, all_visible=True)


@pytest.fixture
def watch(start_exporter: StartExporter, start_torch: StartTorch) -> Callable[..., Watched]:
    """Return a function that starts an exporter on a node and a PyTorch process with a heap on each of `devices`."""

    def watched(node: EmulatedNode, devices: tuple[int, ...] = (0,)) -> Watched:
        exporter = start_exporter(node, *QUICK)
        return Watched(node, exporter, start_reporting(start_torch, exporter, devices))

    return watched


def assert_no_values(metrics: Metrics, uuid: str) -> None:
    """Assert that the device has no series with values of the driver."""
    for name in DEVICE_SERIES:
        assert metrics.values(name, uuid=uuid) == [], name


def test_without_a_driver_the_exporter_runs_and_attaches_later(
    node: EmulatedNode, watch: Callable[..., Watched]
) -> None:
    node.set_init_error(NVML_ERROR_DRIVER_NOT_LOADED)
    watched = watch(node)
    health = watched.wait_for_health(200, "degraded")
    assert health["nvml"]["up"] is False
    assert "driver" in health["nvml"]["error"].lower()
    assert (health["devices"], health["processes"]) == (0, 1)
    metrics = watched.scrape()
    assert metrics.value("gpumem_nvml_up") == 0
    assert metrics.samples.get("gpumem_device_up", {}) == {}
    for device in (0, 1):
        assert_no_values(metrics, node.uuid(device))
    watched.assert_torch_series_flow(0, gpu="")
    node.set_init_error(0)
    wait_until_equal(watched.devices_up, [1, 1], "devices that answer", ATTACH_SECONDS)
    metrics = watched.wait_until_all_is_right(0, 1)
    assert metrics.value("gpumem_nvml_up") == 1
    watched.assert_torch_series_flow(0, gpu="0")
    assert watched.wait_for_health(200, "ok")["nvml"] == {"up": True, "error": "", "released": False}


def test_an_unreadable_process_list_is_unknown(node: EmulatedNode, watch: Callable[..., Watched]) -> None:
    node.set_process(FOREIGN_PID, 0, GIB)
    watched = watch(node, devices=(0, 1))
    watched.wait_until_all_is_right(0, 1)
    uuid, pid = node.uuid(0), str(watched.process.pid)
    with node.fail("nvmlDeviceGetComputeRunningProcesses*", NVML_ERROR_NO_PERMISSION, device=0):
        wait_for(lambda: not watched.scrape().values("gpumem_process_memory_used_bytes", uuid=uuid), "the list to go")
        watched.assert_torch_series_flow(0, gpu="0")
        watched.wait_until_all_is_right(1)
        stats = {watched.process.pid: watched.process.call("stats")}
        whole = truth(node.books()[0], stats)["ledger"]
        assert whole["other_processes"] == GIB
        # The owner of the other used bytes is unknown, so they are unattributed.
        unowned = whole.pop("other_processes") + whole.pop("non_torch") + whole.pop("unattributed")
        wanted = {**whole, "unattributed": unowned}
        wait_until_equal(lambda: watched.scrape().ledgers()[uuid], wanted, "a ledger without owners")
        metrics = watched.scrape()
        assert metrics.values("gpumem_torch_non_torch_bytes", uuid=uuid, pid=pid) == []
        assert metrics.value("gpumem_device_up", uuid=uuid) == 1
    watched.wait_until_all_is_right(0, 1)


def test_a_hung_driver_call_delays_no_page_and_keeps_no_old_value(
    node: EmulatedNode, watch: Callable[..., Watched]
) -> None:
    watched = watch(node)
    watched.wait_until_all_is_right(0, 1)
    with node.hang("nvmlDeviceGetMemoryInfo*") as hang:
        hang.wait_for_waiting()
        health = watched.wait_for_health(503, "failing")
        assert health["checks"]["poller"]["status"] == "failing"
        assert re.search(r"\b\d+ s\b", health["checks"]["poller"]["detail"])
        wait_until_equal(watched.devices_up, [], "devices that answer")
        metrics = watched.scrape()
        assert metrics.values("gpumem_nvml_up") == [0]
        for device in (0, 1):
            assert_no_values(metrics, node.uuid(device))
        watched.assert_torch_series_flow(0, gpu="")
        for path in ("/metrics", "/health", "/-/healthy", "/-/ready", "/", "/api/v1/devices", "/api/v1/processes"):
            begun = time.monotonic()
            assert watched.exporter.request("GET", path).status in (200, 503)
            assert time.monotonic() - begun < ANSWER_SECONDS, path
        # actions of the reporter do not need the exporter's driver
        action = watched.exporter.act("empty_cache", target={"pid": watched.process.pid})
        assert action["state"] == "done"
        assert hang.waiting == 1
    wait_until_equal(watched.devices_up, [1, 1], "devices that answer")
    watched.wait_until_all_is_right(0, 1)
    watched.wait_for_health(200, "ok")
    watched.assert_torch_series_flow(0, gpu="0")
    with node.hang("nvml*") as hang:
        hang.wait_for_waiting()
        assert watched.exporter.stop() == 0, "SIGTERM ends it while the driver hangs"
    watched.process.call("alloc", nbytes=MIB)
    assert watched.process.finish() == 0
