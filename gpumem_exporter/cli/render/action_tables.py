"""The results of an action: a row for each process and device, the reasons of failures, and the total."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from gpumem_client.wire.units import UNKNOWN, human_bytes, human_seconds
from gpumem_exporter.cli.render.terminal import plain, table

if TYPE_CHECKING:
    from rich.console import RenderableType
    from rich.text import Text

Document = Mapping[str, Any]

_NAMES = (("pid", "right"), ("workload", "cut"), ("rank", "right"), ("gpu", "left"), ("outcome", "left"))
_COLUMNS = (*_NAMES, *((name, "right") for name in ("before", "after", "freed", "took")))
_NAMED_PROCESSES_MAX = 8
_DONE = {
    "reset_peak": ("Would reset the peaks", "Reset the peaks"),
    "snapshot": ("Would write a snapshot", "Wrote a snapshot"),
    "set_memory_fraction": ("Would cap the reserved memory", "Capped the reserved memory"),
}
"""The summary of actions that free nothing: of a dry run, and of a real one."""


def action_tables(action: Document, *, dry_run: bool) -> Iterator[RenderableType]:
    """Yield all that an action prints, from top to bottom."""
    yield from result_tables(sorted(action.get("results") or (), key=result_order), action.get("action"))
    yield plain(summary(action, dry_run=dry_run), "bold")


def result_tables(results: Sequence[Document], action: str | None) -> Iterator[RenderableType]:
    """Yield the table of results, the reasons of failures, and the paths of snapshots.

    The results of a fleet have the `instance` of their exporter.
    """
    of_fleet = any("instance" in result for result in results)
    # A garbage collection frees memory in the allocator alone.
    memory = "allocated" if action == "collect_garbage" else "reserved"
    if results:
        columns = ((("exporter", "left"),) if of_fleet else ()) + _COLUMNS
        rows = (((result["instance"],) if of_fleet else ()) + _cells(result, memory) for result in results)
        yield table("", columns, rows)
    for reason in reasons(results):
        yield plain(reason, "red")
    for result in results:
        if result.get("snapshot"):
            yield plain(_snapshot(result))


def reasons(results: Sequence[Document]) -> Iterator[str]:
    """Yield a line for each exporter, outcome other than `done`, and reason. A line names the first pids."""
    pids_by_reason: dict[tuple[str, str, str], dict[str, None]] = {}
    for result in results:
        if result.get("outcome") != "done":
            key = (result.get("instance") or "", str(result.get("outcome")), result.get("reason") or "")
            pids = pids_by_reason.setdefault(key, {})
            if result["pid"] is not None:
                pids[str(result["pid"])] = None
    for (instance, outcome, reason), pids in pids_by_reason.items():
        more = " and others" if len(pids) > _NAMED_PROCESSES_MAX else ""
        listed = f"pid {', '.join(list(pids)[:_NAMED_PROCESSES_MAX])}{more}" if pids else ""
        yield ": ".join(filter(None, (instance, listed, outcome, reason)))


def result_order(result: Document) -> tuple[str, str, str, str]:
    """Return a sort key: by workload and rank; rank 10 is after rank 9."""
    rank, pid = (result.get("rank") or "").zfill(9), str(result["pid"] or "").zfill(12)
    return (result.get("workload") or "", rank, pid, result.get("gpu") or "")


def summary(action: Document, *, dry_run: bool) -> str:
    """Return the last line of an action."""
    name, state = action.get("action") or "", action.get("state")
    if state in ("queued", "running"):
        return f"Action {action.get('id')} is {state}; see GET /api/v1/actions/{action.get('id')} for its results."
    results = action.get("results") or []
    # Equal pids on two nodes are two processes.
    outcomes = {(result.get("instance"), result["pid"], result.get("outcome") == "done") for result in results}
    done = sum(is_done for *_, is_done in outcomes)
    processes = len({(instance, pid) for instance, pid, _ in outcomes})
    where = f"in {done} of {processes} process{'' if processes == 1 else 'es'}"
    if name in _DONE:
        return f"{_DONE[name][not dry_run]} {where}."
    if name == "collect_garbage":
        return _collected(results, where, dry_run=dry_run)
    known = [result["freed_bytes"] for result in results if result.get("freed_bytes") is not None]
    if not known:
        return f"{'Would be done' if dry_run else 'Done'} {where}; the freed bytes are not known."
    if not dry_run and sum(known) > 0 and action.get("still_free_bytes") is not None:
        return _settled(action, sum(known), where if done < processes else "", "job" if processes == 1 else "jobs")
    return f"{'Would free' if dry_run else 'Freed'} {human_bytes(sum(known))} {where}."


def _settled(action: Document, freed_bytes: int, where: str, job: str) -> str:
    """Return the last line of a clear that has measured how much stayed free."""
    still_free_bytes = action["still_free_bytes"]
    missing = any(result.get("freed_bytes") and result.get("still_free_bytes") is None for result in action["results"])
    if still_free_bytes == 0 and not missing:
        reserved = f": the {job} reserved it again"
    else:
        reserved = "" if missing or still_free_bytes == freed_bytes else f": the {job} reserved the rest again"
    freed = " ".join(filter(None, (f"Freed {human_bytes(freed_bytes)}", where)))
    still_free = f"{'at least ' if missing else ''}{human_bytes(still_free_bytes)}"
    return f"{freed}; {still_free} of it is still free after {action['settle_seconds']:g} s{reserved}."


def _cells(result: Document, memory: str) -> tuple[str | Text, ...]:
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
    """Return by how much allocated memory fell; negative if user code allocated more meanwhile."""
    before, after = result.get("allocated_before_bytes"), result.get("allocated_after_bytes")
    return None if before is None or after is None else before - after
