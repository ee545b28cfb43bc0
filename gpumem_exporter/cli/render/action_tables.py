"""The results of an action: a row for each process and device, the reasons of failures, and the sentence."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

from gpumem_client.wire.units import UNKNOWN, human_bytes, human_seconds
from gpumem_exporter.actions.kinds import KINDS, Column, is_done
from gpumem_exporter.actions.sentences import job_name, sentence, subject
from gpumem_exporter.cli.api_client import Document
from gpumem_exporter.cli.render.columns import at
from gpumem_exporter.cli.render.layout import natural
from gpumem_exporter.cli.render.terminal import plain, table

if TYPE_CHECKING:
    from rich.console import RenderableType
    from rich.text import Text

_Column = tuple[str, str, Callable[[Document], "str | Text"]]

_NAMED_PROCESSES_MAX = 8


def action_tables(action: Document) -> Iterator[RenderableType]:
    """Yield all that an action prints: the table of its results, the reasons of failures, and the sentence.

    The results of a fleet have the `instance` of their exporter.
    """
    results, kind = sorted(action["results"], key=result_order), KINDS[action["action"]]
    if results:
        columns = [*_NAMES, *map(_column, kind.would_columns if action["dry_run"] else kind.done_columns)]
        if action["dry_run"] and any(result.get("mode") in ("step", "idle") for result in results):
            columns.insert(len(_NAMES), _WHEN)
        if any("instance" in result for result in results):
            columns.insert(0, ("exporter", "left", lambda result: result["instance"]))
        cells = ([cell(result) for _, _, cell in columns] for result in results)
        yield table("", [(heading, side) for heading, side, _ in columns], cells)
    for reason in reasons(results):
        yield plain(reason, "red")
    if action["state"] in ("queued", "running"):
        yield plain(
            f"Action {action['id']} is {action['state']}; see gpumem-exporter actions show {action['id'][:8]}.", "bold"
        )
    else:
        yield plain(sentence(action), "bold")


def reasons(results: Sequence[Document]) -> Iterator[str]:
    """Yield a line for each exporter, outcome that is not done, and reason. A line names the job and the first pids."""
    found: dict[tuple[str, str, str], list[Document]] = {}
    for result in results:
        if not is_done(result["outcome"]):
            key = (result.get("instance") or "", result["outcome"], result.get("reason") or "")
            found.setdefault(key, []).append(result)
    for (instance, outcome, reason), refused in found.items():
        known = list(dict.fromkeys(str(result["pid"]) for result in refused if result["pid"] is not None))
        more = " and others" if len(known) > _NAMED_PROCESSES_MAX else ""
        listed = f"pid {', '.join(known[:_NAMED_PROCESSES_MAX])}{more}" if known else ""
        named = known and len({job_name(result) for result in refused}) == 1 and refused[0].get("workload")
        yield ": ".join(filter(None, (instance, f"{subject(refused)}, {listed}" if named else listed, outcome, reason)))


def result_order(result: Document) -> tuple[Any, ...]:
    """Return a sort key: by job, rank, pid and device."""
    return (job_name(result), *(natural(result.get(name) or "") for name in ("rank", "pid", "gpu")))


def _outcome(result: Document) -> Text:
    outcome = str(result["outcome"])
    return plain(outcome.replace("_", " "), "green" if is_done(outcome) else "red")


def _column(column: Column) -> _Column:
    """Return a declared column. A difference is negative if user code allocated more meanwhile."""
    shown = human_seconds if column.field.endswith("_seconds") else human_bytes

    def cell(result: Document) -> str:
        value = at(*column.field.split("."))(result)
        if column.minus and value is not None:
            less = result.get(column.minus)
            value = None if less is None else value - less
        return (value or UNKNOWN) if column.side == "wrap" else shown(value)

    return column.heading, column.side, cell


_NAMES: tuple[_Column, ...] = (
    ("job", "cut", lambda result: name if (name := job_name(result)) != f"pid {result['pid']}" else UNKNOWN),
    ("rank", "right", lambda result: result.get("rank") or UNKNOWN),
    ("pid", "right", lambda result: UNKNOWN if result["pid"] is None else str(result["pid"])),
    ("gpu", "left", lambda result: result.get("gpu") or result.get("uuid") or UNKNOWN),
    ("outcome", "left", _outcome),
)
_MODES = {"now": "at once", "step": "end of step", "idle": "when idle"}
_WHEN: _Column = ("when", "left", lambda result: _MODES.get(result.get("mode") or "", UNKNOWN))
