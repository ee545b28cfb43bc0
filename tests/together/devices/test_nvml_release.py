"""Releasing and attaching NVML on the emulated node while the exporter runs."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from tests.conftest import StartExporter
from tests.emulation.fixtures import MakeNode, StartTorch
from tests.emulation.node import MIB, NVML_ERROR_DRIVER_NOT_LOADED, EmulatedNode
from tests.support.processes.running_command import run_command
from tests.support.servers.exporter_process import QUICK, ExporterProcess
from tests.support.truth.device_truth import FOREIGN_PID, scrape, series_of, start_reporting, wait_until_right
from tests.support.waiting import wait_for

RELEASE, ATTACH = "/api/v1/nvml/release", "/api/v1/nvml/attach"


def request(exporter: ExporterProcess, path: str, expect: int = 200, **body: Any) -> Any:
    answer = exporter.request("POST", path, body)
    assert answer.status == expect, answer
    return json.loads(answer.body)


def held(exporter: ExporterProcess, node: EmulatedNode) -> set[str]:
    """The files of the driver that the exporter has mapped or open: NVML's library, its device file."""
    process = Path(f"/proc/{exporter.pid}")
    links = [str(link.readlink()) for link in (process / "fd").iterdir() if link.is_symlink()]
    mapped = [line.split(maxsplit=5)[5] for line in (process / "maps").read_text().splitlines() if line.count("/")]
    names = {"libnvidia-ml": "library", node.nvml_device_file.name: "device file"}
    return {what for path in (*links, *mapped) for part, what in names.items() if part in path}


def test_after_a_release_no_driver_file_is_open_and_torch_series_remain(
    node: EmulatedNode, start_exporter: StartExporter, start_torch: StartTorch
) -> None:
    exporter = start_exporter(node, *QUICK)
    process = start_reporting(start_torch, exporter)
    wait_until_right(exporter, node, (0, 1), {0: [process]})
    assert held(exporter, node) == {"library", "device file"}

    answer = request(exporter, RELEASE, reason="driver upgrade")
    assert held(exporter, node) == set()
    who = f"unix:uid={os.geteuid()}:pid={os.getpid()}"
    error = answer["error"]
    assert (answer["state"], answer["held"]) == ("released", [])
    assert who in error
    assert "driver upgrade" in error
    metrics = scrape(exporter)
    assert metrics.value("gpumem_nvml_up") == 0
    of_nvml = ("gpumem_device_", "gpumem_ledger_", "gpumem_process_memory_", "gpumem_torch_non_torch_")
    for device in (0, 1):
        assert [name for name in series_of(metrics, uuid=node.uuid(device)) if name.startswith(of_nvml)] == []
    health = exporter.get("/health")
    assert (health["status"], health["nvml"]) == ("degraded", {"up": False, "error": error, "released": True})

    # NVML stays released for longer than the interval of attempts to attach, also during other requests.
    node.restart_driver()
    init = node.slow("nvmlInit*", 0)
    process.call("alloc", nbytes=6 * MIB)
    allocated = process.call("stats")["allocated_bytes.all.current"]
    labels = {"pid": str(process.pid), "uuid": node.uuid(0)}
    wait_for(
        lambda: scrape(exporter).values("gpumem_torch_allocated_bytes", **labels) == [allocated],
        "the process' allocated memory",
    )
    assert exporter.act("empty_cache", target={"pid": process.pid})["state"] == "done"
    polls = exporter.metrics().value("gpumem_poll_timestamp_seconds")
    wait_for(lambda: exporter.metrics().value("gpumem_poll_timestamp_seconds") > polls + 2, "two seconds of polls")
    assert request(exporter, RELEASE, reason="again") == answer
    assert (init.hits, held(exporter, node)) == (0, set())

    attached = request(exporter, ATTACH, reason="done")
    assert (attached["state"], attached["error"], attached["requested_by"]) == ("attached", "", None)
    assert held(exporter, node) == {"library", "device file"}
    wait_until_right(exporter, node, (0, 1), {0: [process]})
    assert exporter.get("/health")["status"] == "ok"
    assert request(exporter, ATTACH)["state"] == "attached"
    actions = [entry for entry in exporter.get("/api/v1/actions")["actions"] if entry["action"].startswith("nvml_")]
    assert [(entry["action"], entry["requested_by"], entry["reason"], entry["state"]) for entry in actions] == [
        ("nvml_attach", who, "done", "done"),
        ("nvml_release", who, "driver upgrade", "done"),
    ]
    for _ in range(20):
        assert request(exporter, RELEASE)["state"] == "released"
        assert held(exporter, node) == set()
        assert request(exporter, ATTACH)["state"] == "attached"
    files = [link.readlink() for link in Path(f"/proc/{exporter.pid}/fd").iterdir() if link.is_symlink()]
    assert files.count(node.nvml_device_file) == 1


def test_attach_loads_a_replaced_driver(make_node: MakeNode, start_exporter: StartExporter, tmp_path: Path) -> None:
    node = make_node(nvml="v1")
    there = tmp_path / "driver"
    there.symlink_to(node.libraries / "v1")
    library_path = f"{there}:{os.environ.get('LD_LIBRARY_PATH', '')}"
    exporter = start_exporter(node, *QUICK, environment={"LD_LIBRARY_PATH": library_path})
    node.set_process(FOREIGN_PID, 0, 5 * MIB)
    wait_for(lambda: scrape(exporter).values("gpumem_process_memory_used_bytes") == [5 * MIB], "the process")
    assert scrape(exporter).values("gpumem_device_memory_reserved_bytes") == []  # unknown to the old driver
    request(exporter, RELEASE)
    there.unlink()
    there.symlink_to(node.libraries)
    request(exporter, ATTACH)
    wait_until_right(exporter, node, (0, 1), {})


def test_the_commands_and_their_exit_codes(node: EmulatedNode, start_exporter: StartExporter) -> None:
    exporter = start_exporter(node, *QUICK)

    def command(*words: str, code: int | None = 0) -> str:
        done = run_command(*words, GPUMEM_EXPORTER_URL=exporter.url)
        assert code in (done.returncode, None), done
        return done.stdout + done.stderr

    command("release-nvml", "--reason", "driver upgrade")
    assert held(exporter, node) == set()
    assert json.loads(command("release-nvml", "--json"))["reason"] == "driver upgrade"
    doctor = command("doctor", code=None)
    assert "gpumem-exporter attach-nvml" in doctor
    assert "the exporter has no driver: released" in doctor, "no driver is opened during maintenance"
    node.set_init_error(NVML_ERROR_DRIVER_NOT_LOADED)
    command("attach-nvml", code=1)
    node.set_init_error(0)
    command("attach-nvml")
    assert "device file" in held(exporter, node)
    with node.hang("nvmlDeviceGetMemoryInfo*") as hang:
        hang.wait_for_waiting()
        command("release-nvml", "--wait", "0.1", code=1)
    assert "--wait" in command("release-nvml", "--wait", "61", code=2)
    (invalid,) = request(exporter, RELEASE, expect=422, reson="typo")["errors"]
    assert invalid["field"] == "reson"
