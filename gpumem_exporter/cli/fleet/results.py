"""The results of an action on a fleet, as tables and as JSON."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from gpumem_exporter.cli.program import one_line
from gpumem_exporter.cli.render.action_tables import result_tables, summary
from gpumem_exporter.cli.render.terminal import open_console, plain, print_json, show
from gpumem_exporter.core.ledger import sum_of_known
from gpumem_exporter.units import UNKNOWN

if TYPE_CHECKING:
    from rich.console import RenderableType

__all__ = ["FleetResult", "print_warnings"]

Row = Mapping[str, Any]


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
        return all(map(_is_done, self.rows))

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
        yield from result_tables(self.rows, self.action)
        if self.cancel_reason and not self.done:
            yield plain(f"Canceled: {self.cancel_reason}.", "bold red")
            acted = [f"rank {row.get('rank') or UNKNOWN} on {row['instance']}" for row in self.rows if _is_done(row)]
            only = f"Only some ranks acted: {', '.join(dict.fromkeys(acted))}."
            yield plain(only, "bold red") if acted else plain("No rank acted.")
        elif self.at_step is not None:
            yield plain(f"{'Would act' if self.dry_run else 'All acted'} after step {self.at_step}.")
        yield plain(summary({"action": self.action, "results": self.rows}, dry_run=self.dry_run), "bold")


def print_warnings(warnings: Sequence[str]) -> None:
    """Print the warnings of Prometheus on standard error."""
    for warning in warnings:
        print(f"warning: Prometheus: {one_line(warning)}", file=sys.stderr)


def _is_done(row: Row) -> bool:
    return bool(row["outcome"] == "done")
