"""The public surface of the metrics page: one complete page as a golden copy with names, types and labels.

After an intended change, write the copy again and read the difference:

    python -m tests.contract.test_metrics_contract > tests/data/metrics.golden.txt
"""

from __future__ import annotations

import re
import sys
from dataclasses import replace
from typing import Any

import pytest
from prometheus_client.openmetrics.parser import text_string_to_metric_families

from gpumem_client.wire.protocol import DeviceSample, EngineState, ProcessIdentity, Report
from gpumem_exporter.actions.action import Action, ActionResult
from gpumem_exporter.actions.action_options import ActionRequest, Target
from gpumem_exporter.core.event import EVENT_TYPES
from gpumem_exporter.core.readings import (
    DeviceMemory,
    DeviceReading,
    DriverActivity,
    LostLauncher,
    NodeReading,
    ProcessFacts,
    ProcessMemory,
)
from gpumem_exporter.core.samples import KvCachePeak, LastOom, ProcessKey, ReportingProcess, SilentReporter, Snapshot
from gpumem_exporter.features.engines.engine_metrics import ENGINE
from gpumem_exporter.features.events.event_log import DROPPED, EVENTS
from gpumem_exporter.features.oom.oom_metrics import OOM
from gpumem_exporter.features.orphans.orphan_metrics import ORPHANS
from gpumem_exporter.features.policy.policy_routes import ALERT_OUTCOMES, ALERTS
from gpumem_exporter.features.policy.policy_runner import EVALUATIONS, RESULTS
from gpumem_exporter.metrics.exposition import Exposition
from gpumem_exporter.metrics.instruments import Counter, Instruments, Registry
from tests.support.builders.exposition_builders import whole_text_of
from tests.support.paths import DATA
from tests.support.processes.running_command import run_tool
from tests.support.truth.metrics_list import METRICS, SCRAPED

GOLDEN = DATA / "metrics.golden.txt"
GIB, MIB = 2**30, 2**20


def test_the_page_equals_the_golden_copy() -> None:
    assert golden_page(openmetrics=False) == GOLDEN.read_text()


def test_the_strict_openmetrics_parser_reads_the_types_of_the_catalog() -> None:
    families = {family.name: family.type for family in text_string_to_metric_families(golden_page(openmetrics=True))}

    public = {metric.family: metric.type for metric in METRICS}
    of_process = {name for name in families if name.startswith(("process_", "python_"))}
    assert {name: families[name] for name in families.keys() - of_process}.items() <= public.items()
    assert {metric.family for metric in SCRAPED} <= families.keys()


@pytest.mark.tools
def test_promtool_accepts_the_page() -> None:
    checked = run_tool("promtool", "check", "metrics", stdin=golden_page(openmetrics=False))

    assert (checked.returncode, checked.stdout, checked.stderr) == (0, "", "")


def golden_page(*, openmetrics: bool) -> str:
    """Render the page of RICH with a constant clock."""
    registry = Registry()
    instruments, events = Instruments(registry), Counter.of(EVENTS, registry)
    Counter.of(DROPPED, registry)
    evaluations, alerts = Counter.of(EVALUATIONS, registry), Counter.of(ALERTS, registry)
    for outcome in ("accepted", "accepted", "invalid"):
        instruments.count_report(outcome)
    instruments.count_dropped()
    for result in RESULTS:
        evaluations.labels(result, "idle-cache").inc(3 * (result == "unmet"))
    for outcome in ALERT_OUTCOMES:
        alerts.labels(outcome).inc(outcome == "acted")
    for type_ in EVENT_TYPES:
        events.labels(type_).inc({"process_started": 1, "oom": 2}.get(type_, 0))
    results = (
        ActionResult(4711, "llm-pretrain", "0", "0", GPU_0, "done", freed_bytes=2 * GIB),
        ActionResult(4711, "llm-pretrain", "0", "1", GPU_1, "done", freed_bytes=0),
        ActionResult(52, "notebook", "", "1:0", MIG, "refused", "a CUDA graph is being captured", freed_bytes=-GIB),
    )
    request = ActionRequest("empty_cache", Target(all=True))
    acted = Action("a1", request, "failed", "alice", 1.7e9, results=results, duration_seconds=0.003)
    for dry_run in (False, True):  # a dry run counts nothing
        instruments.observe_action(replace(acted, request=replace(request, dry_run=dry_run)))
    exposition = Exposition(registry, (OOM, ORPHANS, ENGINE), version="1.2.3", source="nvml", clock=lambda: 0.0)
    page = whole_text_of(exposition, RICH, openmetrics=openmetrics)
    page = re.sub(r"^((?:process_|python_gc_)\S+) .*", r"\1 0", page, flags=re.MULTILINE)
    page = re.sub(r"^python_info\{.*", 'python_info{version="3.11.7"} 1.0', page, flags=re.MULTILINE)
    return re.sub(r'(gpumem_exporter_build_info\{.*python=")[^"]*', r"\g<1>3.11.7", page)


