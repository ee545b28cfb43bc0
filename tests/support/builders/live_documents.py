"""Documents of `/api/v1/live` and `/api/v1/history` for the tests of the terminal: a node with eight devices."""

from __future__ import annotations

import time
from typing import Any

from gpumem_exporter.actions.sentences import stays_free
from gpumem_exporter.core.event import Event
from gpumem_exporter.core.ledger import sum_of_known
from gpumem_exporter.features.events.event_entries import event_document
from gpumem_exporter.page.words import WORDS

GIB = 1 << 30
NOW = time.mktime((2026, 3, 4, 3, 42, 4, 0, 0, -1))
"""The time of the documents: 03:42:04 on this machine's clock."""
HOUR = 3600.0

_SIZES = (
    *("used_bytes", "allocated_bytes", "reserved_bytes", "idle_cache_bytes", "reclaimable_bytes"),
    *("fragmented_bytes", "non_torch_bytes", "unmapped_bytes"),
)
_ON_DEVICE = ("used", "allocated", "reclaimable", "fragmented", "idle_cache", "non_torch")
_SHARE = ("used_bytes", "idle_cache_bytes")


def device(gpu: str, *jobs: dict[str, Any], total_gib: float = 80, **changes: Any) -> dict[str, Any]:
    """Return a device with what jobs use on it."""
    places = [
        (one["id"], place)
        for one in jobs
        for each in one["processes"]
        for place in each["devices"]
        if place["gpu"] == gpu
    ]
    sums = {name: sum(place[f"{name}_bytes"] or 0 for _, place in places) for name in _ON_DEVICE}
    total, reserved = int(total_gib * GIB), GIB // 2
    free = total - sums["used"] - reserved
    other = sum(place["used_bytes"] for _, place in places if place["allocated_bytes"] is None)
    return {
        "gpu": gpu,
        "uuid": f"GPU-{gpu}",
        "name": "NVIDIA H100 80GB HBM3",
        "error": "",
        "utilization_ratio": 0.93 if jobs else 0.0,
        "memory": {
            "total_bytes": total,
            "used_bytes": sums["used"] + reserved,
            "free_bytes": free,
        },
        "ledger": {
            **{f"torch_{name}": sums[name] for name in ("allocated", "reclaimable", "fragmented")},
            "non_torch": sums["non_torch"],
            "other_processes": other,
            "driver_reserved": reserved,
            "unattributed": 0,
            "free": free,
        },
        "idle_cache_bytes": sums["idle_cache"],
        "allocatable_bytes": free + sums["idle_cache"],
        "jobs": [{"job": job_id, **{name: place[name] for name in _SHARE}} for job_id, place in places],
        **changes,
    }


def process(pid: int | str, *gpus: str, used_gib: float = 10, **changes: Any) -> dict[str, Any]:
    """Return a reporting process with the same sizes on each device; `changes` apply to the process or its devices."""
    used = int(used_gib * GIB)
    sizes = {
        "used_bytes": used,
        "allocated_bytes": used * 6 // 10,
        "reserved_bytes": used * 9 // 10,
        "idle_cache_bytes": used // 10,
        "reclaimable_bytes": used // 5,
        "fragmented_bytes": used // 10,
        "non_torch_bytes": used // 10,
        "unmapped_bytes": 0,
    }
    of_device = {name: changes.pop(name, value) for name, value in sizes.items()}
    return {
        "pid": pid,
        "state": "reporting",
        "workload": "llm-pretrain",
        "rank": None,
        "command": "python train.py",
        "user": "alice",
        "uid": 1001,
        "k8s_namespace": None,
        "k8s_pod": None,
        "step": None,
        "started_unix_seconds": NOW - 5 * HOUR,
        "devices": [{"gpu": gpu, "uuid": f"GPU-{gpu}", **of_device} for gpu in gpus],
        **changes,
    }


def unreported(pid: int, gpu: str, used_gib: float, **changes: Any) -> dict[str, Any]:
    """Return a process that only the driver lists."""
    unknown = dict.fromkeys((*_SIZES[1:], "workload"))
    given = {"command": "tritonserver", "user": "carol", "uid": 1003, **unknown, **changes}
    return process(pid, gpu, used_gib=used_gib, state="unreported", reporting=False, clears=False, actions=[], **given)


def job(name: str, *processes: dict[str, Any], **changes: Any) -> dict[str, Any]:
    """Return the job of some processes, with their sums."""
    first = processes[0]
    places = [place for one in processes for place in one["devices"]]
    gpus = list(dict.fromkeys(place["gpu"] for place in places))
    sums = {}
    for size in _SIZES:
        known = [place[size] for place in places if place[size] is not None]
        sums[size] = sum(known) if known else None
    idle, again = sums["idle_cache_bytes"], (sums["reclaimable_bytes"] or 0) - (sums["idle_cache_bytes"] or 0)
    group = len(processes) > 1
    target = {"pid": [one["pid"] for one in processes] if group else first["pid"]}
    clear = {
        "sentence": f"{stays_free(idle or 0, again, at_step=group)}.",
        "target": target,
        "mode": "step" if group else "now",
    }
    return {
        "id": f"{name}~1f3a9c0e" if first["workload"] else f"pid~{first['pid']}",
        "name": name,
        "hue": ord(name[:1] or " ") % 12,
        **{key: first[key] for key in ("workload", "command", "user", "uid", "k8s_namespace", "k8s_pod")},
        "slurm_job_id": None,
        "ray_job_id": None,
        "owner": first["user"],
        "gpus": gpus,
        "uuids": [f"GPU-{gpu}" for gpu in gpus],
        **sums,
        "state": "training" if first["state"] == "reporting" else "not reporting",
        "since_unix_seconds": NOW - 5 * HOUR,
        "step": 18204 if group else None,
        "step_seconds": 0.91 if group else None,
        "clear": clear if idle else None,
        "processes": list(processes),
        **changes,
    }


