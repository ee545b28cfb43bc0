"""The rows of the tables: jobs with their processes, devices and findings of nodes, filtered and in order."""

from __future__ import annotations

from collections.abc import Container, Sequence
from dataclasses import dataclass
from typing import Any

from gpumem_exporter.cli.node_view import Node
from gpumem_exporter.cli.render.columns import JOBS, SEVERITIES, clock, natural
from gpumem_exporter.cli.render.layout import Column, Order, Row

Key = tuple[str, ...]
"""The identity of a row: the node, the job or device, the process, and its device."""

# By hue, like the page's dark colors. Light, for black names on them; none is the red or the yellow of a severity.
_COLORS = tuple(f"color({number})" for number in (75, 215, 79, 140, 211, 179, 80, 137, 105, 149, 176, 109))
_IDENTITY = ("name", "owner", "user", "command", "k8s_namespace", "k8s_pod", "slurm_job_id", "ray_job_id", "state")
_OF_PROCESS = ("pid", "user", "command", "k8s_namespace", "k8s_pod", "state")

PROCESS_FIELDS = (
    *("pid", "gpu", "uuid", "workload", "rank", "command", "user", "k8s_namespace", "k8s_pod", "state"),
    *("used_bytes", "allocated_bytes", "reserved_bytes", "idle_cache_bytes", "reclaimable_bytes", "fragmented_bytes"),
    *("non_torch_bytes", "nccl_bytes", "unmapped_bytes", "step", "sample_age_seconds", "actions"),
)
"""The fields of a row in `top --once --json`, in order."""
_BY_USED, BY_GPU = Order("used"), Order("gpu")


@dataclass(frozen=True, slots=True)
class View:
    """What a person has chosen to see: words to filter by, and the order of jobs."""

    text: str = ""
    order: Order = _BY_USED


def matches(text: str, words: str) -> bool:
    """Return whether a text has every one of some words. Case is ignored."""
    known = text.casefold()
    return all(word in known for word in words.casefold().split())


def rows_of(
    nodes: Sequence[Node], words: str = "", warnings: Sequence[str] = ()
) -> tuple[list[Row], list[Row], list[Row]]:
    """Return the rows of findings, devices and jobs that have every one of some words, or whose job has them.

    Below each job are its processes on each device, with `level` 1. Nodes that do not answer and `warnings` are
    findings.
    """
    findings = [_own_finding(node, "critical", "No answer", node.error) for node in nodes if node.error]
    findings += [_own_finding(Node(None), "warning", "Fleet", text) for text in warnings]
    devices: list[Row] = []
    jobs: list[Row] = []
    for node in nodes:
        if node.live is None:
            continue
        rows = {job["id"]: _job(node, job) for job in node.live["jobs"]}
        texts = {name: " ".join(row["text"] for row in of_job) for name, of_job in rows.items()}
        jobs += [row for name, of_job in rows.items() if matches(texts[name], words) for row in of_job]
        for device in node.live["devices"]:
            on_it = [name for share in device["jobs"] if (name := share["job"]) in rows]
            row = _device(node, device, [rows[name][0] for name in on_it])
            if matches(" ".join((row["text"], *(texts[name] for name in on_it))), words):
                devices.append(row)
        for found in node.live["findings"]:
            row = _finding(node, found, rows[found["job"]][0]["job"] if found["job"] in rows else None)
            if matches(f"{row['text']} {texts.get(found['job'], '')}", words):
                findings.append(row)
    if nodes and not findings:
        nothing = "No finding matches." if words else "Nothing needs attention."
        findings.append(_own_finding(Node(None), "info", "", nothing))
    return findings, devices, jobs


def arranged(
    rows: Sequence[Row], columns: Sequence[Column], order: Order | None, unfolded: Container[Key] | None = None
) -> list[Row]:
    """Return rows in order, each job with its processes if it is unfolded; None unfolds all."""
    first: list[Row] = []
    processes: dict[Key, list[Row]] = {}
    for row in rows:
        (processes.setdefault(row["key"][:2], []) if row.get("level") else first).append(row)
    found: list[Row] = []
    for row in order.sorted(first, columns) if order else first:
        below = processes.get(row["key"], []) if unfolded is None or row["key"] in unfolded else []
        found += [{**row, "fold": "▾"} if below else row, *below]
    return found


