"""`info`: devices, processes and the ledger, once."""

from __future__ import annotations

from typing import Any

import click

from gpumem_exporter.cli.api_client import read_rights, rights_line
from gpumem_exporter.cli.node import read_live
from gpumem_exporter.cli.options import connection_options, open_api, pop_target, target_options
from gpumem_exporter.cli.render.terminal import open_console, print_json, show

_EXAMPLES = """\b
Examples:
  gpumem-exporter info
  gpumem-exporter info --url http://gpu-node-7:9844
  gpumem-exporter info --gpu 0,1 --workload llm
  gpumem-exporter info --json | jq '.processes[] | select(.reporting) | .workload'
"""


@click.command(epilog=_EXAMPLES)
@target_options
@connection_options
def info(url: str | None, token_file: str | None, as_json: bool, **selectors: Any) -> int:
    """Show devices, processes and where every byte is.

    The values are the latest of the driver and the reporters. A dash is a value that is not known. `info` takes
    the same target options as actions: each is repeatable and takes a list. Only the devices that the selected
    processes use are shown.
    """
    target = pop_target(selectors)
    with open_api(url, token_file) as api:
        node, _ = read_live(api)
        rights = {} if as_json else read_rights(api)
    node.require_known(target)
    shown = node.selected(target)
    if as_json:
        print_json({**shown.devices, **shown.processes})
        return 0
    from gpumem_exporter.cli.render.node_tables import node_tables

    console = open_console()
    show(console, node_tables(shown.devices, shown.processes, width=console.width))
    if line := rights_line(rights, "clear"):
        print(line)
    return 0
