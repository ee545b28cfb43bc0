"""The rows of the tables: jobs with their processes, devices and findings of nodes, filtered and in order."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from gpumem_exporter.cli.node_view import Node
from gpumem_exporter.cli.render.columns import JOBS, SEVERITIES, clock
from gpumem_exporter.cli.render.layout import Order, Row, natural

# By hue, like the page's dark colors. Light, for black names on them; none is the red or the yellow of a severity.
_COLORS = tuple(f"color({number})" for number in (75, 215, 79, 140, 211, 179, 80, 137, 105, 149, 176, 109))
PROCESS_FIELDS = (
    *("pid", "gpu", "uuid", "workload", "rank", "command", "user", "k8s_namespace", "k8s_pod", "state"),
    *("used_bytes", "allocated_bytes", "reserved_bytes", "idle_cache_bytes", "reclaimable_bytes", "fragmented_bytes"),
    *("non_torch_bytes", "nccl_bytes", "unmapped_bytes", "step", "sample_age_seconds", "actions"),
)
"""The fields of a row in `top --once --json`, in order."""
_BY_USED, BY_GPU = Order("used"), Order("GPU")


@dataclass(frozen=True, slots=True)
class View:
    """What a person has chosen to see: words to filter by, and the order of jobs."""

    text: str = ""
    order: Order = _BY_USED


def rows_of(
    nodes: Sequence[Node], words: str = "", warnings: Sequence[str] = ()
) -> tuple[list[Row], list[Row], list[Row]]:
    """Return the rows of findings, devices and jobs that have every one of some words, or whose job has them.

    A row of a job has in `ranks` the rows of its processes on each device, by rank and pid. Nodes that do not answer
    and `warnings` are findings.
    """
    findings = [_own_finding(node, "critical", "No answer", node.error) for node in nodes if node.error]
    findings += [_own_finding(Node(None), "warning", "Fleet", text) for text in warnings]
    devices: list[Row] = []
    jobs: list[Row] = []
    for node in nodes:
        if node.live is None:
            continue
        rows = {job["id"]: _job(node, job) for job in node.live["jobs"]}
        jobs += [row for row in rows.values() if _matches(words, row, *row["ranks"])]
        for device in node.live["devices"]:
            on_it = [rows[share["job"]] for share in device["jobs"] if share["job"] in rows]
            row = _device(node, device, on_it)
            if _matches(words, row, *unfolded(on_it)):
                devices.append(row)
        for found in node.live["findings"]:
            about = rows.get(found["job"])
            row = _finding(node, found, about and about["job"])
            if _matches(words, row, *unfolded([about] if about else [])):
                findings.append(row)
    if nodes and not findings:
        nothing = "No finding matches." if words else "Nothing needs attention."
        findings.append(_own_finding(Node(None), "info", "", nothing))
    if not jobs:
        known = words or any(node.live and node.live["node"]["totals"]["jobs"] for node in nodes)
        none = "No job matches." if known else "There is no process on a device, and no process that reports."
        findings.append(_own_finding(Node(None), "info", "", none if nodes else "The query selects no exporter."))
    return findings, devices, jobs


def unfolded(jobs: Iterable[Row]) -> list[Row]:
    """Return the rows of jobs, each with the rows of its processes below it."""
    return [row for job in jobs for row in (job, *job.get("ranks", ()))]


def process_documents(nodes: Sequence[Node], view: View) -> list[Row]:
    """Return each process on each device, in order, as JSON has it."""
    rows = view.order.sorted((row for job in rows_of(nodes, view.text)[2] for row in job["ranks"]), JOBS)
    return [{name: row.get(name) for name in PROCESS_FIELDS} for row in rows]


def called(job: Row) -> str:
    """Return the name of a job with its user, as the exporter's sentences have it: `notebook (carol)`."""
    return f"{job['name']} ({job['user']})" if job["user"] else job["name"]


def as_of(live: Row) -> str:
    """Return the local time of a document."""
    return clock(live["time"]["unix_seconds"], form="%H:%M:%S")


def _matches(words: str, *rows: Row) -> bool:
    """Return whether the texts in some rows have every one of some words. Case is ignored."""
    known = " ".join(text for row in rows for text in row.values() if isinstance(text, str)).casefold()
    return all(word in known for word in words.casefold().split())


def _job(node: Node, job: Row) -> Row:
    """Return the row of a job, and the rows of its processes on each device."""
    common = {**_common(node), "job": job}
    ranks: list[Row] = []
    for process in sorted(job["processes"], key=lambda one: (natural(one["rank"] or ""), natural(one["pid"]))):
        title = f"  rank {process['rank']} ({process['pid']})" if process["rank"] else f"  pid {process['pid']}"
        for place in process["devices"] or ({"gpu": None, "uuid": ""},):
            own = {
                "key": (node.name, job["id"], str(process["pid"]), place["uuid"]),
                "title": title,
                "color": "",
                "owner": "" if process["user"] == job["user"] else process["user"] or "",
                "gpus": [place["gpu"]],
                "state": "orphan" if process.get("orphan") else process["state"],
                "since_unix_seconds": process["started_unix_seconds"],
            }
            ranks.append({**process, **place, **common, **own})
    own = {
        "key": (node.name, job["id"]),
        "title": job["name"],
        "color": _COLORS[(job.get("hue") or 0) % len(_COLORS)],  # older exporters assign none
        "ranks": ranks,
    }
    return {**job, **common, **own}


def _device(node: Node, device: Row, jobs: Sequence[Row]) -> Row:
    """Return the row of a device; `jobs` are the rows of the jobs on it, the largest first."""
    shares = {share["job"]: share for share in device["jobs"] if share["used_bytes"] is not None}
    own = {
        "key": (node.name, device["uuid"] or str(device["gpu"])),
        "job": None,
        "strip": [
            {**shares[job["id"]], "name": job["name"], "color": job["color"]} for job in jobs if job["id"] in shares
        ],
    }
    return {**device, **_common(node), **own}


def _finding(node: Node, found: Row, job: Row | None) -> Row:
    mark, style = SEVERITIES.get(found["severity"], ("", ""))
    row = {**found, **_common(node), "job": job, "mark": mark, "style": style}
    since = clock(found["since_unix_seconds"], row["now"]) if found["since_unix_seconds"] else ""
    return {**row, "key": (node.name, found["id"]), "since": since}


def _own_finding(node: Node, severity: str, title: str, sentence: str) -> Row:
    """Return a finding of the terminal itself: no document has it."""
    if node.live:
        sentence = f"Values as of {as_of(node.live)}: {sentence}"
    found = {"id": sentence, "severity": severity, "title": title, "sentence": sentence, "owner": "", "next": ""}
    return {**_finding(node, {**found, "since_unix_seconds": None, "clear": None}, None), "dim": False}


def _common(node: Node) -> dict[str, Any]:
    now = node.live["time"]["unix_seconds"] if node.live else None
    return {"node": node.name, "from": node, "now": now, "dim": bool(node.error)}
