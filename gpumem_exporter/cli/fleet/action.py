"""An action on the processes that a query selects: find them, submit the requests, print the results."""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Any

from gpumem_client.wire.units import UNKNOWN
from gpumem_exporter.actions.model import is_done
from gpumem_exporter.actions.request import DEFAULT_DEADLINE_SECONDS, DEVICE_ACTIONS, OUTSIDE_ACTIONS, longest_seconds
from gpumem_exporter.cli.fleet.group import GROUP_TIMEOUT_SECONDS, form_group, ranks_query
from gpumem_exporter.cli.fleet.options import FleetOptions
from gpumem_exporter.cli.fleet.prometheus import Prometheus, print_warnings
from gpumem_exporter.cli.fleet.requests import ExporterRequest, Fleet, failed_row, result_rows
from gpumem_exporter.cli.fleet.selection import (
    Exporter,
    Failure,
    Selector,
    TargetProcess,
    exporters_of,
    natural_order,
    select,
    selectors_of,
)
from gpumem_exporter.cli.options import action_request, note
from gpumem_exporter.cli.program import FAILED
from gpumem_exporter.cli.render.action_tables import result_order, result_tables
from gpumem_exporter.cli.render.terminal import open_console, plain, print_json, show
from gpumem_exporter.core.ledger import sum_of_known
from gpumem_exporter.core.naming import json_pid
from gpumem_exporter.errors import ActionRefusedError, GroupIncompleteError
from gpumem_exporter.view.sentences import sentence, subject

if TYPE_CHECKING:
    from rich.console import RenderableType

Row = Mapping[str, Any]
Selectors = Mapping[Exporter, Sequence[Selector]]
ExporterRow = tuple[Exporter, dict[str, Any]]


def act(action: str, query: str, max_processes: int, options: Mapping[str, Any], fleet: FleetOptions) -> int:
    """Request an action of all processes that the query selects, print the results, and return the exit code.

    Raises ConfigurationError if an option or the query is invalid, PrometheusError if the query could not be evaluated,
    and ActionRefusedError, with nothing requested, if it selects too many processes or a group cannot take part.
    """
    on_terminal = sys.stdout.isatty() and not fleet.as_json
    body = action_request(action, options, on_terminal=on_terminal)
    prometheus = fleet.connect()
    found = prometheus.query(query)
    selectors = selectors_of(found.series, fleet.instance_url)
    run = _Run(body, max_processes, fleet)
    as_group = selectors and body.get("group")
    with open_console().status("Waiting for the processes") if on_terminal else contextlib.nullcontext():
        result = run.as_group(selectors, prometheus) if as_group else run.on_each(selectors)
    result.print(found.warnings, query=query, as_json=fleet.as_json)
    return 0 if result.done else FAILED


@dataclass(frozen=True, slots=True)
class FleetResult:
    """The results of an action, one row for each process and device.

    A row is a result of the API with the `instance` and `url` of its exporter. `pid` is None if the query selected a
    process by other labels and no process matched.
    """

    body: Mapping[str, Any]
    """The request, without the targets."""
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
        sums = {
            name: sum_of_known([row.get(name) for row in self.rows]) if self.rows else None
            for name in ("freed_bytes", "still_free_bytes")
        }
        document = {
            "action": self.body["action"],
            "query": query,
            "mode": self.body.get("mode", "now"),
            "dry_run": self.body["dry_run"],
            "state": "done" if self.done else "failed",
            "at_step": self.at_step,
            "called_off": self.cancel_reason,
            "results": list(self.rows),
            **sums,
            "settle_seconds": self.body.get("settle_seconds", 0.0),
            "warnings": list(warnings),
        }
        return {**document, "subject": subject(self.rows), "sentence": sentence(document)}

    def _tables(self) -> Iterator[RenderableType]:
        if not self.rows:
            yield plain("The query selects no process. There is nothing to do.")
            return
        document = self._document((), "")
        yield from result_tables(document)
        if self.cancel_reason and not self.done:
            yield plain(f"Canceled: {self.cancel_reason}.", "bold red")
            acted = [f"rank {row.get('rank') or UNKNOWN} on {row['instance']}" for row in self.rows if _is_done(row)]
            only = f"Only some ranks acted: {', '.join(dict.fromkeys(acted))}."
            yield plain(only, "bold red") if acted else plain("No rank acted.")
        elif self.at_step is not None:
            yield plain(f"{'Would act' if self.body['dry_run'] else 'All acted'} after step {self.at_step}.")
        yield plain(document["sentence"], "bold")


