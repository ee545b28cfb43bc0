"""`info`: jobs, devices and the ledger, once."""

from __future__ import annotations

from typing import Any

import click

from gpumem_exporter.cli.api_client import ExporterApi, read_rights, rights_line
from gpumem_exporter.cli.node_view import Node, node_document, read_live, require_known, selected
from gpumem_exporter.cli.options import api_options, pop_target, pop_view, target_options, view_options, wide_option
from gpumem_exporter.cli.render.node_tables import device_lines, node_tables
from gpumem_exporter.cli.render.terminal import open_console, print_json, show

_EXAMPLES = """\b
Examples:
  gpumem-exporter info
  gpumem-exporter info --url http://gpu-node-7:9844 --sort idle-cache
  gpumem-exporter info --gpu 0,1 --workload llm
  gpumem-exporter info -o wide                        # the processes of each job, and all columns
  gpumem-exporter info -1                             # one line for each GPU
  gpumem-exporter info --json | jq '.processes[] | select(.reporting) | .workload'

\b
A dash is a value that is not known, and ≥ a lower bound. K, M and G are KiB, MiB and GiB.
"""


@click.command(epilog=_EXAMPLES)
@view_options
@wide_option
@click.option("-1", "brief", is_flag=True, help="One line for each GPU: used, what stays free after a clear, and jobs.")
@target_options
@api_options
def info(api: ExporterApi, as_json: bool, wide: bool, brief: bool, **values: Any) -> int:
    """Show jobs, devices and where every byte is.

    The values are the latest of the driver and the reporters. `info` takes the same target options as actions: each is
    repeatable and takes a list. It shows the jobs of the selected processes, and the devices that they use.
    """
    view, target = pop_view(values), pop_target(values)
    live = read_live(api, "all" if as_json else "none")
    require_known(live, target)
    shown = selected(live, target)
    if as_json:
        print_json(node_document(shown))
        return 0
    if brief:
        print(*device_lines(shown), sep="\n")
        return 0
    rights = read_rights(api)
    console = open_console(wide=wide)
    show(console, node_tables([Node(shown)], view, console.width, wide=wide, ledger=True))
    if line := rights_line(rights, "clear"):
        print(f"\n{line}")
    return 0