def process_documents(nodes: Sequence[Node], view: View) -> list[Row]:
    """Return each process on each device, in order, as JSON has it."""
    rows = view.order.sorted((row for row in rows_of(nodes, view.text)[2] if row["level"]), JOBS)
    return [{name: row.get(name) for name in PROCESS_FIELDS} for row in rows]


def called(job: Row) -> str:
    """Return the name of a job with its user, as the exporter's sentences have it: `notebook (carol)`."""
    return f"{job['name']} ({job['user']})" if job["user"] else job["name"]


def as_of(live: Row) -> str:
    """Return the local time of a document."""
    return clock(live["time"]["unix_seconds"], form="%H:%M:%S")


def _job(node: Node, job: Row) -> list[Row]:
    """Return the row of a job, and one for each of its processes on each device, by rank and pid."""
    key = (node.name, job["id"])
    common = {**_common(node), "job": job}
    gpus = [f"gpu {gpu}" for gpu in job["gpus"]]
    own = {
        "key": key,
        "level": 0,
        "fold": "▸",
        "title": job["name"],
        "color": _COLORS[(job.get("hue") or 0) % len(_COLORS)],  # older exporters assign none
        "text": _text(
            node.name, *(job[name] for name in _IDENTITY), (job.get("engine") or {}).get("label"), *gpus, *job["uuids"]
        ),
    }
    rows: list[Row] = [{**job, **common, **own}]
    for process in sorted(job["processes"], key=lambda one: (natural(one["rank"] or ""), natural(one["pid"]))):
        title = f"  rank {process['rank']} ({process['pid']})" if process["rank"] else f"  pid {process['pid']}"
        for place in process["devices"] or ({"gpu": None, "uuid": ""},):
            own = {
                "key": (*key, str(process["pid"]), place["uuid"]),
                "level": 1,
                "fold": "",
                "title": title,
                "color": "",
                "text": _text(title, *(process[name] for name in _OF_PROCESS)),
                "owner": "" if process["user"] == job["user"] else process["user"] or "",
                "gpus": [place["gpu"]],
                "state": "orphan" if process.get("orphan") else process["state"],
                "since_unix_seconds": process["started_unix_seconds"],
            }
            rows.append({**process, **place, **common, **own})
    return rows


def _device(node: Node, device: Row, jobs: Sequence[Row]) -> Row:
    """Return the row of a device; `jobs` are the rows of the jobs on it, the largest first."""
    shares = {share["job"]: share for share in device["jobs"] if share["used_bytes"] is not None}
    own = {
        "key": (node.name, device["uuid"] or str(device["gpu"])),
        "job": None,
        "strip": [
            {**shares[job["id"]], "name": job["name"], "color": job["color"]} for job in jobs if job["id"] in shares
        ],
        "text": _text(
            node.name, f"gpu {device['gpu']}", device["uuid"], device["name"], *(job["name"] for job in jobs)
        ),
    }
    return {**device, **_common(node), **own}


def _finding(node: Node, found: Row, job: Row | None) -> Row:
    mark, style = SEVERITIES.get(found["severity"], ("", ""))
    row = {**found, **_common(node), "job": job, "mark": mark, "style": style}
    since = clock(found["since_unix_seconds"], row["now"]) if found["since_unix_seconds"] else ""
    text = _text(node.name, found["title"], found["sentence"], found["owner"])
    return {**row, "key": (node.name, found["id"]), "since": since, "text": text}


def _own_finding(node: Node, severity: str, title: str, sentence: str) -> Row:
    """Return a finding of the terminal itself: no document has it."""
    if node.live:
        sentence = f"Values as of {as_of(node.live)}: {sentence}"
    found = {"id": sentence, "severity": severity, "title": title, "sentence": sentence, "owner": "", "next": ""}
    return {**_finding(node, {**found, "since_unix_seconds": None, "clear": None}, None), "dim": False}


def _common(node: Node) -> dict[str, Any]:
    now = node.live["time"]["unix_seconds"] if node.live else None
    return {"node": node.name, "from": node, "now": now, "dim": bool(node.error)}


def _text(*values: object) -> str:
    return " ".join(str(value) for value in values if value is not None)
