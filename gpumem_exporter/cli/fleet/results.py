"""The results of an action on a fleet, as tables and as JSON."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from gpumem_exporter.cli.program import one_line
from gpumem_exporter.cli.render.action_tables import COLUMNS, measured, result_cells, summary
from gpumem_exporter.cli.render.terminal import open_console, plain, print_json, show, table
from gpumem_exporter.core.ledger import sum_of_known
from gpumem_exporter.units import UNKNOWN

if TYPE_CHECKING:
    from rich.console import RenderableType

__all__ = ["FleetResult", "print_warnings"]

Row = Mapping[str, Any]

_COLUMNS = (("exporter", "left"), *COLUMNS)
_NAMED_PROCESSES_MAX = 8


@dataclass(frozen=True, slots=True)
class FleetResult:
    """The results of an action, one row for each process and device.

    A row is a result of the API with the `instance` and `url` of its exporter. `pid` is None if the query selected a
    process by other labels and no process matched.
    """

    action: str
    dry_run: bool
    rows: Sequence[Row]
    at_step: int | None = None
    """The step of a group."""
    cancel_reason: str = ""
    """Why a group was canceled; empty if it was not."""

    @property
    def done(self) -> bool:
        """Whether every result is done."""
        return all(row["outcome"] == "done" for row in self.rows)

    def print(self, warnings: Sequence[str], *, query: str, as_json: bool) -> None:
        """Print the results."""
        if as_json:
            print_json(self._document(warnings, query))
        else:
            print_warnings(warnings)
            show(open_console(), self._tables())

    def _document(self, warnings: Sequence[str], query: str) -> dict[str, Any]:
        return {
            "action": self.action,
            "query": query,
            "dry_run": self.dry_run,
            "state": "done" if self.done else "failed",
            "at_step": self.at_step,
            "called_off": self.cancel_reason,
            "results": list(self.rows),
            "freed_bytes": sum_of_known([row.get("freed_bytes") for row in self.rows]),
            "warnings": list(warnings),
        }

    def _tables(self) -> Iterator[RenderableType]:
        if not self.rows:
            yield plain("The query selects no process. There is nothing to do.")
            return
        memory = measured(self.action)
        yield table("", _COLUMNS, ((row["instance"], *result_cells(row, memory)) for row in self.rows))
        for reason in _reasons(self.rows):
            yield plain(reason, "red")
        if self.cancel_reason and not self.done:
            yield plain(f"Canceled: {self.cancel_reason}.", "bold red")
            yield from _acted_before_cancel(self.rows)
        elif self.at_step is not None:
            yield plain(f"{'Would act' if self.dry_run else 'All acted'} after step {self.at_step}.")
        # Equal pids on two nodes are two processes.
        distinct = [{**row, "pid": (row["instance"], row["pid"])} for row in self.rows]
        yield plain(summary({"action": self.action, "results": distinct}, dry_run=self.dry_run), "bold")


def print_warnings(warnings: Sequence[str]) -> None:
    """Print the warnings of Prometheus on standard error."""
    for warning in warnings:
        print(f"warning: Prometheus: {one_line(warning)}", file=sys.stderr)


def _reasons(rows: Sequence[Row]) -> Iterator[str]:
    """One line for each exporter and reason that is not done, with the first pids."""
    pids_by_reason: dict[tuple[str, str, str], dict[str, None]] = {}
    for row in rows:
        if row["outcome"] != "done":
            pids = pids_by_reason.setdefault((row["instance"], row["outcome"], row.get("reason") or ""), {})
            if row["pid"] is not None:
                pids[str(row["pid"])] = None
    for (instance, outcome, reason), pids in pids_by_reason.items():
        more = " and others" if len(pids) > _NAMED_PROCESSES_MAX else ""
        listed = ", ".join(list(pids)[:_NAMED_PROCESSES_MAX]) + more
        where = f"{instance}: pid {listed}" if pids else instance
        yield f"{where}: {outcome}{f': {reason}' if reason else ''}"


def _acted_before_cancel(rows: Sequence[Row]) -> Iterator[RenderableType]:
    done = {f"rank {row.get('rank') or UNKNOWN} on {row['instance']}": None for row in rows if row["outcome"] == "done"}
    if done:
        yield plain(f"Only some ranks acted: {', '.join(done)}.", "bold red")
    else:
        yield plain("No rank acted.")
