"""Profiles of real torch on an emulated node, at a real exporter, also of a job that has ended."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.guest import Profiles, jobs
from benchmarks.place import Place
from tests.conftest import StartExporter
from tests.emulation.fixtures import StartTorch
from tests.emulation.node import EmulatedNode
from tests.support.servers.exporter_process import QUICK
from tests.support.waiting import wait_for

HOLD = "import gpumem_client; gpumem_client.start(); held = [torch.empty(3 << 20, device='cuda') for _ in range(4)]"
LOSE = "try:\n    torch.empty(1 << 40, dtype=torch.uint8, device='cuda')\nexcept torch.OutOfMemoryError: pass"


def test_the_profile_of_an_error_outlives_its_process_and_the_exporter(
    node: EmulatedNode, start_exporter: StartExporter, start_torch: StartTorch, tmp_path: Path
) -> None:
    exporter = start_exporter(node, *QUICK, "--storage.path", str(tmp_path / "storage"))
    process = start_torch(GPUMEM_EXPORTER_URL=exporter.url, GPUMEM_OOM_PROFILE="1")
    process.exec(HOLD)
    wait_for(lambda: process.pid in exporter.processes(), "a report")
    scraped = exporter.get(f"/api/v1/processes/{process.pid}/profile?format=json")
    assert sum(row["bytes"] for row in scraped["rows"]) == 48 << 20
    process.exec(LOSE)

    def profiled() -> str:
        events = exporter.get("/api/v1/events?type=oom")["events"]
        return str(next((each["detail"]["profile"] or "" for each in events), ""))

    profile_id = wait_for(profiled, "the profile of the error")
    process.close()
    exporter.stop()
    exporter.start()
    assert wait_for(profiled, "the files of the earlier exporter") == profile_id
    found = exporter.get(f"/api/v1/profiles/{profile_id}")
    assert found["cause"] == "out_of_memory"
    assert sum(row["bytes"] for row in found["rows"]) == 48 << 20


KINDS = ("plain", "wrapped", "dtensor", "fsdp", "checkpointed", "swapped", "out_of_memory")
"""One of each way in which gradients and models come and go; the benchmark has all."""


@pytest.mark.slow
def test_no_kind_of_job_is_harmed_by_profiles() -> None:
    with Place(real_gpu=False, devices=2, fresh=False) as place:
        exporter = place.exporter()
        profiles = Profiles(exporter)
        try:
            seen = jobs(place, exporter, KINDS, seconds=3, together=2)
        finally:
            profiles.end()
    assert {kind: each["error"] for kind, each in seen.items() if "error" in each} == {}
    assert seen.keys() == set(KINDS)
    assert {kind: each["ooms"] for kind, each in seen.items() if each["ooms"] > each["ooms_alone"]} == {}
    assert profiles.failures == []
    assert profiles.outcomes["done"] > 0