@dataclass(frozen=True)
class _Run:
    """One action on a fleet."""

    body: Mapping[str, Any]
    max_processes: int
    options: FleetOptions

    @property
    def wait_seconds(self) -> float:
        """How long to wait for the end of the action."""
        return longest_seconds(self.body) + float(self.body.get("settle_seconds", 0.0))

    def on_each(self, selectors: Selectors) -> FleetResult:
        """Run the action in every selected process on its own, and return the results."""
        with self.options.fleet(selectors) as fleet:
            processes, failed = self._select(fleet, selectors, unreported=self.body["action"] in OUTSIDE_ACTIONS)
            self._require_allowed_number(processes)
            requests = requests_for(self.body["action"], processes)
            fleet.submit(requests, self.body)
            fleet.wait(requests, wait_seconds=self.wait_seconds)
        return self._result(requests, failed)

    def as_group(self, selectors: Selectors, prometheus: Prometheus) -> FleetResult:
        """Run the action in all ranks of the workload after the same step, and return the results."""
        with self.options.fleet(selectors) as fleet:
            processes, failed = self._select(fleet, selectors, unreported=False)
        if not processes:
            return self._result((), failed)
        workload = _one_workload(processes)
        with_ranks = exporters_of(prometheus.query(ranks_query(workload)).series, self.options.instance_url)
        by_url = {exporter.url: exporter for exporter in (*with_ranks, *selectors)}
        exporters = sorted(by_url.values(), key=natural_order)
        with self.options.fleet(exporters, timeout_seconds=GROUP_TIMEOUT_SECONDS) as fleet:
            requested_seconds = time.monotonic()
            readings = fleet.read(exporters, "processes")
            given = self.body["deadline_seconds"]
            deadline_seconds = None if given == DEFAULT_DEADLINE_SECONDS else given
            group = form_group(workload, readings, requested_seconds, deadline_seconds=deadline_seconds)
            run = replace(self, body={**self.body, "deadline_seconds": group.deadline_seconds})
            self._require_allowed_number(group.processes)
            if added := group.added(processes):
                note(added)
            requests = group.act(fleet, run.body, wait_seconds=run.wait_seconds)
        return self._result(requests, (), group.at_step, group.cancel_reason)

    def _select(
        self, fleet: Fleet, selectors: Selectors, *, unreported: bool
    ) -> tuple[list[TargetProcess], list[ExporterRow]]:
        """Read the exporters' processes. Return the selected ones, and a row for each selector without one."""
        processes: list[TargetProcess] = []
        failed: list[ExporterRow] = []
        for exporter, document in fleet.read(tuple(selectors), "processes").items():
            if isinstance(document, Failure):
                unmatched = [(selector, document) for selector in selectors[exporter]]
            else:
                found, unmatched = select(exporter, selectors[exporter], document["processes"], unreported=unreported)
                processes += found
            for selector, failure in unmatched:
                labels = {**asdict(selector), "pid": None if selector.pid is None else json_pid(selector.pid)}
                failed.append((exporter, failed_row(exporter, failure, **labels)))
        return processes, failed

    def _require_allowed_number(self, processes: Sequence[TargetProcess]) -> None:
        if len(processes) > self.max_processes:
            more = f"{len(processes)} processes, more than --max-processes {self.max_processes}"
            raise ActionRefusedError(f"the query selects {more}; nothing was requested")

    def _result(
        self,
        requests: Sequence[ExporterRequest],
        failed: Sequence[ExporterRow],
        at_step: int | None = None,
        cancel_reason: str = "",
    ) -> FleetResult:
        rows = [*((request.exporter, row) for request in requests for row in result_rows(request)), *failed]
        rows.sort(key=lambda item: (natural_order(item[0]), result_order(item[1])))
        return FleetResult(self.body, [row for _, row in rows], at_step, cancel_reason)


def requests_for(action: str, processes: Iterable[TargetProcess]) -> list[ExporterRequest]:
    """Return one request for each process, or for each selected device if the action acts on devices."""
    requests = []
    for process in processes:
        per_device = process.uuids is not None and action in DEVICE_ACTIONS
        targets = [{"uuid": uuid} for uuid in process.uuids or ()] if per_device else [{}]
        requests += [
            ExporterRequest(process.exporter, (process,), {**process.api_target, **target}) for target in targets
        ]
    return requests


def _one_workload(processes: Sequence[TargetProcess]) -> str:
    workloads = sorted({process.workload or "" for process in processes})
    if len(workloads) > 1 or not workloads[0]:
        listed = ", ".join(workload or "(none)" for workload in workloads)
        raise GroupIncompleteError(f"--group needs one workload; the query selects {listed}")
    return workloads[0]


def _is_done(row: Row) -> bool:
    return is_done(row["outcome"])
