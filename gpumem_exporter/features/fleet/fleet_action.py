"""An action on the processes that a query selects: find them, submit the requests, print the results."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Any

from gpumem_exporter.actions.declarations import (
    DEVICE_ACTIONS,
    OUTSIDE_ACTIONS,
    ActionRequest,
    Target,
)
from gpumem_exporter.actions.model import is_done
from gpumem_exporter.actions.sentences import sentence, subject
from gpumem_exporter.actions.timing import acts_on_jobs
from gpumem_exporter.cli.interrupt import Interrupts
from gpumem_exporter.cli.options import action_request
from gpumem_exporter.cli.program import FAILED
from gpumem_exporter.cli.render.action_tables import result_order, result_tables
from gpumem_exporter.cli.render.columns import natural
from gpumem_exporter.cli.render.terminal import open_console, plain, print_result
from gpumem_exporter.cli.termination import confirmed, must_ask
from gpumem_exporter.core.ledger import sum_of_known
from gpumem_exporter.core.naming import json_pid
from gpumem_exporter.errors import ActionRefusedError
from gpumem_exporter.features.fleet.fleet_options import FleetOptions
from gpumem_exporter.features.fleet.node_requests import ExporterRequest, Fleet, failed_row, result_rows
from gpumem_exporter.features.fleet.node_selection import (
    Exporter,
    Failure,
    Selector,
    TargetProcess,
    select,
    selectors_of,
)
from gpumem_exporter.features.fleet.prometheus import print_warnings

if TYPE_CHECKING:
    from rich.console import RenderableType

Row = Mapping[str, Any]
Selectors = Mapping[Exporter, Sequence[Selector]]
ExporterRow = tuple[Exporter, dict[str, Any]]


def act(action: str, query: str, max_processes: int, values: dict[str, Any], options: FleetOptions) -> int:
    """Request an action of all processes that the query selects, print the results, and return the exit code.

    Nothing is requested if the query selects too many processes, or if the answer to the question before a termination
    is no. Ctrl-C cancels what has not started.
    """
    on_terminal = sys.stdout.isatty() and not options.as_json
    yes = bool(values.pop("yes", False))
    body = action_request(action, values, on_terminal=on_terminal)
    asks = must_ask(body, yes=yes, as_json=options.as_json)
    prometheus = options.connect()
    found = prometheus.query(query)
    selectors = selectors_of(found.series, options.instance_url)
    run = _Run(body, max_processes, options, asks)
    quiet = asks or not on_terminal
    with contextlib.nullcontext() if quiet else open_console().status("Waiting for the processes"):
        rows = run.on_each(selectors)
    document = fleet_document(body, rows, query=query, warnings=found.warnings)
    if not options.as_json:
        print_warnings(found.warnings)
    print_result(document, fleet_tables(document), as_json=options.as_json)
    return 0 if document["state"] == "done" else FAILED


def fleet_document(
    body: Mapping[str, Any],
    rows: Sequence[Row],
    *,
    query: str = "",
    warnings: Sequence[str] = (),
) -> dict[str, Any]:
    """Return the JSON document of an action.

    A row is a result of the API with the `instance` and `url` of its exporter. `pid` is None if the query selected a
    process by other labels and no process matched.
    """
    sums = {
        name: sum_of_known([row.get(name) for row in rows]) if rows else None
        for name in ("freed_bytes", "still_free_bytes")
    }
    document = {
        "action": body["action"],
        "query": query,
        "mode": body.get("mode", "auto"),
        "dry_run": body["dry_run"],
        "state": "done" if all(map(_is_done, rows)) else "failed",
        "results": list(rows),
        **sums,
        "settle_seconds": body.get("settle_seconds", 0.0),
        "warnings": list(warnings),
    }
    return {**document, "subject": subject(rows), "sentence": sentence(document)}


def fleet_tables(document: Mapping[str, Any]) -> Iterator[RenderableType]:
    """Yield what an action prints, from top to bottom."""
    if not document["results"]:
        yield plain("The query selects no process. There is nothing to do.")
        return
    yield from result_tables(document)
    yield plain(document["sentence"], "bold")


@dataclass(frozen=True)
class _Run:
    """One action on a fleet."""

    body: Mapping[str, Any]
    max_processes: int
    options: FleetOptions
    asks: bool = False
    """Whether to ask before processes are terminated."""

    def on_each(self, selectors: Selectors) -> list[Row]:
        """Run the action in every selected process, and return the rows."""
        with self.options.fleet(selectors) as fleet:
            processes, failed = self._select(fleet, selectors, unreported=self.body["action"] in OUTSIDE_ACTIONS)
            self._require_allowed_number(processes)
            of_jobs = acts_on_jobs(
                ActionRequest(self.body["action"], Target(all=True), mode=self.body.get("mode", "auto"))
            )
            requests = requests_for(self.body["action"], processes, of_jobs=of_jobs)
            refused = list[ExporterRequest]()
            if self.asks and requests:
                requests, refused = self._confirmed(fleet, requests, failed)
            with Interrupts() as interrupts:
                fleet.run(requests, self.body, stopped=lambda: interrupts.requested)
        return _rows((*requests, *refused), failed)

    def _confirmed(
        self, fleet: Fleet, requests: Sequence[ExporterRequest], failed: Sequence[ExporterRow]
    ) -> tuple[list[ExporterRequest], list[ExporterRequest]]:
        """Show what a dry run would do, and ask. Return the requests to send, and those that a dry run refuses."""
        body = {**self.body, "dry_run": True}
        tried = [replace(request) for request in requests]
        fleet.run(tried, body)
        if not confirmed(fleet_document(body, _rows(tried, failed)), fleet_tables):
            raise ActionRefusedError("the answer was not yes")
        done = [all(map(_is_done, result_rows(each))) for each in tried]
        return (
            [request for request, would in zip(requests, done, strict=True) if would],
            [each for each, would in zip(tried, done, strict=True) if not would],
        )

    def _select(
        self, fleet: Fleet, selectors: Selectors, *, unreported: bool
    ) -> tuple[list[TargetProcess], list[ExporterRow]]:
        """Read the exporters' processes. Return the selected ones, and a row for each selector without one."""
        processes: list[TargetProcess] = []
        failed: list[ExporterRow] = []
        for exporter, known in fleet.processes().items():
            if isinstance(known, Failure):
                unmatched = [(selector, known) for selector in selectors[exporter]]
            else:
                found, unmatched = select(exporter, selectors[exporter], known, unreported=unreported)
                processes += found
            for selector, failure in unmatched:
                labels = {**asdict(selector), "pid": None if selector.pid is None else json_pid(selector.pid)}
                failed.append((exporter, failed_row(exporter, failure, **labels)))
        return processes, failed

    def _require_allowed_number(self, processes: Sequence[TargetProcess]) -> None:
        if len(processes) > self.max_processes:
            more = f"{len(processes)} processes, more than --max-processes {self.max_processes}"
            raise ActionRefusedError(f"the query selects {more}; nothing was requested")


