"""What the document of the node shows of inference engines, and the finding about a cache that is too large."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import pytest

from gpumem_client.wire.protocol import EngineState
from gpumem_exporter.core.caller import Caller, CallerKind, Rights
from gpumem_exporter.core.samples import KvCachePeak, ReportingProcess, Snapshot
from gpumem_exporter.features.engines.smaller_cache import ENOUGH_SECONDS, unused_kv_caches
from gpumem_exporter.page.live import NodeView
from tests.support.builders.builders import MIB, UUIDS, device, node, reporting, sample

GIB = 1024 * MIB
VLLM = EngineState("vllm", "0.33.0", "llama", "serving", 4.0)
CONTEXT = 2 * GIB
DAY = 72_000
"""Enough seconds for a finding."""


def serving(
    pid: int = 1, *, on: int = 0, engine: EngineState | None = VLLM, used: int = 6, size: int = 50, weights: int = 16
) -> ReportingProcess:
    """Return an engine with sizes in GiB."""
    one = replace(
        sample(UUIDS[on], (weights + size) * GIB),
        component_bytes={"weights": weights * GIB, "kv_cache": size * GIB},
        kv_cache_bytes={"used": used * GIB, "evictable": 4 * GIB, "free": (size - used - 4) * GIB},
    )
    return reporting(pid, devices=(one,), workload="chat", engine=engine, rank=str(on))


def snapshot(*processes: ReportingProcess, peaks: dict[int, int] | None = None, observed: int = DAY) -> Snapshot:
    """Return a node with a device of 80 GiB for each process; `peaks` are in GiB by pid."""
    used = {each.key.pid: (each.report.devices[0].reserved_bytes or 0) + CONTEXT for each in processes}
    by_uuid: dict[str, dict[int, int]] = {}
    for each in processes:
        by_uuid.setdefault(each.report.devices[0].uuid, {})[each.key.pid] = used[each.key.pid]
    devices = [
        device(uuid, gpu=str(UUIDS.index(uuid)), total=80 * GIB, used=sum(there.values()), processes=dict(there))
        for uuid, there in by_uuid.items()
    ]
    of = {str(each.key.pid): each.report.devices[0].uuid for each in processes}
    known = {
        (str(pid), of[str(pid)]): {"1h": KvCachePeak(GIB, 3600), "24h": KvCachePeak(peak * GIB, observed)}
        for pid, peak in (peaks or {}).items()
    }
    return Snapshot(100.0, node(*devices, taken=100.0), processes, kv_cache_peaks=known)


def document(shown: Snapshot, **changes: Any) -> Any:
    view = NodeView(clock=lambda: 100.0, wall_clock=lambda: 1e9, minima_of=lambda _: ())
    view.findings = [partial(unused_kv_caches, enough_seconds=ENOUGH_SECONDS)]
    return view.document(shown, {"failed_checks": []}, 1e9, **changes)


def finding(*processes: ReportingProcess, **changes: Any) -> str | None:
    (found,) = [each["sentence"] for each in document(snapshot(*processes, **changes))["findings"]] or [None]
    return found


def test_a_job_has_the_engine_of_its_processes_and_the_sums_of_their_caches_and_components() -> None:
    shown = snapshot(
        serving(1), serving(2, on=1, engine=replace(VLLM, state="idle", idle_seconds=90.0)), peaks={1: 7, 2: 3}
    )
    (job,) = document(shown)["jobs"]
    assert job["engine"] == {
        "label": "vLLM 0.33.0 llama",
        "name": "vLLM",
        "version": "0.33.0",
        "model": "llama",
        "state": "serving",
        "idle_seconds": 4.0,
        "kv_cache": {
            "size": 100 * GIB,
            "used": 12 * GIB,
            "evictable": 8 * GIB,
            "free": 80 * GIB,
            # The present use of the second process is above the highest one that is known.
            "peak_hour": 12 * GIB,
            "peak_day": 13 * GIB,
            "observed_seconds": DAY,
        },
    }
    assert job["component_bytes"] == {"weights": 32 * GIB, "kv_cache": 100 * GIB}
    assert job["state"] == "serving"
    assert [process["engine"]["state"] for process in job["processes"]] == ["serving", "idle"]


def test_an_engine_that_sleeps_shows_what_it_is_and_what_it_has_released() -> None:
    one = replace(
        sample(UUIDS[0], GIB),
        unmapped_bytes=65 * GIB,
        component_bytes={"weights": 0, "kv_cache": 0, "other": GIB},
        component_unmapped_bytes={"weights": 16 * GIB, "kv_cache": 49 * GIB},
    )
    (job,) = document(snapshot(reporting(1, devices=(one,), engine=replace(VLLM, state="asleep"))))["jobs"]
    assert (job["state"], job["engine"]["state"], job["engine"]["kv_cache"]) == ("sleeping", "asleep", None)
    assert job["component_unmapped_bytes"] == {"weights": 16 * GIB, "kv_cache": 49 * GIB}
    assert job["unmapped_bytes"] == 65 * GIB


def test_an_engine_whose_use_is_not_known_has_no_cache_and_a_training_has_no_engine() -> None:
    unknown = serving()
    unknown = replace(
        unknown,
        report=replace(unknown.report, devices=(replace(unknown.report.devices[0], kv_cache_bytes={}),)),
    )
    (job,) = document(snapshot(unknown))["jobs"]
    assert job["engine"]["kv_cache"] is None
    (job,) = document(snapshot(reporting(1, devices=(sample(UUIDS[0], GIB),))))["jobs"]
    assert job["engine"] is None
    assert job["component_bytes"] == {}


def test_the_model_of_others_is_hidden() -> None:
    stranger = Caller(CallerKind.TCP, Rights.NONE)
    (job,) = document(snapshot(serving()), viewer=stranger)["jobs"]
    assert (job["engine"]["name"], job["engine"]["model"]) == ("vLLM", None)


@pytest.mark.parametrize(
    ("processes", "peaks", "told"),
    [
        (  # (68 - 50 + 1.5 x 6) / 80 = 0.3375; 68 - 0.34 x 80 = 40.8
            [serving(used=1)],
            {1: 6},
            ("--gpu-memory-utilization 0.34 ", "GPU 0", "50.0 GiB", "at most 6.0 GiB used in 20 h", "40.8 GiB"),
        ),
        (  # (16 + 1.5 x 6) / 80 = 0.3125; 66 - 0.32 x 80 = 40.4
            [serving(engine=EngineState("sglang"))],
            {1: 6},
            ("--mem-fraction-static 0.32 ", "40.4 GiB"),
        ),
        (  # (18 + 30) / 80
            [serving(1), serving(2, on=1, used=20)],
            {1: 6, 2: 20},
            ("GPUs 0 and 1", "--gpu-memory-utilization 0.60 "),
        ),
        ([serving(engine=EngineState("kvserver"))], {1: 6}, ()),
    ],
    ids=["vllm", "sglang", "the engine of a job that needs most", "an unknown engine"],
)
def test_a_cache_that_is_hardly_used_is_a_finding_with_the_option_that_frees_it(
    processes: list[ReportingProcess], peaks: dict[int, int], told: tuple[str, ...]
) -> None:
    sentence = finding(*processes, peaks=peaks)
    assert sentence is not None
    assert [part for part in told if part not in sentence] == []
    assert ("--" in sentence) == bool(told)


@pytest.mark.parametrize(
    ("processes", "changes"),
    [
        ([serving()], {"peaks": {1: 6}, "observed": DAY - 60}),  # not observed for long enough
        ([serving()], {}),
        ([serving()], {"peaks": {1: 30}}),  # frees too little
        ([serving(1), serving(2, on=1)], {"peaks": {1: 6}}),  # one is unknown
        ([serving(1, size=25, weights=8), serving(2, size=25, weights=8)], {"peaks": {1: 1, 2: 1}}),  # on one device
        ([serving(1), serving(2, on=1, engine=EngineState("sglang"))], {"peaks": {1: 6, 2: 6}}),
    ],
)
def test_nothing_is_proposed_that_is_not_known_to_be_enough(
    processes: list[ReportingProcess], changes: dict[str, Any]
) -> None:
    assert finding(*processes, **changes) is None
