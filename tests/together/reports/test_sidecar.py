"""An exporter in a pod's PID namespace, which cannot match the driver's pids with its reporters."""

from __future__ import annotations

import json
import os
from pathlib import Path

from tests.conftest import StartExporter
from tests.emulation.fixtures import StartTorch
from tests.emulation.node import GIB, MIB, EmulatedNode
from tests.emulation.torch_process import TorchProcess
from tests.support.exporter_process import QUICK, ExporterProcess, token_file
from tests.support.namespaces import CONTAINER, children, needs_namespaces
from tests.support.paths import REPOSITORY
from tests.support.waiting import wait_for

pytestmark = needs_namespaces


def main_pid(launcher_pid: int) -> int:
    """Return the host's pid of the only process below a launcher."""
    (pid,) = children(launcher_pid)
    return pid


def shared_namespace(exporter: ExporterProcess) -> tuple[str, ...]:
    """Return a launcher that starts a program in the exporter's PID namespace, as shareProcessNamespace does."""
    assert exporter._popen is not None
    return ("nsenter", "--target", str(main_pid(exporter._popen.pid)), "--pid", "--mount", f"--wd={REPOSITORY}", "--")


def start_trainer(start_torch: StartTorch, launcher: tuple[str, ...], url: str) -> TorchProcess:
    process = start_torch(launcher=launcher, GPUMEM_EXPORTER_URL=url)
    process.call("start_client", workload="train")
    process.call("alloc", nbytes=40 * MIB)
    return process


def wait_for_polls(exporter: ExporterProcess) -> None:
    """Wait until three further polls have ended."""

    def polls() -> int:
        return int(exporter.get("/health")["checks"]["poller"]["detail"].split()[0])

    before = polls()
    wait_for(lambda: polls() >= before + 3, "further polls")


def assert_others_are_unknown(exporter: ExporterProcess, node: EmulatedNode, reserved: int) -> dict[str, int]:
    """Check and return the ledger of the first device, whose reporters have reserved this much."""
    metrics = exporter.metrics()
    metrics.assert_ledgers_add_up()
    ledger = metrics.ledgers()[node.uuid(0)]
    assert not ledger.keys() & {"other_processes", "non_torch"}
    assert sum(ledger[f"torch_{part}"] for part in ("allocated", "reclaimable", "fragmented")) == reserved
    assert ledger["unattributed"] == node.books()[0].used_bytes - reserved
    assert metrics.values("gpumem_torch_non_torch_bytes") == []
    assert metrics.values("gpumem_process_memory_used_bytes") == []
    assert exporter.get("/health")["mode"] == "sidecar"
    return ledger


def test_a_sidecar_shows_its_reporters_and_leaves_the_rest_unattributed(
    node: EmulatedNode, start_exporter: StartExporter, start_torch: StartTorch, tmp_path: Path
) -> None:
    token = token_file(tmp_path, "right")  # the exporter cannot see this caller
    node.set_process(31337, 0, GIB)  # of another pod
    exporter = start_exporter(node, *QUICK, "--action.token-file", token, launcher=CONTAINER)
    wait_for_polls(exporter)
    assert_others_are_unknown(exporter, node, 0)

    inside = start_trainer(start_torch, shared_namespace(exporter), exporter.tcp_url)
    node.show_pid_as(inside.pid, main_pid(inside._popen.pid))
    beside = start_trainer(start_torch, CONTAINER, exporter.url)
    reserved = 40 * MIB
    wait_for(lambda: exporter.metrics().values("gpumem_torch_reserved_bytes") == [reserved] * 2, "their reports")
    wait_for_polls(exporter)
    assert assert_others_are_unknown(exporter, node, 2 * reserved)["torch_allocated"] == 2 * reserved

    entries = {entry["host_pid"]: entry for entry in exporter.get("/api/v1/processes")["processes"]}
    names = {inside.pid: inside.pid, None: f"{beside.pid}@{entries[None]['pid_namespace']}:{os.geteuid()}"}
    assert {host_pid: entry["pid"] for host_pid, entry in entries.items()} == names
    assert {entry["own_pid"] for entry in entries.values()} == {inside.pid, beside.pid}
    for entry in entries.values():
        (device,) = entry["devices"]
        assert (device["reserved_bytes"], device["used_bytes"], device["non_torch_bytes"]) == (reserved, None, None)

    for trainer, name in ((inside, names[inside.pid]), (beside, names[None])):
        trainer.call("free")
        request = {"action": "empty_cache", "target": {"pid": name}}
        answer = exporter.request("POST", "/api/v1/actions", request, {"Authorization": "Bearer right"})
        (row,) = json.loads(answer.body)["results"]
        assert (row["outcome"], row["freed_bytes"]) == ("done", reserved)
        trainer.finish()
    wait_for(lambda: exporter.get("/api/v1/processes")["processes"] == [], "their end")
    wait_for_polls(exporter)
    assert_others_are_unknown(exporter, node, 0)
    assert exporter.log().count("PID namespace") == 1
