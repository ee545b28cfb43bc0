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
    access_options,
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
from gpumem_exporter.features.fleet.fleet_nodes import Exporter, Fleet

_EXAMPLES = """\b
Examples:
  gpumem-exporter fleet info --prometheus http://prometheus:9090
  gpumem-exporter fleet clear --prometheus http://prometheus:9090 \\
    --query 'gpumem_torch_idle_cache_bytes > 8e9' --dry-run

\b
The labels of a series:
  instance                          select its exporter: http://INSTANCE, or --instance-url
  pid, workload, rank, gpu, uuid    select processes there; labels narrow each other

\b
The command acts only on processes that the query selects, and on at most --max-processes. A clear of one
rank at the end of a step is a clear of all ranks of its job on that node. Exporters on other machines require
a token. It is sent to the addresses in the series, if they use https or with --insecure.

\b
Exit codes: 0 all done; 1 an exporter is down or refuses, or a process exited; 2 wrong usage or query.
"""

_query_option = click.option(
    "--query",
    metavar="PROMQL",
    default='up{job="gpumem"}',
    show_default=True,
    help="Show the exporters of this query's series.",
)
_fleet_options = option_group(
    click.option(
        "--prometheus",
        metavar="URL",
        envvar="GPUMEM_PROMETHEUS_URL",
        help="The API of Prometheus, Thanos, Mimir or Cortex: the part of its http or https URL before /api/v1. "
        "user:password@ is basic auth. Default: GPUMEM_PROMETHEUS_URL.",
    ),
    click.option(
        "--prometheus-token-file",
        metavar="PATH",
        envvar="GPUMEM_PROMETHEUS_TOKEN_FILE",
        help="File with a bearer token for the API. Default: GPUMEM_PROMETHEUS_TOKEN_FILE.",
    ),
    click.option(
        "--prometheus-header",
        "prometheus_headers",
        multiple=True,
        metavar="'NAME: VALUE'",
        help="A header for the API, such as 'X-Scope-OrgID: gpu' (repeatable).",
    ),
    click.option(
        "--instance-url",
        metavar="TEMPLATE",
        default="http://{instance}",
        show_default=True,
        help="URL of a series' exporter, such as https://{instance}; {label} is the value of that label.",
    ),
    click.option(
        "--insecure",
        is_flag=True,
        help="Send the token also to other machines without https. Default: GPUMEM_EXPORTER_INSECURE=1.",
    ),
    access_options,
)


class FleetSource:
    """Reads the exporters that a query selects. Not thread-safe."""

    def __init__(self, fleet: Fleet, query: str) -> None:
        self._fleet, self._query = fleet, query
        self._nodes: dict[Exporter, Node] = {}

    def read(self) -> tuple[list[Node], tuple[str, ...]]:
        """Query Prometheus for exporters, and each exporter for its node. One that is silent keeps its values."""
        found, warnings = self._fleet.find(self._query)
        answers = self._fleet.ask([(exporter, "none") for exporter in found], read_live)
        before, self._nodes = self._nodes, {}
        for exporter, answer in zip(found, answers, strict=True):
            node = before.get(exporter, Node(None, exporter.url, exporter.instance))
            silent = isinstance(answer, ExporterError)
            change: dict[str, Any] = {"error": str(answer)} if silent else {"live": answer, "error": ""}
            self._nodes[exporter] = replace(node, **change)
        return [*self._nodes.values()], warnings


@click.group(cls=CommandGroup, epilog=_EXAMPLES, no_args_is_help=False)
def fleet() -> None:
    """Show many nodes, and act on them by a query."""


@fleet.command
@view_options
@wide_option
@_query_option
@_fleet_options
def info(query: str, wide: bool, **values: Any) -> int:
    """Show findings, jobs and devices of many nodes.

    Prometheus lists the exporters. Each exporter then reports its current values.
    """
    view, of = pop_view(values), Fleet(values)
    nodes, warnings = FleetSource(of, query).read()
    if of.as_json:
        silent: dict[str, Any] = {"devices": [], "jobs": [], "findings": []}
        exporters = [
            {"instance": node.name, "url": shown_url(node.url), "error": node.error or None}
            | (node_document(node.live) if node.live is not None else silent)
            for node in nodes
        ]
        print_json({"exporters": exporters, "warnings": list(warnings)})
    else:
        console = open_console(wide=wide)
        show(console, node_tables(nodes, view, console.width, wide=wide, warnings=warnings))
    return FAILED if any(node.error for node in nodes) else 0


@fleet.command
@view_options
@interval_option(5.0)
@_query_option
@_fleet_options
def top(interval_seconds: float, query: str, **values: Any) -> int:
    """Show findings, jobs and devices of many nodes, live: `top` with a column for the node.

    The last values of a node that does not answer stay, dimmed.
    """
    from gpumem_exporter.cli.top.app import Top

    require_terminal("fleet info")
    view, of = pop_view(values), Fleet(values)
    source = FleetSource(of, query)
    return Top(source.read, source.read(), view, interval_seconds=interval_seconds, open_api=of.api).run_to_end()


def _add_action(action: str, kind: ActionKind) -> None:
    devices = " If a series names a device, only on that device." if kind.by_device else ""

    @fleet.command(
        kind.command,
        help=f"{kind.summary}\n\nActs as `{kind.command}` on each process that the query selects.{devices}",
        epilog="See `gpumem-exporter fleet --help` for the labels of a series.",
    )
    @(yes_to_terminate if action == "terminate" else option_group())
    @action_options(action, without=("group",))
    @click.option(
        "--query",
        metavar="PROMQL",
        required=True,
        help="Select the processes of this query's series: the exporter by `instance`, its processes by `pid`, "
        "`workload`, `rank`, `gpu` and `uuid`, where a series has these labels.",
    )
    @click.option(
        "--max-processes",
        type=click.IntRange(1),
        metavar="N",
        default=100,
        show_default=True,
        help="Do nothing if the query selects more processes.",
    )
    @_fleet_options
    def run(query: str, max_processes: int, **values: Any) -> int:
        return act(action, query, max_processes, values)


for _action, _kind in KINDS.items():
    if _kind.command:
        _add_action(_action, _kind)
