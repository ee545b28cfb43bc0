"""What became of an action: a row for each process and device, the total, and why something was not done."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from gpumem_exporter.cli.render.sizes import UNKNOWN, human_bytes, human_seconds
from gpumem_exporter.cli.render.terminal import plain, table

if TYPE_CHECKING:
    from rich.console import RenderableType
    from rich.text import Text

__all__ = ["COLUMNS", "action_tables", "reasons", "summary"]

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


def action_tables(action: Document, *, dry_run: bool) -> Iterator[RenderableType]:
    """Everything an action prints, top to bottom.

    `before` and `after` are what the allocator holds (reserved); for a garbage collection, what is in tensors.
    """
    results = sorted(action.get("results") or (), key=_place)
    if results:
        counted = "allocated" if action.get("action") == "collect_garbage" else "reserved"
        yield table("", COLUMNS, (_row(result, counted) for result in results))
    for reason in reasons(results):
        yield plain(reason, "red")
    for result in results:
        if result.get("snapshot"):
            yield plain(_snapshot(result))
    yield plain(summary(action, dry_run=dry_run), "bold")


def _place(result: Document) -> tuple[str, str, int, str]:
    """Rank 10 stands after rank 9."""
    return (result.get("workload") or "", (result.get("rank") or "").zfill(9), result["pid"], result.get("gpu") or "")


def _row(result: Document, counted: str) -> tuple[str | Text, ...]:
    outcome = str(result.get("outcome") or UNKNOWN)
    freed = result.get("freed_bytes") if counted == "reserved" else _let_go_bytes(result)
    return (
        str(result["pid"]),
        result.get("workload") or UNKNOWN,
        result.get("rank") or UNKNOWN,
        result.get("gpu") or result.get("uuid") or UNKNOWN,
        plain(outcome, "green" if outcome == "done" else "red"),
        human_bytes(result.get(f"{counted}_before_bytes")),
        human_bytes(result.get(f"{counted}_after_bytes")),
        human_bytes(freed),
        human_seconds(result.get("duration_seconds")),
    )


def summary(action: Document, *, dry_run: bool) -> str:
    """The last line: what it came to."""
    results = action.get("results") or []
    done = len({result["pid"] for result in results if result.get("outcome") == "done"})
    processes = len({result["pid"] for result in results})
    state = action.get("state")
    if state in ("queued", "running"):
        return f"Action {action.get('id')} is {state}; GET /api/v1/actions/{action.get('id')} tells its end."
    where = f"in {done} of {_count(processes)}"
    if action.get("action") == "reset_peak":
        return f"{'Would reset' if dry_run else 'Reset'} the peaks {where}."
    if action.get("action") == "collect_garbage":
        return _collected(results, where, dry_run=dry_run)
    if action.get("action") == "snapshot":
        return f"{'Would write a snapshot' if dry_run else 'Wrote a snapshot'} {where}."
    if action.get("action") == "set_memory_fraction":
        return f"{'Would cap' if dry_run else 'Capped'} what may be reserved {where}."
    known = [result["freed_bytes"] for result in results if result.get("freed_bytes") is not None]
    if not known:
        return f"{'Would be done' if dry_run else 'Done'} {where}; what that frees is not known."
    verb = "Would free" if dry_run else "Freed"
    return f"{verb} {human_bytes(sum(known))} {where}."


def _snapshot(result: Document) -> str:
    """Where it is, and its largest block."""
    snapshot = result["snapshot"]
    said = f"pid {result['pid']}: {snapshot['path']} ({human_bytes(snapshot['size_bytes'])})"
    largest = (snapshot.get("largest") or [{}])[0]
    if largest.get("frame"):
        said += f"; largest: {human_bytes(largest['size_bytes'])} from {largest['frame']}"
    return said


def _collected(results: Sequence[Document], where: str, *, dry_run: bool) -> str:
    if dry_run:
        return f"Would collect garbage {where}; what that lets go cannot be known beforehand."
    known = [size for size in map(_let_go_bytes, results) if size is not None]
    if not known:
        return f"Collected garbage {where}; what that let go is not known."
    less = sum(known)
    change = f"tensors hold {human_bytes(abs(less))} {'more' if less < 0 else 'less'} than before"
    return f"Collected garbage {where}: {change}. What was let go stays in the cache until a clear."


def _let_go_bytes(result: Document) -> int | None:
    """By how much what is in tensors fell; negative where the program allocated meanwhile."""
    before, after = result.get("allocated_before_bytes"), result.get("allocated_after_bytes")
    return None if before is None or after is None else before - after


def reasons(results: Sequence[Document]) -> Iterator[str]:
    """Why something was not done, once for each process and reason."""
    told = set()
    for result in results:
        reason = result.get("reason")
        outcome = result.get("outcome")
        if outcome != "done" and (result["pid"], reason) not in told:
            told.add((result["pid"], reason))
            yield f"pid {result['pid']}: {outcome}{f': {reason}' if reason else ''}"


def _count(processes: int) -> str:
    return f"{processes} process" if processes == 1 else f"{processes} processes"
