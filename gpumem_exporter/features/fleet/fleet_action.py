"""An action on the processes that a query selects: ask each node for them, request the action there, print the results.

Each exporter gets one request, and times, limits and reports the action of its processes as for any other caller.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from typing import Any, NamedTuple

from gpumem_client.wire.errors import ConfigurationError, ExporterError, ExporterUnreachableError
from gpumem_client.wire.http import shown_url
from gpumem_exporter.actions.action_options import OUTSIDE_ACTIONS
from gpumem_exporter.actions.kinds import KINDS, is_done
from gpumem_exporter.actions.sentences import sentence, subject
from gpumem_exporter.cli import action_dialog
from gpumem_exporter.cli.action_dialog import interrupts, needs_yes, said_yes
from gpumem_exporter.cli.api_client import Document, ExporterApi
from gpumem_exporter.cli.options import action_request
from gpumem_exporter.cli.program import FAILED, one_line
from gpumem_exporter.cli.render.action_tables import action_tables, result_order
from gpumem_exporter.cli.render.layout import natural
from gpumem_exporter.cli.render.terminal import open_console, print_result
from gpumem_exporter.core.ledger import sum_of_known
from gpumem_exporter.errors import ActionRefusedError
from gpumem_exporter.features.fleet.fleet_nodes import Exporter, Fleet, Selector


class NodeRequest(NamedTuple):
    """An action on processes of one exporter."""

    exporter: Exporter
    processes: Sequence[Document]
    """As `/api/v1/processes` lists them."""
    uuids: Sequence[str] = ()
    """The devices, for an action on devices of which the query names some."""

    @property
    def target(self) -> dict[str, Any]:
        """The target of the request. Its labels exclude a later process with the same pid."""
        names = ("pid", "workload", "rank") if self.processes[0]["reporting"] else ("pid",)
        listed = {name: list(dict.fromkeys(process[name] for process in self.processes)) for name in names}
        return {**listed, "uuid": list(self.uuids)} if self.uuids else listed


def act(action: str, query: str, max_processes: int, values: dict[str, Any]) -> int:
    """Request an action of all processes that the query selects, print the results, and return the exit code.

    Nothing is requested if the query selects too many processes, or if the answer to the question before a termination
    is no. Ctrl-C cancels what has not started.
    """
    fleet, yes = Fleet(values), bool(values.pop("yes", False))
    on_terminal = sys.stdout.isatty() and not fleet.as_json
    body = action_request(action, values, on_terminal=on_terminal)
    asks = needs_yes({**body, "target": None}, yes=yes, as_json=fleet.as_json)
    found, warnings = fleet.find(query)
    if any(Selector() in selectors for selectors in found.values()):
        raise ConfigurationError("--query: keep a label that selects processes, as in `sum by (instance, pid) (...)`")
    with contextlib.nullcontext() if asks or not on_terminal else open_console().status("Waiting for the processes"):
        requests, failed = list[NodeRequest](), list[Document]()
        listed = fleet.ask([*found.items()], _processes)
        for (exporter, selectors), processes in zip(found.items(), listed, strict=True):
            able, unable = requests_for(action, exporter, selectors, processes)
            requests, failed = [*requests, *able], [*failed, *unable]
        count = len({(each.exporter, process["pid"]) for each in requests for process in each.processes})
        if count > max_processes:
            raise ActionRefusedError(
                f"nothing was requested: {count} processes, more than --max-processes {max_processes}"
            )
        if asks and requests:
            dry_run = {**body, "dry_run": True}
            tried = _submit(requests, dry_run, fleet)
            if not said_yes(fleet_document(dry_run, [*tried, *failed])):
                raise ActionRefusedError("the answer was not yes")
            refused = [row for row in tried if not is_done(row["outcome"])]
            failed, spared = [*failed, *refused], {(row["instance"], row["pid"]) for row in refused}
            requests = [
                each._replace(processes=kept)
                for each in requests
                if (kept := [one for one in each.processes if (each.exporter.instance, one["pid"]) not in spared])
            ]
        document = fleet_document(body, [*_submit(requests, body, fleet), *failed], warnings)
    for warning in () if fleet.as_json else warnings:
        print(f"warning: Prometheus: {one_line(warning)}", file=sys.stderr)
    print_result(document, action_tables(document), as_json=fleet.as_json)
    return 0 if document["state"] == "done" else FAILED


def fleet_document(body: Document, rows: Sequence[Document], warnings: Sequence[str] = ()) -> dict[str, Any]:
    """Return the JSON document of an action: its request, and a row for each result.

    A row is a result of the API with the `instance` of its exporter. `pid` is None if the query selected a process by
    other labels and no process matched.
    """
    results = sorted(rows, key=lambda row: (natural(row["instance"]), result_order(row)))
    document = {
        **body,
        "state": "done" if all(is_done(row["outcome"]) for row in rows) else "failed",
        "results": results,
        **{name: sum_of_known([row.get(name) for row in rows]) for name in ("freed_bytes", "still_free_bytes")},
        "warnings": list(warnings),
    }
    return {**document, "subject": subject(results), "sentence": sentence(document)}


def requests_for(
    action: str, exporter: Exporter, selectors: Sequence[Selector], processes: Sequence[Document] | ExporterError
) -> tuple[list[NodeRequest], list[Document]]:
    """Return the requests for one exporter, and a row for each selector without a process that can act.

    There is one request, or one for each group of devices if the action acts on devices. Processes that do not report
    have a request of their own, because only reports have labels.
    """
    if isinstance(processes, ExporterError):
        return [], [_failed(exporter, _failure(processes), asdict(selector)) for selector in selectors]
    able = [process for process in processes if process["reporting"] or action in OUTSIDE_ACTIONS]
    groups: dict[tuple[bool, tuple[str, ...]], list[Document]] = {}
    for process in able:
        if admitting := [selector for selector in selectors if selector.admits(process)]:
            by_device = KINDS[action].by_device and all(selector.gpu or selector.uuid for selector in admitting)
            uuids = {uuid: None for selector in admitting if by_device for uuid in selector.uuids(process)}
            groups.setdefault((process["reporting"], tuple(uuids)), []).append(process)
    gone = ("gone", "no process that reports matches; it may have exited")
    failed = [_failed(exporter, gone, asdict(each)) for each in selectors if not any(map(each.admits, able))]
    return [NodeRequest(exporter, group, uuids) for (_, uuids), group in groups.items()], failed


def _processes(api: ExporterApi, _: object) -> list[Document]:
    processes = api.get("/api/v1/processes").get("processes")
    if not isinstance(processes, list):
        raise ExporterUnreachableError(f"the server at {shown_url(api.url)} is not a gpumem-exporter")
    return processes


def _submit(requests: Sequence[NodeRequest], body: Document, fleet: Fleet) -> list[Document]:
    """Send the requests, wait for their ends, and return a row for each process and device. Ctrl-C cancels them."""
    with interrupts() as interrupted:

        def submit(api: ExporterApi, request: NodeRequest) -> Document:
            if interrupted.is_set():
                raise ExporterError("canceled before it was requested")
            return action_dialog.act(api, {**body, "target": request.target}, stopped=interrupted.is_set)

        # All at a time: the processes of an exporter may wait for the end of a step.
        actions = fleet.ask([(each.exporter, each) for each in requests], submit, at_a_time=len(requests))
    return [row for request, action in zip(requests, actions, strict=True) for row in _rows(request, action)]


def _rows(request: NodeRequest, action: Document | ExporterError) -> Iterator[Document]:
    if isinstance(action, ExporterError):
        failure, action = _failure(action), {"id": None, "results": []}
    else:
        failure = ("expired", f"no result of the process; see action {action['id']}")
    for result in action["results"]:
        yield {"instance": request.exporter.instance, "action_id": action["id"], **result}
    answered = {result["pid"] for result in action["results"]}
    for process in request.processes:
        if process["pid"] not in answered:
            yield _failed(request.exporter, failure, {name: process[name] for name in ("pid", "workload", "rank")})


def _failure(error: ExporterError) -> tuple[str, str]:
    """Return the outcome and the reason of an error."""
    return "refused" if 400 <= getattr(error, "status", 0) < 500 else "failed", str(error)


def _failed(exporter: Exporter, failure: tuple[str, str], labels: Document) -> Document:
    """Return a row for a process without a result."""
    return {"instance": exporter.instance, **labels, "outcome": failure[0], "reason": failure[1], "freed_bytes": None}