GPU_0 = "GPU-00000000-0000-0000-0000-000000000000"
GPU_1 = "GPU-11111111-1111-1111-1111-111111111111"
GPU_2 = "GPU-22222222-2222-2222-2222-222222222222"
GPU_10 = "GPU-10101010-1010-1010-1010-101010101010"
MIG = "MIG-22222222-2222-2222-2222-222222222222"

FULL = DeviceSample(
    uuid=GPU_0,
    allocated_bytes=20 * GIB + 512,
    reserved_bytes=30 * GIB,
    active_bytes=20 * GIB + 4096,
    inactive_split_bytes=GIB,
    requested_bytes=20 * GIB + 17,
    allocated_peak_bytes=28 * GIB,
    reserved_peak_bytes=31 * GIB,
    private_pools_bytes=64 * MIB,
    unmapped_bytes=0,
    reclaimable_bytes=8 * GIB,
    idle_cache_bytes=5 * GIB,
    nccl_bytes=GIB,
    memory_limit_bytes=40 * GIB,
    alloc_retries=3,
    ooms=1,
    segments_allocated=900,
    segments_freed=400,
    cache_flushes=5,
    peak_resets=2,
    planned_reserved_peak_bytes=32 * GIB,
    phase_peak_bytes={"forward": 25 * GIB, "backward": 28 * GIB},
    component_bytes={"parameters": 4 * GIB, "gradients": 4 * GIB, "optimizer_state": 8 * GIB, "other": 4 * GIB + 512},
)
ASLEEP = DeviceSample(
    uuid=MIG,
    allocated_bytes=1000 * MIB,
    reserved_bytes=1200 * MIB,
    unmapped_bytes=300 * MIB,
    component_bytes={"weights": 100 * MIB, "kv_cache": 800 * MIB, "other": 100 * MIB},
    component_unmapped_bytes={"weights": 300 * MIB},
    kv_cache_bytes={"used": 50 * MIB, "evictable": 150 * MIB, "free": 600 * MIB},
)


def reporting(
    pid: int,
    namespace: int,
    host_pid: int | None,
    *samples: DeviceSample,
    pinned: int | None = None,
    engine: EngineState | None = None,
    **who: Any,
) -> ReportingProcess:
    """Return a reporting process."""
    identity = ProcessIdentity(pid, 7000, namespace, f"session-{pid}", 12.5, **who)
    report = Report(identity, sequence=9, devices=samples, pinned_host_bytes=pinned, step=1200 if pinned else None)
    report = replace(report, sample_age_seconds=0.125 if pinned else 0.0, engine=engine)
    return ReportingProcess(ProcessKey(namespace, pid), host_pid, report, 99.5, 1_700_000_000.25)