def finding(kind: str, severity: str, title: str, sentence: str, **changes: Any) -> dict[str, Any]:
    """Return a finding about the node."""
    return {
        "id": f"{kind} {sentence[:12]}",
        "kind": kind,
        "severity": severity,
        "title": title,
        "sentence": sentence,
        **dict.fromkeys(("job", "gpu", "uuid", "idle_cache_bytes", "clear")),
        "owner": "",
        "since_unix_seconds": NOW - HOUR,
        **changes,
    }


def live(
    devices: list[dict[str, Any]],
    jobs: list[dict[str, Any]],
    findings: list[dict[str, Any]] | None = None,
    **node: Any,
) -> dict[str, Any]:
    """Return the document of a node; `node` changes its head."""
    memories = [one["memory"] for one in devices if one["memory"]]
    names = ("total_bytes", "used_bytes", "free_bytes")
    sums = {name: sum(memory[name] for memory in memories) if memories else None for name in names}
    idle = sum_of_known([one["idle_cache_bytes"] for one in devices] or [None])
    totals = {
        "devices": len(devices),
        "jobs": len(jobs),
        **sums,
        "idle_cache_bytes": idle,
    }
    return {
        "time": {"unix_seconds": NOW, "clock_seconds": 1e4},
        "node": {
            "host": "gpu-node-7",
            "source": "nvml",
            "driver": {"up": True, "error": "", "version": "570.1"},
            "taken_unix_seconds": NOW,
            "totals": totals,
            **node,
        },
        "devices": devices,
        "jobs": sorted(jobs, key=lambda one: -(one["used_bytes"] or 0)),
        "findings": findings or [],
        "words": WORDS,
    }


def full_node() -> dict[str, Any]:
    """Return a busy node: a training job of four ranks, a server, a leak, a notebook and a process without a report."""
    ranks = [process(50100 + i, str(i), used_gib=70 - i, rank=str(i), step=18204) for i in range(4)]
    llm = job("llm-pretrain", *ranks, owner="alice, Slurm 4711", slurm_job_id="4711")
    rag = job(
        "rag-indexer",
        process(50321, "4", used_gib=41, workload="rag-indexer", user="bob", command="python -m rag.index"),
        growth_bytes_per_hour=6 * GIB,
        state="running",
        since_unix_seconds=NOW - 30 * HOUR,
        clear=None,
    )
    chat = job(
        "chat-70b",
        process(
            *(50400, "5"), used_gib=74, workload="chat-70b", user="carol", k8s_namespace="serving", k8s_pod="chat-0"
        ),
        owner="carol, pod serving/chat-0",
        state="serving",
        incomplete=["allocated_bytes"],
    )
    moe = job("moe-finetune", *(process(51144 + i, str(6 + i), workload="moe-finetune", rank=str(i)) for i in (0, 1)))
    note = job(
        "notebook",
        process(50723, "7", used_gib=32, workload="notebook", user="dave", command="python -m ipykernel_launcher"),
        state="idle",
    )
    triton = job("tritonserver", unreported(4711, "4", 6.4))
    jobs = [llm, rag, chat, moe, note, triton]
    devices = [
        *(device(str(gpu), llm) for gpu in range(4)),
        *(device("4", rag, triton), device("5", chat), device("6", moe), device("7", note, moe)),
    ]
    findings = [
        finding(
            *("growth", "critical", "Growing"),
            "rag-indexer (bob) grows by 6.0 GiB an hour; it will be out of memory in 48 min.",
            job=rag["id"],
            owner="bob",
        ),
        finding(
            *("oom", "warning", "Out of memory"),
            "moe-finetune (alice) rank 1 requested 2.0 GiB on GPU 7, and the process continues; 512 MiB was free.",
            job=moe["id"],
            owner="alice",
            gpu="7",
            uuid="GPU-7",
            since_unix_seconds=NOW - 30 * 60,
        ),
        finding(
            *("idle_cache", "info", "Idle cache"),
            "notebook (dave) holds 3.2 GiB of idle cache on GPU 7.",
            job=note["id"],
            owner="dave",
            gpu="7",
            uuid="GPU-7",
            idle_cache_bytes=note["idle_cache_bytes"],
            clear={**note["clear"], "job": note["id"], "name": "notebook"},
        ),
    ]
    return live(devices, jobs, findings)


def history(job_id: str, *, seconds: int = 600, step: int = 1, points: list[int] | None = None) -> dict[str, Any]:
    """Return the history of a job until `NOW`: used memory climbs, its cache is cleared half way."""
    count = seconds // step
    used = [(30 + 30 * index // count) * GIB for index in range(count)] if points is None else points
    idle = [8 * GIB if index < count // 2 else GIB for index in range(count)]
    series = {
        "used": {"max": used},
        "allocated": {"max": [size - 10 * GIB for size in used]},
        "idle_cache": {"max": idle},
    }
    return {
        "from_unix_seconds": NOW - seconds,
        "to_unix_seconds": NOW,
        "step_seconds": step,
        "unix_seconds": [NOW - seconds + (index + 1) * step for index in range(count)],
        "series": [{"device": None, "job": job_id, "name": "", "gpu": None, **series}],
    }


def event(number: int, type_: str, unix_seconds: float, **changes: Any) -> dict[str, Any]:
    """Return an event as in `/api/v1/events`."""
    known = {"gpu": "0", "uuid": "GPU-0", "pid": 7, "workload": "llm", "rank": "3"}
    values: dict[str, Any] = {**known, "detail": {}, **changes}
    return dict(event_document([Event(type_, unix_seconds, id=number, **values)]))
