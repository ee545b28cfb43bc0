"""The rows of the tables: jobs with their processes, devices and findings of nodes, filtered and in order."""

from __future__ import annotations

from collections.abc import Container, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from gpumem_exporter.cli.node import Node
from gpumem_exporter.cli.render.columns import DEVICES, JOBS, SEVERITIES, clock, number
from gpumem_exporter.cli.render.layout import Order

Row = Mapping[str, Any]
Key = tuple[str, ...]
"""The identity of a row: the node, the job or device, the process, and its device."""

_COLORS = ("cyan", "green", "magenta", "blue", "bright_yellow", "bright_cyan", "bright_green", "bright_magenta")
"""Red and yellow show severities."""
_IDENTITY = ("name", "owner", "user", "command", "k8s_namespace", "k8s_pod", "slurm_job_id", "ray_job_id", "state")
_OF_PROCESS = ("pid", "user", "command", "k8s_namespace", "k8s_pod", "state")

PROCESS_FIELDS = (
    *("pid", "gpu", "uuid", "workload", "rank", "command", "user", "k8s_namespace", "k8s_pod", "state"),
    *("used_bytes", "allocated_bytes", "reserved_bytes", "idle_cache_bytes", "reclaimable_bytes", "fragmented_bytes"),
    *("non_torch_bytes", "nccl_bytes", "unmapped_bytes", "step", "sample_age_seconds", "actions"),
)
"""The fields of a row in `top --once --json`, in order."""
_BY_USED, _BY_GPU = Order("used"), Order("gpu")


@dataclass(frozen=True, slots=True)
class View:
    """What a person has chosen to see: words to filter by, and the orders of jobs and of devices."""

    text: str = ""
    jobs: Order = _BY_USED
    devices: Order = _BY_GPU


def matches(text: str, words: str) -> bool:
    """Return whether a text has every one of some words. Case is ignored."""
    known = text.casefold()
    return all(word in known for word in words.casefold().split())


@dataclass(slots=True)
class Colors:
    """The color of each job, which it keeps as long as the program runs."""

    _known: dict[Key, str] = field(default_factory=dict)

    def of(self, node: Node, job_id: str) -> str:
        """Return the color of a job."""
        return self._known.setdefault((node.name, job_id), _COLORS[len(self._known) % len(_COLORS)])


def job_rows(nodes: Sequence[Node], view: View, colors: Colors) -> list[Row]:
    """Return a row for each job, and after it a row for each of its processes on each device."""
    rows: list[Row] = []
    for node, live in _answered(nodes):
        for job in live["jobs"]:
            if not view.text or matches(f"{node.name} {_names(job)}", view.text):
                key = (node.name, job["id"])
                own = {
                    "key": key,
                    "level": 0,
                    "fold": "▸",
                    "title": job["name"],
                    "color": colors.of(node, job["id"]),
                    "text": f"{node.name} {_names({**job, 'processes': ()})}",
                    "job": job,
                }
                rows.append({**job, **_common(node, live), **own})
    return [row for job in view.jobs.sorted(rows, JOBS) for row in (job, *_processes(job))]


def folded(rows: Sequence[Row], unfolded: Container[Key]) -> list[Row]:
    """Return the rows of jobs, and of the processes of jobs that are unfolded."""
    shown = [row for row in rows if row["level"] == 0 or row["key"][:2] in unfolded]
    return [{**row, "fold": "▾"} if row["level"] == 0 and row["key"] in unfolded else row for row in shown]


def _processes(job: Row) -> Iterator[Row]:
    """Yield a row for each process of the row of a job, on each of its devices, by rank and pid."""
    for process in sorted(job["processes"], key=lambda one: (number(one["rank"] or ""), number(one["pid"]))):
        title = f"  rank {process['rank']} ({process['pid']})" if process["rank"] else f"  pid {process['pid']}"
        for place in process["devices"] or ({"gpu": None, "uuid": ""},):
            own = {
                "key": (*job["key"], str(process["pid"]), place["uuid"]),
                "level": 1,
                "fold": "",
                "title": title,
                "color": "",
                "owner": "" if process["user"] == job["user"] else process["user"] or "",
                "gpus": [place["gpu"]],
                "since_unix_seconds": process["started_unix_seconds"],
                "text": f"{title} {process['command']} {process['user']} {process['state']}",
            }
            yield {**process, **place, **{name: job[name] for name in ("node", "from", "now", "dim", "job")}, **own}


