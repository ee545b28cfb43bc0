"""Small documents of the API for the tests of `top`."""

from __future__ import annotations

from typing import Any

from gpumem_exporter.cli.node import Node
from gpumem_exporter.cli.top.source import Reading
from gpumem_exporter.events import Event, Page
from gpumem_exporter.server.api.events import events_document

GIB = 1 << 30
URL = "unix:///run/gpumem/exporter.sock"


def device(gpu: str, **changes: Any) -> dict[str, Any]:
    """Return an 80 GiB device: half of it allocated, a quarter reclaimable."""
    ledger = {
        "torch_allocated": 40 * GIB,
        "torch_reclaimable": 20 * GIB,
        "torch_fragmented": 2 * GIB,
        "non_torch": GIB,
        "other_processes": 0,
        "driver_reserved": GIB,
        "unattributed": 0,
        "free": 16 * GIB,
    }
    memory = {"total_bytes": 80 * GIB, "used_bytes": 63 * GIB, "free_bytes": 16 * GIB, "reserved_bytes": GIB}
    return {
        "gpu": gpu,
        "uuid": f"GPU-{gpu}",
        "name": "NVIDIA H100 80GB HBM3",
        "mig_profile": "",
        "up": True,
        "error": "",
        "memory": memory,
        "utilization_ratio": 0.93,
        "ledger": ledger,
        "allocatable_bytes": memory["free_bytes"] + GIB if memory else None,
        **changes,
    }


def process(pid: int | str, *gpus: str, **changes: Any) -> dict[str, Any]:
    """Return a reporting process with the same values on each device; `changes` apply to both."""
    values = {
        "used_bytes": 10 * GIB,
        "allocated_bytes": 6 * GIB,
        "reserved_bytes": 9 * GIB,
        "idle_cache_bytes": GIB // 2,
        "reclaimable_bytes": 2 * GIB,
        "fragmented_bytes": GIB,
        "non_torch_bytes": GIB,
    }
    of_device = {name: changes.pop(name, value) for name, value in values.items()}
    return {
        "pid": pid,
        "reporting": True,
        "state": "reporting",
        "workload": "llm",
        "rank": "0",
        "command": "python train.py",
        "user": "alice",
        "k8s_namespace": None,
        "k8s_pod": None,
        "step": 7,
        "sample_age_seconds": 0.42,
        "actions": ["empty_cache"],
        "devices": [{"gpu": gpu, "uuid": f"GPU-{gpu}", **of_device} for gpu in gpus],
        **changes,
    }


def unreported(pid: int, gpu: str, used_bytes: int) -> dict[str, Any]:
    """Return a process that only the driver lists."""
    names = ("workload", "rank", "step", "sample_age_seconds", "allocated_bytes", "reserved_bytes")
    unknown = dict.fromkeys((*names, "idle_cache_bytes", "reclaimable_bytes", "fragmented_bytes", "non_torch_bytes"))
    return process(
        pid,
        gpu,
        used_bytes=used_bytes,
        reporting=False,
        state="unreported",
        actions=[],
        command="tritonserver",
        **unknown,
    )


def reading(devices: list[dict[str, Any]], processes: list[dict[str, Any]], **changes: Any) -> Reading:
    """Return a reading of an exporter."""
    of_devices = {"source": "nvml", "nvml": {"up": True, "error": "", "driver_version": "1"}, "devices": devices}
    of_processes = {"source": "nvml", "processes": processes}
    given = {"url": URL, **changes}
    return Reading(Node({**of_devices, **given.pop("document", {})}, of_processes), **given)


def live(in_use_mib: dict[str, list[int | None]], seconds: list[float], *, clock_seconds: float) -> dict[str, Any]:
    """Return the past in `/api/v1/live`: the history and its time."""
    devices = {uuid: {"in_use": values, "allocated": values} for uuid, values in in_use_mib.items()}
    return {
        "moment": {"clock_seconds": clock_seconds, "unix_seconds": 1e9},
        "history": {"span_seconds": 600.0, "gap_seconds": 6.0, "seconds": seconds, "devices": devices},
    }


def event(number: int, type_: str, unix_seconds: float, **changes: Any) -> dict[str, Any]:
    """Return an event as in `/api/v1/events`."""
    values: dict[str, Any] = {
        "gpu": "0",
        "uuid": "GPU-0",
        "pid": 7,
        "workload": "llm",
        "rank": "3",
        "detail": {},
        **changes,
    }
    page = Page((Event(type_, unix_seconds, id=number, **values),), number, more=False)
    return dict(events_document(page)["events"][0])
