"""An action on the processes that a query names: find them, ask for each, tell what came of it."""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from gpumem_exporter.cli.action_requests import ANSWER_GRACE_SECONDS, TimedRequest
from gpumem_exporter.cli.fleet.asks import Ask, Failure, Nodes, rows
from gpumem_exporter.cli.fleet.choosing import Member, Missing, choose
from gpumem_exporter.cli.fleet.group import GROUP_TIMEOUT_SECONDS, Reading, gather, ranks_query
from gpumem_exporter.cli.fleet.naming import Named, Place, named_processes, place_order, places
from gpumem_exporter.cli.fleet.options import ActOptions
from gpumem_exporter.cli.fleet.outcome import Outcome
from gpumem_exporter.cli.fleet.prometheus import Prometheus
from gpumem_exporter.cli.main import FAILED
from gpumem_exporter.core.naming import json_pid
from gpumem_exporter.errors import ActionRefusedError, GroupIncompleteError
from gpumem_exporter.wire.http import shown_url

__all__ = ["act", "asks_of"]

PER_DEVICE = ("reset_peak", "set_memory_fraction")
"""What is done to one device of a process; everything else is done to the whole process."""


def act(action: str, options: ActOptions) -> int:
    """Ask for an action on all processes that the query names, print what became of it, and return the exit code.

    Raises:
        ConfigurationError: an option or the query is wrong.
        PrometheusError: the query could not be evaluated.
        ActionRefusedError: too many processes are named, or a group cannot take part; nothing was asked.
    """
    body = options.request(action)
    prometheus = options.connect()
    token = options.token()
    found = prometheus.query(options.query)
    named = named_processes(found.series, options.instance_url)
    if named and isinstance(options, TimedRequest) and options.group:
        outcome = _act_as_group(body, named, prometheus, options, token)
    else:
        outcome = _act_on_each(body, named, options, token)
    outcome.tell(found.warnings, query=options.query, as_json=options.as_json)
    return 0 if outcome.done else FAILED


def asks_of(action: str, members: Iterable[Member]) -> list[Ask]:
    """What is asked of the exporters: one thing for each process, or for each device of it that is meant."""
    return [
        Ask(one.place, (one,), {**one.target, **({} if uuid is None else {"uuid": uuid})})
        for one in members
        for uuid in ((None,) if one.uuids is None or action not in PER_DEVICE else one.uuids)
    ]


def _act_on_each(
    body: Mapping[str, Any], named: Mapping[Place, Sequence[Named]], options: ActOptions, token: str
) -> Outcome:
    action = body["action"]
    nodes = Nodes(named, token=token, parallel=options.parallel)
    try:
        members, missing = _choose(nodes, named, unreported=action == "terminate")
        _require_at_most(options.max_processes, members)
        asks = asks_of(action, members)
        nodes.begin(asks, body)
        nodes.watch(asks, wait_seconds=options.deadline_seconds + ANSWER_GRACE_SECONDS)
    finally:
        nodes.close()
    return Outcome(action, options.dry_run, _rows(body, asks, missing))


def _act_as_group(
    body: Mapping[str, Any],
    named: Mapping[Place, Sequence[Named]],
    prometheus: Prometheus,
    options: ActOptions,
    token: str,
) -> Outcome:
    nodes = Nodes(named, token=token, parallel=options.parallel)
    try:
        members, missing = _choose(nodes, named, unreported=False)
    finally:
        nodes.close()
    if not members:
        return Outcome(body["action"], options.dry_run, _rows(body, (), missing))
    workload = _one_workload(members)
    with_ranks = places(prometheus.query(ranks_query(workload)).series, options.instance_url)
    everywhere = sorted({place.url: place for place in (*with_ranks, *named)}.values(), key=place_order)
    nodes = Nodes(everywhere, token=token, parallel=options.parallel, timeout_seconds=GROUP_TIMEOUT_SECONDS)
    try:
        asked = time.monotonic()
        read = nodes.read(everywhere, "processes")
        group = gather(
            workload,
            {
                place: document if isinstance(document, Failure) else Reading(document["processes"], asked)
                for place, document in read.items()
            },
            deadline_seconds=options.deadline_seconds,
            clock=time.monotonic,
        )
        _require_at_most(options.max_processes, group.members)
        asks = group.act(nodes, body, wait_seconds=options.deadline_seconds + ANSWER_GRACE_SECONDS)
    finally:
        nodes.close()
    return Outcome(body["action"], options.dry_run, _rows(body, asks, ()), group.at_step, group.called_off)


def _choose(
    nodes: Nodes, named: Mapping[Place, Sequence[Named]], *, unreported: bool
) -> tuple[list[Member], list[Missing]]:
    """Who is meant on each exporter, and what is named and not there, or cannot be asked for."""
    members: list[Member] = []
    missing: list[Missing] = []
    for place, document in nodes.read(tuple(named), "processes").items():
        if isinstance(document, Failure):
            missing += (Missing(place, name, document.outcome, document.reason) for name in named[place])
            continue
        choice = choose(place, named[place], document["processes"], unreported=unreported)
        members += choice.members
        missing += choice.missing
    return members, missing


def _one_workload(members: Sequence[Member]) -> str:
    workloads = sorted({member.workload or "" for member in members})
    if len(workloads) > 1 or not workloads[0]:
        listed = ", ".join(workload or "(none)" for workload in workloads)
        raise GroupIncompleteError(f"a group is one workload; the query names {listed}")
    return workloads[0]


def _require_at_most(most: int, members: Sequence[Member]) -> None:
    if len(members) > most:
        raise ActionRefusedError(
            f"{len(members)} processes are meant, more than --max-processes {most}; nothing was asked"
        )


def _rows(body: Mapping[str, Any], asks: Sequence[Ask], missing: Sequence[Missing]) -> list[Mapping[str, Any]]:
    """Everything that became of it, by exporter, workload and rank; rank 10 stands after rank 9."""
    found = [(ask.place, row) for ask in asks for row in rows(ask, action=body["action"], dry_run=body["dry_run"])]
    found += [(one.place, _row(one)) for one in missing]

    def place_in_table(item: tuple[Place, Mapping[str, Any]]) -> tuple[Any, ...]:
        place, row = item
        return (
            place_order(place),
            row["workload"] or "",
            (row["rank"] or "").zfill(9),
            str(row["pid"] or "").zfill(12),
            row["gpu"] or "",
        )

    return [row for _, row in sorted(found, key=place_in_table)]


def _row(missing: Missing) -> dict[str, Any]:
    return {
        "instance": missing.place.instance,
        "url": shown_url(missing.place.url),
        "action_id": None,
        "pid": missing.named.pid if missing.named.pid is None else json_pid(missing.named.pid),
        "workload": missing.named.workload,
        "rank": missing.named.rank,
        "gpu": missing.named.gpu,
        "uuid": missing.named.uuid,
        "outcome": missing.outcome,
        "reason": missing.reason,
        "freed_bytes": None,
    }
