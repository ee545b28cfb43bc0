"""`fleet`: show many nodes, and act on the processes that a PromQL query selects there."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import click

from gpumem_client.wire.errors import ExporterError
from gpumem_client.wire.http import shown_url
from gpumem_exporter.actions.kinds import KINDS, ActionKind
from gpumem_exporter.cli.node_view import Node, node_document, read_live
from gpumem_exporter.cli.options import (
    action_options,
    interval_option,
    option_group,
    pop_view,
    view_options,
    wide_option,
    yes_to_terminate,
)
from gpumem_exporter.cli.program import FAILED
from gpumem_exporter.cli.render.node_tables import node_tables
from gpumem_exporter.cli.render.terminal import open_console, print_json, require_terminal, show
from gpumem_exporter.cli.usage import CommandGroup
from gpumem_exporter.features.fleet.fleet_action import act
from gpumem_exporter.features.fleet.fleet_options import (
    FleetOptions,
    fleet_options,
    overview_options,
    selection_options,
)
from gpumem_exporter.features.fleet.node_selection import exporters_of
from gpumem_exporter.features.fleet.prometheus import Prometheus

_EXAMPLES = """\b
Examples:
  gpumem-exporter fleet info --prometheus http://prometheus:9090
  gpumem-exporter fleet clear --prometheus http://prometheus:9090 \\
    --query 'gpumem_torch_idle_cache_bytes > 8e9' --dry-run
  gpumem-exporter fleet gc --query 'sum by (instance, pid) (gpumem_torch_fragmented_bytes) > 4e9'

\b
The labels of a series:
  instance                          select its exporter: http://INSTANCE, or --instance-url
  pid, workload, rank, gpu, uuid    select processes there; labels narrow each other

\b
The command acts only on processes that the query selects, and on at most --max-processes. A clear of one
rank at the end of a step is a clear of all ranks of its job on that node. Exporters on other machines
require a token. The command sends the token with actions to the addresses in the series, if they use https
or with --insecure.

\b
Exit codes: 0 all done; 1 an exporter is down or refuses, or a process exited; 2 wrong usage or query.
"""


class FleetSource:
    """Reads the exporters that a query selects. Not thread-safe."""

    def __init__(self, prometheus: Prometheus, query: str, options: FleetOptions) -> None:
        self._prometheus, self._query, self._options = prometheus, query, options
        self._last: list[Node] = []
        self.warnings: tuple[str, ...] = ()
        """The warnings of the last query."""

    def read(self) -> list[Node]:
        """Query Prometheus for exporters, and each exporter for its node. One that is silent keeps its values."""
        found = self._prometheus.query(self._query)
        exporters = exporters_of(found.series, self._options.instance_url)
        self.warnings = found.warnings
        before = {node.name: node for node in self._last}
        answers = self._options.ask(exporters, read_live)
        self._last = [
            Node(answer, exporter.url, exporter.instance)
            if not isinstance(answer, ExporterError)
            else replace(before.get(exporter.instance, Node(None, exporter.url, exporter.instance)), error=str(answer))
            for exporter, answer in answers.items()
        ]
        return self._last


def overview_document(source: FleetSource, nodes: list[Node]) -> dict[str, Any]:
    """Return the JSON document of nodes."""
    exporters = []
    for node in nodes:
        address: dict[str, Any] = {"instance": node.name, "url": shown_url(node.url), "error": node.error or None}
        described = node_document(node.live) if node.live is not None else {"devices": [], "jobs": [], "findings": []}
        exporters.append({**address, **{name: value for name, value in described.items() if name != "processes"}})
    return {"exporters": exporters, "warnings": list(source.warnings)}


@click.group(cls=CommandGroup, epilog=_EXAMPLES, no_args_is_help=False)
def fleet() -> None:
    """Show many nodes, and act on them by a query."""


@fleet.command
@view_options
@wide_option
@overview_options
@fleet_options
def info(options: FleetOptions, query: str, wide: bool, **values: Any) -> int:
    """Show findings, jobs and devices of many nodes.

    Prometheus lists the exporters. Each exporter then reports its current values.
    """
    view = pop_view(values)
    source = FleetSource(options.connect(), query, options)
    nodes = source.read()
    if options.as_json:
        print_json(overview_document(source, nodes))
    else:
        console = open_console(wide=wide)
        show(console, node_tables(nodes, view, console.width, wide=wide, warnings=source.warnings))
    return FAILED if any(node.error for node in nodes) else 0


@fleet.command
@view_options
@interval_option(5.0)
@overview_options
@fleet_options
def top(options: FleetOptions, interval_seconds: float, query: str, **values: Any) -> int:
    """Show findings, jobs and devices of many nodes, live: `top` with a column for the node.

    The last values of a node that does not answer stay, dimmed.
    """
    from gpumem_exporter.cli.top.app import Top

    require_terminal("fleet info")
    view = pop_view(values)
    source = FleetSource(options.connect(), query, options)
    nodes = source.read()
    return Top(source, nodes, view, interval_seconds=interval_seconds, open_api=options.api).run_to_end()


def _add_action(action: str, kind: ActionKind) -> None:
    devices = " If a series names a device, only on that device." if kind.by_device else ""
    acts = f"Acts as `{kind.command}` on each process that the query selects."

    @fleet.command(
        kind.command,
        help=f"{kind.summary}\n\n{acts}{devices}",
        epilog="See `gpumem-exporter fleet --help` for the labels of a series.",
    )
    @(yes_to_terminate if action == "terminate" else option_group())
    @action_options(action, without=("group",))
    @selection_options
    @fleet_options
    def run(options: FleetOptions, query: str, max_processes: int, **values: Any) -> int:
        return act(action, query, max_processes, values, options)


for _action, _kind in KINDS.items():
    if _kind.command:
        _add_action(_action, _kind)
