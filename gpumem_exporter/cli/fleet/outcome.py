"""What became of an action on a fleet, for eyes and for programs."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from gpumem_exporter.cli.main import one_line
from gpumem_exporter.cli.render.action_tables import COLUMNS, summary
from gpumem_exporter.cli.render.sizes import UNKNOWN, human_bytes, human_seconds
from gpumem_exporter.cli.render.terminal import open_console, plain, print_json, show, table
from gpumem_exporter.core.ledger import sum_of_known

if TYPE_CHECKING:
    from rich.console import RenderableType
    from rich.text import Text

__all__ = ["Outcome", "warn"]

Row = Mapping[str, Any]

_COLUMNS = (("exporter", "left"), *COLUMNS)
_MOST_NAMED = 8
"""So many processes are named with one reason; the table has them all."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """What became of an action, a row for each process and device.

    A row is a result as the API has it, with `instance` and `url` of its exporter; `pid` is None where only the query
    says who is meant.
    """

    action: str
    dry_run: bool
    rows: Sequence[Row]
    at_step: int | None = None
    """Of a group: after this step."""
    called_off: str = ""
    """Of a group: why."""

    @property
    def done(self) -> bool:
        """All of it is."""
        return all(row["outcome"] == "done" for row in self.rows)

    def tell(self, warnings: Sequence[str], *, query: str, as_json: bool) -> None:
        """Print it."""
        if as_json:
            print_json(self._document(warnings, query))
        else:
            warn(warnings)
            show(open_console(), self._tables())

    def _document(self, warnings: Sequence[str], query: str) -> dict[str, Any]:
        return {
            "action": self.action,
            "query": query,
            "dry_run": self.dry_run,
            "state": "done" if self.done else "failed",
            "at_step": self.at_step,
            "called_off": self.called_off,
            "results": list(self.rows),
            "freed_bytes": sum_of_known([row.get("freed_bytes") for row in self.rows]),
            "warnings": list(warnings),
        }

    def _tables(self) -> Iterator[RenderableType]:
        if not self.rows:
            yield plain("The query names no process: there is nothing to do.")
            return
        counted = "allocated" if self.action == "collect_garbage" else "reserved"
        yield table("", _COLUMNS, (_cells(row, counted) for row in self.rows))
        for reason in _reasons(self.rows):
            yield plain(reason, "red")
        if self.called_off and not self.done:
            yield plain(f"Called off: {self.called_off}.", "bold red")
            yield from _half_done(self.rows)
        elif self.at_step is not None:
            yield plain(f"{'Would act' if self.dry_run else 'All acted'} after step {self.at_step}.")
        # Equal pids on two nodes are two processes.
        distinct = [{**row, "pid": (row["instance"], row["pid"])} for row in self.rows]
        yield plain(summary({"action": self.action, "results": distinct}, dry_run=self.dry_run), "bold")


def warn(warnings: Sequence[str]) -> None:
    """Say on standard error what Prometheus says of its answer."""
    for warning in warnings:
        print(f"warning: Prometheus: {one_line(warning)}", file=sys.stderr)


def _cells(row: Row, counted: str) -> tuple[str | Text, ...]:
    before, after = row.get(f"{counted}_before_bytes"), row.get(f"{counted}_after_bytes")
    freed = row.get("freed_bytes")
    if counted == "allocated":
        freed = None if before is None or after is None else before - after
    return (
        row["instance"],
        UNKNOWN if row["pid"] is None else str(row["pid"]),
        row.get("workload") or UNKNOWN,
        row.get("rank") or UNKNOWN,
        row.get("gpu") or row.get("uuid") or UNKNOWN,
        plain(row["outcome"], "green" if row["outcome"] == "done" else "red"),
        human_bytes(before),
        human_bytes(after),
        human_bytes(freed),
        human_seconds(row.get("duration_seconds")),
    )


def _reasons(rows: Sequence[Row]) -> Iterator[str]:
    """Why something was not done, once for each exporter and reason."""
    told: dict[tuple[str, str, str], dict[str, None]] = {}
    for row in rows:
        if row["outcome"] != "done":
            who = told.setdefault((row["instance"], row["outcome"], row.get("reason") or ""), {})
            if row["pid"] is not None:
                who[str(row["pid"])] = None
    for (instance, outcome, reason), pids in told.items():
        named = ", ".join(list(pids)[:_MOST_NAMED]) + (" and others" if len(pids) > _MOST_NAMED else "")
        where = f"{instance}: pid {named}" if named else instance
        yield f"{where}: {outcome}{f': {reason}' if reason else ''}"


def _half_done(rows: Sequence[Row]) -> Iterator[RenderableType]:
    """Which ranks acted all the same."""
    done = {f"rank {row.get('rank') or UNKNOWN} on {row['instance']}": None for row in rows if row["outcome"] == "done"}
    if done:
        yield plain(f"Half done: {', '.join(done)} had acted; the others have not.", "bold red")
    else:
        yield plain("Nobody has acted.")
