"""What `info`, `top --once` and `fleet info` print about nodes, from top to bottom."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from gpumem_client.wire.units import UNKNOWN, counted, human_bytes, short_bytes
from gpumem_exporter.cli.node_view import Node
from gpumem_exporter.cli.program import one_line
from gpumem_exporter.cli.render.columns import DEVICES, FINDINGS, JOBS, LEDGER
from gpumem_exporter.cli.render.layout import Column, Layout, Order, Row
from gpumem_exporter.cli.render.rows import BY_GPU, View, as_of, rows_of, unfolded
from gpumem_exporter.cli.render.terminal import plain
from gpumem_exporter.core.ledger import sum_of_known

if TYPE_CHECKING:
    from rich.console import RenderableType
    from rich.text import Text

_TOTALS = ("used", "total", "idle_cache")


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
    advised = [(row, {**row, **blank, "sentence": row["next"]} if row.get("next") else None) for row in findings]
    return [row for pair in advised for row in pair if row]


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
    sizes = {name: sum_of_known([one[f"{name}_bytes"] for one in totals] or [None]) for name in _TOTALS}
    used, total, idle = map(short_bytes, sizes.values())
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