def device_rows(nodes: Sequence[Node], view: View, colors: Colors) -> list[Row]:
    """Return a row for each device."""
    rows: list[Row] = []
    for node, live in _answered(nodes):
        jobs = {job["id"]: job for job in live["jobs"]}
        for device in live["devices"]:
            on_it = [(jobs[share["job"]], share) for share in device["jobs"] if share["job"] in jobs]
            text = f"{node.name} gpu {device['gpu']} {device['uuid']} {device['name']}"
            if not view.text or matches(" ".join((text, *(_names(job) for job, _ in on_it))), view.text):
                own = {
                    "key": (node.name, device["uuid"] or str(device["gpu"])),
                    "strip": [
                        {**share, "name": job["name"], "color": colors.of(node, job["id"])}
                        for job, share in on_it
                        if share["used_bytes"] is not None
                    ],
                    "text": " ".join((text, *(job["name"] for job, _ in on_it))),
                    "job": on_it[0][0] if on_it else None,
                }
                rows.append({**device, **_common(node, live), **own})
    return view.devices.sorted(rows, DEVICES)


def finding_rows(nodes: Sequence[Node], view: View, warnings: Sequence[str] = ()) -> Sequence[Row]:
    """Return a row for each finding, after the nodes that do not answer and the `warnings` of the terminal itself."""
    rows: list[dict[str, Any]] = []
    own = [("critical", "No answer", _no_answer(node), node) for node in nodes if node.error]
    own += [("warning", "Fleet", text, Node(None)) for text in warnings]
    for severity, title, sentence, node in own:
        found = {"severity": severity, "title": title, "sentence": sentence, "since_unix_seconds": None, "clear": None}
        rows.append({**found, **_common(node, None), "key": (node.name, sentence), "job": None, "text": sentence})
    for node, live in _answered(nodes):
        jobs = {job["id"]: job for job in live["jobs"]}
        for found in live["findings"]:
            job = jobs.get(found["job"])
            text = f"{node.name} {found['title']} {found['sentence']}"
            if not view.text or matches(f"{text} {_names(job) if job else ''}", view.text):
                rows.append({**found, **_common(node, live), "key": (node.name, found["id"]), "job": job, "text": text})
    for row in rows:
        row["mark"], row["style"] = SEVERITIES.get(row["severity"], ("", ""))
        row["since"] = clock(row["since_unix_seconds"], row["now"]) if row["since_unix_seconds"] else ""
    return rows


def process_documents(nodes: Sequence[Node], view: View) -> list[Row]:
    """Return each process on each device, in order, as JSON has it."""
    rows = view.jobs.sorted((row for row in job_rows(nodes, view, Colors()) if row["level"]), JOBS)
    return [{name: row.get(name) for name in PROCESS_FIELDS} for row in rows]


def _names(job: Row) -> str:
    """Return the names of a job and of its processes."""
    own = [job[name] for name in _IDENTITY]
    of_processes = [process[name] for process in job["processes"] for name in _OF_PROCESS]
    gpus = [f"gpu {gpu}" for gpu in job["gpus"]]
    return " ".join(str(value) for value in (*own, *of_processes, *gpus, *job["uuids"]) if value is not None)


def _answered(nodes: Sequence[Node]) -> Iterator[tuple[Node, Row]]:
    return ((node, node.live) for node in nodes if node.live is not None)


def _common(node: Node, live: Row | None) -> dict[str, Any]:
    now = live["time"]["unix_seconds"] if live else None
    return {"node": node.name, "from": node, "now": now, "dim": bool(node.error and live)}


def _no_answer(node: Node) -> str:
    return f"Values as of {as_of(node.live)}: {node.error}" if node.live else node.error


def called(job: Row) -> str:
    """Return the name of a job with its user, as the exporter's sentences have it: `notebook (carol)`."""
    return f"{job['name']} ({job['user']})" if job["user"] else job["name"]


def as_of(live: Row) -> str:
    """Return the local time of a document."""
    return clock(live["time"]["unix_seconds"], form="%H:%M:%S")