def _rows(requests: Sequence[ExporterRequest], failed: Sequence[ExporterRow]) -> list[Row]:
    """Return a row for each process and device, by exporter, job and rank."""
    rows = [*((request.exporter, row) for request in requests for row in result_rows(request)), *failed]
    rows.sort(key=lambda item: (natural(item[0].instance), result_order(item[1])))
    return [row for _, row in rows]


def requests_for(action: str, processes: Iterable[TargetProcess], *, of_jobs: bool = False) -> list[ExporterRequest]:
    """Return one request for each process, or for each selected device if the action acts on devices.

    With `of_jobs`, the ranks of a workload on a node are one request, which may add their other ranks there: they act
    after the same step.
    """
    requests = []
    ranks: dict[tuple[Exporter, str], list[TargetProcess]] = {}
    for process in processes:
        if of_jobs and process.workload and process.rank:
            ranks.setdefault((process.exporter, process.workload), []).append(process)
            continue
        per_device = process.uuids is not None and action in DEVICE_ACTIONS
        targets = [{"uuid": uuid} for uuid in process.uuids or ()] if per_device else [{}]
        requests += [
            ExporterRequest(process.exporter, (process,), {**process.api_target, **target}) for target in targets
        ]
    for (exporter, workload), known in ranks.items():
        target = {"pid": [process.pid for process in known], "workload": workload}
        requests.append(ExporterRequest(exporter, tuple(known), target, of_job=True))
    return requests


def _is_done(row: Row) -> bool:
    return is_done(row["outcome"])