RICH = Snapshot(
    taken_seconds=100.0,
    node=NodeReading(
        taken_seconds=99.0,
        taken_unix_seconds=1_700_000_000.5,
        duration_seconds=0.0021,
        up=True,
        driver_version="570.86.15",
        devices=(
            DeviceReading(gpu="10", uuid=GPU_10, name="NVIDIA H100 80GB HBM3", error="the device fell off the bus"),
            DeviceReading(
                gpu="0",
                uuid=GPU_0,
                name="NVIDIA H100 80GB HBM3",
                pci_bus_id="00000000:1B:00.0",
                memory=DeviceMemory(80 * GIB, 36 * GIB, 43 * GIB, GIB),
                processes=(ProcessMemory(4711, 31 * GIB), ProcessMemory(999, 4 * GIB), ProcessMemory(1000, None)),
                utilization_ratio=0.97,
            ),
            DeviceReading(
                gpu="1",
                uuid=GPU_1,
                name="Tesla T4",
                pci_bus_id="00000000:1C:00.0",
                memory=DeviceMemory(15 * GIB, 2 * GIB, 13 * GIB, None),
                processes=None,
                utilization_ratio=0.0,
            ),
            DeviceReading(
                gpu="2",
                uuid=GPU_2,
                name="NVIDIA GB10",
                memory=DeviceMemory(120 * GIB, 20 * GIB, 100 * GIB, None, of_host=True),
                processes=(),
            ),
            DeviceReading(
                gpu="1:0",
                uuid=MIG,
                name="NVIDIA H100 80GB HBM3 MIG 1g.10gb",
                mig_profile="1g.10gb",
                parent_uuid=GPU_1,
                memory=DeviceMemory(10 * GIB, 3 * GIB, 7 * GIB, 0),
                processes=(ProcessMemory(52, GIB), ProcessMemory(53, 2 * GIB)),
            ),
        ),
        facts={
            4711: ProcessFacts(
                4711,
                7000,
                "python train.py",
                "alice",
                "3f2a9c",
                "ml",
                "llm-pretrain-0",
                "trainer",
                k8s_pod_uid="0a1b2c3d-1111-2222-3333-444455556666",
                slurm_job_id="4242",
                slurm_account="vision",
            ),
            999: ProcessFacts(999, 8000, "Xorg", "root"),
            300: ProcessFacts(300, 7000, "python leak.py", "bob"),
        },
    ),
    processes=(
        reporting(
            17,
            4026532001,
            4711,
            FULL,
            DeviceSample(GPU_1, allocated_bytes=0, reserved_bytes=0, reclaimable_bytes=0, alloc_retries=0, ooms=0),
            pinned=256 * MIB,
            workload="llm-pretrain",
            rank="0",
            command="python train.py",
            torch_version="2.15.0+cu132",
            allocator_settings="expandable_segments:False",
        ),
        reporting(
            52,
            4026531836,
            52,
            DeviceSample(MIG, allocated_bytes=100 * MIB, reserved_bytes=600 * MIB, reclaimable_bytes=None),
            workload='notebook of "bob"',
            ray_job_id="01000000",
            command="ipykernel",
            torch_version="2.1.0",
        ),
        reporting(
            2, 4026532009, 53, ASLEEP, workload="chat", engine=EngineState("vllm", "0.33.0", "llama", "serving", 0.5)
        ),
        reporting(1, 4026532007, None, DeviceSample(GPU_0, allocated_bytes=5, reserved_bytes=2 * MIB), workload="a"),
        reporting(1, 4026532008, None, DeviceSample(GPU_0, allocated_bytes=6, reserved_bytes=2 * MIB), workload="a"),
    ),
    silent=(SilentReporter(ProcessKey(4026531836, 300), 300, 7000, "leaky", "1", 970.0, 1_699_999_970.0),),
    ooms=(
        LastOom(
            gpu="0",
            uuid=GPU_0,
            pid="4711",
            workload="llm-pretrain",
            rank="0",
            session="oom:session-17",
            number=1,
            happened_seconds=60.0,
            happened_unix_seconds=1_699_999_961.5,
            requested_bytes=2 * GIB,
            device_free_bytes=GIB,
            limit_bytes=79 * GIB,
            allocated_bytes=70 * GIB,
            reserved_bytes=74 * GIB,
            reclaimable_bytes=0,
            fragmented_bytes=4 * GIB,
        ),
        LastOom("3", "GPU-gone", "298", "leaky", "1", "oom:dead", 7, -900.0, 1_699_999_001.5),
    ),
    kv_cache_peaks={("53", MIG): {"1h": KvCachePeak(60 * MIB, 3600), "24h": KvCachePeak(90 * MIB, 7260)}},
    orphans={52: LostLauncher("launcher_ended")},
    activity={
        52: DriverActivity(seen=False, seconds=20.0),
        999: DriverActivity(seen=True, seconds=98.0),
        4711: DriverActivity(seen=True, seconds=99.0),
    },
)
"""A snapshot with every case: a lost device, a MIG device, an old driver, processes with all, some and no values, two
processes with the same pid, a silent one, one with an out-of-memory error, one that
exited after its error, and an inference engine of which a part sleeps."""


if __name__ == "__main__":
    sys.stdout.write(golden_page(openmetrics=False))
