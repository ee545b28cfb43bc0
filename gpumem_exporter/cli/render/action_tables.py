"""The results of an action: a row for each process and device, the reasons of failures, and the total."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from gpumem_exporter.cli.render.terminal import plain, table
from gpumem_exporter.units import UNKNOWN, human_bytes, human_seconds

if TYPE_CHECKING:
    from rich.console import RenderableType
    from rich.text import Text

__all__ = ["COLUMNS", "action_tables", "measured", "reasons", "result_cells", "summary"]

Document = Mapping[str, Any]

COLUMNS = (
    ("pid", "right"),
    ("workload", "cut"),
    ("rank", "right"),
    ("gpu", "left"),
    ("outcome", "left"),
    ("before", "right"),
    ("after", "right"),
    ("freed", "right"),
    ("took", "right"),
)

_DONE = {
    "reset_peak": ("Would reset the peaks", "Reset the peaks"),
    "snapshot": ("Would write a snapshot", "Wrote a snapshot"),
    "set_memory_fraction": ("Would cap the reserved memory", "Capped the reserved memory"),
}
"""The summary of actions that free nothing: of a dry run, and of a real one."""


def action_tables(action: Document, *, dry_run: bool) -> Iterator[RenderableType]:
    """Yield all that an action prints, from top to bottom."""
    results = sorted(action.get("results") or (), key=_order)
    if results:
        memory = measured(action.get("action"))
        yield table("", COLUMNS, (result_cells(result, memory) for result in results))
    for reason in reasons(results):
        yield plain(reason, "red")
    for result in results:
        if result.get("snapshot"):
            yield plain(_snapshot(result))
    yield plain(summary(action, dry_run=dry_run), "bold")


def measured(action: str | None) -> str:
    """Return the memory in the columns `before` and `after`: `allocated` for a garbage collection, else `reserved`."""
    return "allocated" if action == "collect_garbage" else "reserved"


def result_cells(result: Document, memory: str) -> tuple[str | Text, ...]:
    """Return the cells of a result for `COLUMNS`. `memory` is that of `measured`."""
    outcome = str(result.get("outcome") or UNKNOWN)
    freed = result.get("freed_bytes") if memory == "reserved" else _freed_in_allocator_bytes(result)
    return (
        UNKNOWN if result["pid"] is None else str(result["pid"]),
        result.get("workload") or UNKNOWN,
        result.get("rank") or UNKNOWN,
        result.get("gpu") or result.get("uuid") or UNKNOWN,
        plain(outcome, "green" if outcome == "done" else "red"),
        human_bytes(result.get(f"{memory}_before_bytes")),
        human_bytes(result.get(f"{memory}_after_bytes")),
        human_bytes(freed),
        human_seconds(result.get("duration_seconds")),
    )


def reasons(results: Sequence[Document]) -> Iterator[str]:
    """Yield a line for each process and reason that is not done."""
    not_done = [result for result in results if result.get("outcome") != "done"]
    for pid, outcome, reason in dict.fromkeys((one["pid"], one.get("outcome"), one.get("reason")) for one in not_done):
        yield f"pid {pid}: {outcome}{f': {reason}' if reason else ''}"


def summary(action: Document, *, dry_run: bool) -> str:
    """Return the last line of an action."""
    name, state = action.get("action") or "", action.get("state")
    if state in ("queued", "running"):
        return f"Action {action.get('id')} is {state}; see GET /api/v1/actions/{action.get('id')} for its results."
    results = action.get("results") or []
    done = len({result["pid"] for result in results if result.get("outcome") == "done"})
    processes = len({result["pid"] for result in results})
    where = f"in {done} of {processes} process{'' if processes == 1 else 'es'}"
    if name in _DONE:
        return f"{_DONE[name][not dry_run]} {where}."
    if name == "collect_garbage":
        return _collected(results, where, dry_run=dry_run)
    known = [result["freed_bytes"] for result in results if result.get("freed_bytes") is not None]
    if not known:
        return f"{'Would be done' if dry_run else 'Done'} {where}; the freed bytes are not known."
    return f"{'Would free' if dry_run else 'Freed'} {human_bytes(sum(known))} {where}."


def _order(result: Document) -> tuple[str, str, int, str]:
    """By workload and rank; rank 10 is after rank 9."""
    return (result.get("workload") or "", (result.get("rank") or "").zfill(9), result["pid"], result.get("gpu") or "")


def _snapshot(result: Document) -> str:
    """The path of a snapshot, and its largest block."""
    snapshot = result["snapshot"]
    line = f"pid {result['pid']}: {snapshot['path']} ({human_bytes(snapshot['size_bytes'])})"
    largest = (snapshot.get("largest") or [{}])[0]
    if largest.get("frame"):
        line += f"; largest: {human_bytes(largest['size_bytes'])} from {largest['frame']}"
    return line


def _collected(results: Sequence[Document], where: str, *, dry_run: bool) -> str:
    if dry_run:
        return f"Would collect garbage {where}; the freed bytes are not known in advance."
    known = [size for size in map(_freed_in_allocator_bytes, results) if size is not None]
    if not known:
        return f"Collected garbage {where}; the freed bytes are not known."
    freed = sum(known)
    change = f"allocated memory {'grew' if freed < 0 else 'fell'} by {human_bytes(abs(freed))}"
    return f"Collected garbage {where}: {change}. Freed memory stays in the cache until a clear."


def _freed_in_allocator_bytes(result: Document) -> int | None:
    """How far allocated memory fell; negative if user code allocated more meanwhile."""
    before, after = result.get("allocated_before_bytes"), result.get("allocated_after_bytes")
    return None if before is None or after is None else before - after
