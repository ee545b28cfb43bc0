"""The tables of nodes: the rows of their jobs, devices and findings, and what `info` and `top --once` print of them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from gpumem_client.wire.units import UNKNOWN, counted, human_bytes, short_bytes
from gpumem_exporter.cli.node_view import Node
from gpumem_exporter.cli.program import one_line
from gpumem_exporter.cli.render.columns import DEVICES, FINDINGS, JOBS, LEDGER, SEVERITIES, clock
from gpumem_exporter.cli.render.layout import Column, Layout, Order, Row, natural
from gpumem_exporter.cli.render.terminal import plain
from gpumem_exporter.core.ledger import sum_of_known

if TYPE_CHECKING:
    from rich.console import RenderableType
    from rich.text import Text

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


def node_tables(
    nodes: Sequence[Node],
    view: View,
    width: int,
    *,
    wide: bool = False,
    ledger: bool = False,
    warnings: Sequence[str] = (),
) -> Iterator[RenderableType]:
    """Yield the nodes for a terminal of `width` columns. `wide` adds the processes."""
    yield heading(nodes)
    findings, devices, jobs = rows_of(nodes, view.text, warnings)
    jobs = view.order.sorted(jobs, JOBS)
    parts: tuple[tuple[Sequence[Column], Sequence[Row], Order | None], ...] = (
        (FINDINGS, _advised(findings), None),
        (JOBS, unfolded(jobs) if wide else jobs, view.order),
        (DEVICES, BY_GPU.sorted(devices, DEVICES), BY_GPU),
        (LEDGER, [device for device in devices if ledger and device["ledger"]], None),
    )
    for columns, rows, order in parts:
        if rows:
            yield plain("")
            if columns is LEDGER:
                yield plain("Ledger", "bold")
            layout = Layout(columns, rows, width, order)
            yield layout.table(rows, heading=columns is not FINDINGS)


def _advised(findings: Sequence[Row]) -> list[Row]:
    """Return findings, each with a row that says what to do next."""
    blank = {"mark": "", "node": "", "since": "", "title": "", "style": "dim"}
    return [one for row in findings for one in (row, {**row, **blank, "sentence": row.get("next")}) if one["sentence"]]


def heading(nodes: Sequence[Node]) -> Text:
    """Return the first line: the node or the number of exporters, the time of the values, and the totals."""
    answered = [node.live for node in nodes if node.live is not None]
    lost = any(node.error for node in nodes)
    if len(nodes) == 1 and not nodes[0].name and answered:
        line = plain(answered[0]["node"]["host"], "bold").append("  ")
        line.append(f"{'as of ' if lost else ''}{as_of(answered[0])}", style="bold red" if lost else "")
    else:
        current = sum(not node.error for node in nodes)
        exporters = f"{current} of {counted(len(nodes), 'exporter', 'exporters')}"
        line = plain(exporters, "bold red" if lost else "bold")
    if any(live["node"]["source"] == "demo" for live in answered):
        line.append("  DEMO", style="bold yellow")
    if not answered:
        return line
    totals = [live["node"]["totals"] for live in _distinct(answered)]
    sizes = (sum_of_known([one[name] for one in totals]) for name in ("used_bytes", "total_bytes", "idle_cache_bytes"))
    used, total, idle = map(short_bytes, sizes)
    jobs, devices = (sum(one[name] for one in totals) for name in ("jobs", "devices"))
    counts = f"{counted(jobs, 'job', 'jobs')} on {counted(devices, 'device', 'devices')}"
    dim = "dim " if all(node.error for node in nodes) else ""
    line.append(f"  {used} of {total} used, ", style=dim).append(f"idle cache {idle}", style=f"{dim}yellow")
    return line.append(f", {counts}", style=dim)


def _distinct(lives: Sequence[Row]) -> Iterator[Row]:
    """Yield the documents whose devices no other document has. Two exporters may see one device."""
    seen: set[str] = set()
    for live in sorted(lives, key=lambda live: -len(live["devices"])):
        # Simulated devices have the same uuids on every node.
        uuids = set() if live["node"]["source"] == "demo" else {device["uuid"] for device in live["devices"]}
        if not seen & uuids:
            seen |= uuids
            yield live


def device_lines(live: Mapping[str, Any]) -> Iterator[str]:
    """Yield one line for each device: what is used, what a clear frees for good, and the jobs on it."""
    names = {job["id"]: job["name"] for job in live["jobs"]}
    for device in live["devices"]:
        name, memory = f"GPU {device['gpu'] or device['uuid']}", device["memory"]
        if memory is None:
            yield one_line(f"{name}: {device['error'] or 'not readable'}")
            continue
        jobs = ", ".join(f"{names.get(job['job'], UNKNOWN)} {human_bytes(job['used_bytes'])}" for job in device["jobs"])
        used, total, frees = map(human_bytes, (memory["used_bytes"], memory["total_bytes"], device["idle_cache_bytes"]))
        yield one_line(f"{name}: {used} of {total} used, a clear frees {frees}; {jobs or 'no job'}")
