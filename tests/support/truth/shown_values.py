"""What each surface of the exporter shows, in the form of `true_values`."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from tests.claims.place import COMPARED
from tests.support.paths import REPOSITORY
from tests.support.servers.exporter_process import ExporterProcess, Metrics
from tests.support.truth.device_truth import shown
from tests.support.truth.panel_queries import Prometheus
from tests.support.truth.true_values import MEMORY, OF_JOB, OF_PROCESS, IdleCaches, Values, flat_values, sum_of
from tests.support.waiting import patient

LIVE, HISTORY = "/api/v1/live", "/api/v1/history"
_TOTALS = ("devices", "jobs", "processes", "total_bytes", "used_bytes", "free_bytes", "reported_bytes")


def of_metrics(metrics: Metrics, uuids: Iterable[str]) -> Values:
    """Return the values of a scrape; `uuids` are all devices of the node."""
    series: dict[tuple[object, ...], object] = {
        (name, int(dict(labels)["pid"]), dict(labels)["uuid"]): value
        for name in COMPARED
        for labels, value in metrics.samples.get(name, {}).items()
    }
    devices = {uuid: shown(metrics, uuid) for uuid in uuids}
    return {**flat_values(devices), **series, **{("pid", pid): True for pid in labels_of(metrics, "pid")}}


def of_live(exporter: ExporterProcess, idle: IdleCaches) -> Values:
    """Return the values of the page; `idle` is whether a process can have an idle cache."""
    live = exporter.get(f"{LIVE}?details=all")
    processes = [process for job in live["jobs"] for process in job["processes"]]
    document = _shown_document(live, processes, idle)
    node = {name: live["node"]["totals"][name] for name in _TOTALS}
    return flat_values({**document, "node": node})


def of_info(exporter: ExporterProcess, idle: IdleCaches) -> Values:
    """Return the values of `gpumem-exporter info --json`."""
    command = [sys.executable, "-m", "gpumem_exporter", "info", "--json", "--url", exporter.url]
    ran = subprocess.run(command, capture_output=True, text=True, timeout=patient(100), check=True, cwd=REPOSITORY)
    info = json.loads(ran.stdout)
    return flat_values(_shown_document(info, info["processes"], idle))


def _shown_document(
    document: Mapping[str, Any], processes: Sequence[Mapping[str, Any]], idle: IdleCaches
) -> dict[str, Any]:
    """Return what live or info shows in the form of `TrueValues.document`."""
    names = {job["id"]: name_of(job) for job in document["jobs"]}
    assert len(set(names.values())) == len(document["jobs"]), f"a job has two entries: {names}"
    rows = {(process["pid"], place["uuid"]): place for process in processes for place in process["devices"]}
    jobs = {
        names[job["id"]]: {
            **{name: job[name] for name in OF_JOB},
            "uuids": sorted(job["uuids"]),
            "idle": job["idle_cache_bytes"]
            == sum_of(
                0 if row["reserved_bytes"] == 0 else row["idle_cache_bytes"]
                for (pid, _), row in rows.items()
                if pid in _pids(job)
            ),
        }
        for job in document["jobs"]
    }
    return {
        "processes": {
            key: {**{name: row[name] for name in OF_PROCESS}, "idle": idle(*key, row["idle_cache_bytes"])}
            for key, row in rows.items()
        },
        "jobs": jobs,
        "devices": {
            device["uuid"]: {
                "up": device["up"],
                **{name: value for name, value in (device["memory"] or {}).items() if name in MEMORY},
                **(device["ledger"] or {}),
                "jobs": {names[each["job"]]: each["used_bytes"] for each in device["jobs"]},
            }
            for device in document["devices"]
        },
    }


def _pids(job: Mapping[str, Any]) -> list[object]:
    return [process["pid"] if isinstance(process, dict) else process for process in job["processes"]]


def name_of(job: Mapping[str, Any]) -> object:
    """Return the workload of a job, or the pid of its only process."""
    return job["workload"] or _pids(job)[0]


def of_history(exporter: ExporterProcess, uuids: Iterable[str], ids: Mapping[str, object]) -> Values:
    """Return the last row of the history; `ids` has the names of all jobs by id."""
    devices = "".join(f"&device={uuid}" for uuid in uuids)
    jobs = "".join(f"&job={id_}" for id_ in ids)
    document = exporter.get(f"{HISTORY}?from={time.time() - 30}{devices}{jobs}")
    return {
        (series["device"] or ids[series["job"]], name): series[name]["max"][-1]
        for series in document["series"]
        for name in ("used", "allocated")
        if series[name]["max"] and series[name]["max"][-1] is not None
    }


def of_rules(prometheus: str, names: Iterable[str]) -> Values:
    """Return the last values of recorded series."""
    found = Prometheus(prometheus, patient(30)).instant(f'{{__name__=~"{"|".join(names)}"}}', time.time())
    return {
        (series["metric"]["__name__"], *_subject(series["metric"])): round(float(series["values"][0][1]), 9)
        for series in found
    }


def of_events(exporter: ExporterProcess, uuids: Iterable[str]) -> Values:
    """Return how often each event of a subject was recorded, and which of the devices are down."""
    counts: Counter[tuple[object, ...]] = Counter()
    down: dict[str, bool] = {}
    for event in exporter.events():
        if event["type"] in ("process_started", "process_ended"):
            counts[event["type"], event["pid"]] += 1
        elif event["type"] == "oom":
            counts["oom", event["pid"], event["uuid"]] += 1
        elif event["type"] == "action":
            counts["action", event["detail"]["id"]] += 1
        else:
            lost = event["type"] == "device_lost"
            if down.get(event["uuid"], False) == lost:
                counts["twice", event["type"], event["uuid"]] += 1
            down[event["uuid"]] = lost
    return {**counts, **{("down", uuid): down.get(uuid, False) for uuid in uuids}}


def _subject(labels: Mapping[str, str]) -> tuple[str, ...]:
    """Return the device or the workload of a recorded series; nothing for a series of the node."""
    level = labels["__name__"].partition(":")[0]
    return {"device": (labels.get("uuid", ""),), "node": ()}.get(level, (labels.get("workload", ""),))


def labels_of(metrics: Metrics, name: str) -> set[str]:
    """Return the values of a label, except on the series of out-of-memory errors, which outlive their processes."""
    states = (samples for metric, samples in metrics.samples.items() if not metric.startswith("gpumem_last_oom_"))
    found = (dict(labels) for samples in states for labels in samples)
    return {labels[name] for labels in found if name in labels}
