"""Profiles of real torch on an emulated node, at a real exporter, also of a job that has ended."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tests.conftest import StartExporter
from tests.emulation.fixtures import StartTorch
from tests.emulation.node import EmulatedNode
from tests.emulation.torch_process import TorchProcess
from tests.support.exporter_process import QUICK, ExporterProcess
from tests.support.waiting import wait_for

PROFILES = "/api/v1/profiles"
HOLD = "import gpumem_client; gpumem_client.start(); held = [torch.empty(3 << 20, device='cuda') for _ in range(4)]"
LOSE = "try:\n    torch.empty(1 << 40, dtype=torch.uint8, device='cuda')\nexcept torch.OutOfMemoryError: pass"


def hold(exporter: ExporterProcess, process: TorchProcess) -> None:
    """Let the process allocate memory and report it."""
    process.exec(HOLD)
    wait_for(lambda: process.pid in exporter.processes(), "a report")


def act(exporter: ExporterProcess, process: TorchProcess, **changes: Any) -> Any:
    (result,) = exporter.act("profile", target={"pid": process.pid}, wait_seconds=30, **changes)["results"]
    assert result["outcome"] == "done", result
    return exporter.get(f"{PROFILES}/{result['profile']}")


def test_profiles_of_a_running_process_add_up_to_what_torch_has_allocated(
    node: EmulatedNode, start_exporter: StartExporter, start_torch: StartTorch
) -> None:
    exporter = start_exporter(node, *QUICK)
    process = start_torch(GPUMEM_EXPORTER_URL=exporter.url)
    hold(exporter, process)
    now = act(exporter, process)
    allocated = process.call("stats")["allocated_bytes.all.current"]
    assert sum(row["bytes"] for row in now["rows"]) == allocated == 48 << 20
    recorded = act(exporter, process, duration_seconds=0.2)
    assert recorded["recorded_seconds"] >= 0.2
    newest, oldest = exporter.get(PROFILES)["profiles"]
    assert [newest["id"], oldest["id"]] == [recorded["id"], now["id"]]
    difference = exporter.get(f"{PROFILES}/{now['id']}/diff/{recorded['id']}")
    assert sum(row["change_bytes"] for row in difference["rows"]) == 0
    scraped = exporter.get(f"/api/v1/processes/{process.pid}/profile?format=json")
    assert sum(row["bytes"] for row in scraped["rows"]) == allocated
    assert len(exporter.get(PROFILES)["profiles"]) == 2


def test_a_process_that_is_killed_during_its_recording_ends_the_action(
    node: EmulatedNode, start_exporter: StartExporter, start_torch: StartTorch
) -> None:
    exporter = start_exporter(node, *QUICK)
    process = start_torch(GPUMEM_EXPORTER_URL=exporter.url)
    hold(exporter, process)
    target = {"pid": process.pid}
    started = exporter.act("profile", target=target, duration_seconds=600, wait_seconds=0, expect=202)
    process.exec("from tests.programs.profiled import wait_for_recording; wait_for_recording()")
    process.kill()

    def ended() -> Any:
        action = exporter.get(f"/api/v1/actions/{started['id']}")
        return action if action["state"] not in ("pending", "running") else None

    (result,) = wait_for(ended, "the end of the action")["results"]
    assert result["reason_code"] == "process_exited"


def test_the_profile_of_an_error_outlives_its_process_and_the_exporter(
    node: EmulatedNode, start_exporter: StartExporter, start_torch: StartTorch, tmp_path: Path
) -> None:
    exporter = start_exporter(node, *QUICK, "--storage.path", str(tmp_path / "storage"))
    process = start_torch(GPUMEM_EXPORTER_URL=exporter.url, GPUMEM_OOM_PROFILE="1")
    hold(exporter, process)
    process.exec(LOSE)

    def profiled() -> str:
        events = exporter.get("/api/v1/events?type=oom")["events"]
        return str(next((each["detail"]["profile"] or "" for each in events), ""))

    profile_id = wait_for(profiled, "the profile of the error")
    process.close()
    exporter.stop()
    exporter.start()
    assert wait_for(profiled, "the files of the earlier exporter") == profile_id
    found = exporter.get(f"{PROFILES}/{profile_id}")
    assert found["cause"] == "out_of_memory"
    assert sum(row["bytes"] for row in found["rows"]) == 48 << 20
