"""An action on the processes that a query selects: ask each node for them, request the action there, print the results.

Each exporter gets one request, and times, limits and reports the action of its processes as for any other caller.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Any

from gpumem_client.wire.errors import ExporterError, ExporterUnreachableError, ExporterUntrustedError
from gpumem_client.wire.http import shown_url
from gpumem_exporter.actions.action_options import DEVICE_ACTIONS, OUTSIDE_ACTIONS
from gpumem_exporter.actions.kinds import is_done
from gpumem_exporter.actions.sentences import sentence, subject
from gpumem_exporter.cli import action_dialog
from gpumem_exporter.cli.action_dialog import Interrupts, confirmed_end, must_confirm
from gpumem_exporter.cli.api_client import Document, ExporterApi
from gpumem_exporter.cli.options import action_request
from gpumem_exporter.cli.program import FAILED
from gpumem_exporter.cli.render.action_tables import result_order, result_tables
from gpumem_exporter.cli.render.columns import natural
from gpumem_exporter.cli.render.terminal import open_console, plain, print_result
from gpumem_exporter.core.ledger import sum_of_known
from gpumem_exporter.core.naming import json_pid
from gpumem_exporter.errors import ActionRefusedError
from gpumem_exporter.features.fleet.fleet_options import FleetOptions, in_threads
from gpumem_exporter.features.fleet.node_selection import Exporter, Selector, selectors_of
from gpumem_exporter.features.fleet.prometheus import print_warnings

if TYPE_CHECKING:
    from rich.console import RenderableType

Row = dict[str, Any]
_REFUSALS = (401, 403, 404, 409, 422, 429)
_LABELS = ("pid", "workload", "rank", "gpu", "uuid")


@dataclass(frozen=True, slots=True)
class NodeRequest:
    """An action on processes of one exporter."""

    exporter: Exporter
    processes: tuple[Document, ...]
    """As `/api/v1/processes` lists them."""
    uuids: tuple[str, ...] = ()
    """The devices, for an action on devices of which the query names some."""

    @property
    def target(self) -> dict[str, Any]:
        """The target of the request. Its labels exclude a later process with the same pid."""
        names = [*_LABELS[:3]] if self.processes[0]["reporting"] else ["pid"]
        listed = {name: list(dict.fromkeys(process[name] for process in self.processes)) for name in names}
        return {**listed, "uuid": list(self.uuids)} if self.uuids else listed


def act(action: str, query: str, max_processes: int, values: dict[str, Any], options: FleetOptions) -> int:
    """Request an action of all processes that the query selects, print the results, and return the exit code.

    Nothing is requested if the query selects too many processes, or if the answer to the question before a termination
    is no. Ctrl-C cancels what has not started.
    """
    on_terminal = sys.stdout.isatty() and not options.as_json
    yes = bool(values.pop("yes", False))
    body = action_request(action, values, on_terminal=on_terminal)
    asks = must_confirm(body, yes=yes, as_json=options.as_json)
    found = options.connect().query(query)
    selectors = selectors_of(found.series, options.instance_url)
    quiet = asks or not on_terminal
    with contextlib.nullcontext() if quiet else open_console().status("Waiting for the processes"):
        requests, failed = list[NodeRequest](), list[Row]()
        for exporter, processes in options.ask(selectors, _processes).items():
            able, unable = requests_for(action, exporter, selectors[exporter], processes)
            requests, failed = [*requests, *able], [*failed, *unable]
        count = len({(each.exporter, process["pid"]) for each in requests for process in each.processes})
        if count > max_processes:
            more = f"{count} processes, more than --max-processes {max_processes}"
            raise ActionRefusedError(f"the query selects {more}; nothing was requested")
        if asks and requests:
            requests, failed = _confirmed(requests, failed, body, options)
        document = fleet_document(body, [*_submit(requests, body, options), *failed], query, found.warnings)
    if not options.as_json:
        print_warnings(found.warnings)
    print_result(document, fleet_tables(document), as_json=options.as_json)
    return 0 if document["state"] == "done" else FAILED


def fleet_document(
    body: Document, rows: Sequence[Row], query: str = "", warnings: Sequence[str] = ()
) -> dict[str, Any]:
    """Return the JSON document of an action.

    A row is a result of the API with the `instance` and `url` of its exporter. `pid` is None if the query selected a
    process by other labels and no process matched.
    """
    results = sorted(rows, key=lambda row: (natural(row["instance"]), result_order(row)))
    sums = {
        name: sum_of_known([row.get(name) for row in rows]) if rows else None
        for name in ("freed_bytes", "still_free_bytes")
    }
    document = {
        "action": body["action"],
        "query": query,
        "mode": body.get("mode", "auto"),
        "dry_run": body["dry_run"],
        "state": "done" if all(is_done(row["outcome"]) for row in rows) else "failed",
        "results": results,
        **sums,
        "settle_seconds": body.get("settle_seconds", 0.0),
        "warnings": list(warnings),
    }
    return {**document, "subject": subject(results), "sentence": sentence(document)}


def fleet_tables(document: Document) -> Iterator[RenderableType]:
    """Yield what an action prints, from top to bottom."""
    if not document["results"]:
        yield plain("The query selects no process. There is nothing to do.")
        return
    yield from result_tables(document)
    yield plain(document["sentence"], "bold")


def requests_for(
    action: str, exporter: Exporter, selectors: Sequence[Selector], processes: Sequence[Document] | ExporterError
) -> tuple[list[NodeRequest], list[Row]]:
    """Return the requests for one exporter, and a row for each selector without a process that can act.

    There is one request, or one for each group of devices if the action acts on devices. Processes that do not report
    have a request of their own, because only reports have labels.
    """
    if isinstance(processes, ExporterError):
        return [], [failed_row(exporter, *_failure(processes), **asdict(selector)) for selector in selectors]
    unreported = action in OUTSIDE_ACTIONS
    groups: dict[tuple[bool, tuple[str, ...]], list[Document]] = {}
    failed = []
    for selector in selectors:
        matching = [process for process in processes if selector.admits(process)]
        if not matching:
            failed.append(failed_row(exporter, "gone", "no process matches; it may have exited", **asdict(selector)))
        elif not unreported and not any(process["reporting"] for process in matching):
            failed.append(failed_row(exporter, "unsupported", "the process does not report", **asdict(selector)))
    for process in processes:
        admitting = [selector for selector in selectors if selector.admits(process)]
        if admitting and (unreported or process["reporting"]):
            by_device = action in DEVICE_ACTIONS and all(selector.by_device for selector in admitting)
            uuids = {uuid: None for selector in admitting if by_device for uuid in selector.uuids(process)}
            groups.setdefault((process["reporting"], tuple(uuids)), []).append(process)
    return [NodeRequest(exporter, tuple(group), uuids) for (_, uuids), group in groups.items()], failed


def failed_row(exporter: Exporter, outcome: str, reason: str, **labels: Any) -> Row:
    """Return a row for a process without a result, with its known labels."""
    pid = labels.get("pid")
    known = {**dict.fromkeys(("action_id", *_LABELS)), **labels, "pid": pid if pid is None else json_pid(str(pid))}
    origin = {"instance": exporter.instance, "url": shown_url(exporter.url)}
    return {**origin, **known, "outcome": outcome, "reason": reason, "freed_bytes": None}


def _processes(api: ExporterApi) -> list[Document]:
    processes = api.get("/api/v1/processes").get("processes")
    if not isinstance(processes, list):
        raise ExporterUnreachableError(f"the server at {shown_url(api.url)} is not a gpumem-exporter")
    return processes


def _confirmed(
    requests: Sequence[NodeRequest], failed: Sequence[Row], body: Document, options: FleetOptions
) -> tuple[list[NodeRequest], list[Row]]:
    """Show what a dry run would do, and ask. Return the requests for what it has shown, and the other rows."""
    dry_run = {**body, "dry_run": True}
    tried = _submit(requests, dry_run, options)
    if not confirmed_end(fleet_document(dry_run, [*tried, *failed]), fleet_tables):
        raise ActionRefusedError("the answer was not yes")
    refused = [row for row in tried if not is_done(row["outcome"])]
    spared = {(row["url"], row["pid"]) for row in refused}
    shown = []
    for each in requests:
        kept = tuple(one for one in each.processes if (shown_url(each.exporter.url), one["pid"]) not in spared)
        shown += [replace(each, processes=kept)] if kept else []
    return shown, [*failed, *refused]


def _submit(requests: Sequence[NodeRequest], body: Document, options: FleetOptions) -> list[Row]:
    """Send the requests, wait for their ends, and return a row for each process and device. Ctrl-C cancels them."""
    with Interrupts() as interrupts:
        # A thread for each exporter: its processes may wait for the end of a step.
        rows = in_threads(
            lambda request: _rows(request, body, options, lambda: interrupts.requested), requests, len(requests)
        )
    return [row for each in rows for row in each]


def _rows(request: NodeRequest, body: Document, options: FleetOptions, stopped: Callable[[], bool]) -> list[Row]:
    action: Document = {}
    failure = ("refused", "canceled before it was requested")
    try:
        if not stopped():
            with options.api(request.exporter.url) as api:
                action = action_dialog.act(api, {**body, "target": request.target}, stopped=stopped)
                failure = ("expired", f"no result of the process; see action {action['id']}")
    except ExporterError as error:
        failure = _failure(error)
    origin = {"instance": request.exporter.instance, "url": shown_url(request.exporter.url)}
    rows = [{**origin, "action_id": action["id"], **result} for result in action.get("results") or ()]
    answered = {row["pid"] for row in rows}
    for process in request.processes:
        if process["pid"] not in answered:
            labels = {name: process[name] for name in ("pid", "workload", "rank")}
            gpus = ",".join(device["gpu"] or "" for device in process["devices"])
            rows.append(failed_row(request.exporter, *failure, **labels, gpu=gpus, action_id=action.get("id")))
    return rows


def _failure(error: ExporterError) -> tuple[str, str]:
    """Return the outcome and the reason of an error."""
    refused = isinstance(error, ExporterUntrustedError) or getattr(error, "status", 0) in _REFUSALS
    return ("refused" if refused else "failed"), str(error)
