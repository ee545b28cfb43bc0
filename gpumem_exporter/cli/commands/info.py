"""`info`: one look at devices, processes and the ledger."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import typer

from gpumem_exporter.cli.api_client import ExporterApi
from gpumem_exporter.cli.options import ConnectionOptions, with_options
from gpumem_exporter.cli.render.terminal import open_console, print_json, show

__all__ = ["register"]

_EXAMPLES = """\b
Examples:
  gpumem-exporter info
  gpumem-exporter info --url http://gpu-node-7:9844
  gpumem-exporter info --json | jq '.processes[] | select(.reporting) | .workload'
"""


@dataclass(frozen=True, kw_only=True)
class InfoOptions(ConnectionOptions):
    """What `info` takes."""


def register(application: typer.Typer) -> None:
    """Add the command."""
    application.command("info", epilog=_EXAMPLES)(with_options(InfoOptions)(info))


def info(options: InfoOptions) -> int:
    """Show devices, processes and where every byte is.

    Sizes are what the driver and the reporters said last; a dash is a figure that cannot be known.
    """
    with ExporterApi(options.urls(), token=options.token()) as api:
        devices = api.get("/api/v1/devices")
        processes = api.get("/api/v1/processes")
    if options.as_json:
        print_json({**devices, **processes})
    else:
        _print_tables(devices, processes)
    return 0


def _print_tables(devices: dict[str, Any], processes: dict[str, Any]) -> None:
    from gpumem_exporter.cli.render.node_tables import node_tables

    console = open_console()
    unicode_output = console.encoding.lower().startswith("utf")
    show(console, node_tables(devices, processes, width=console.width, unicode_output=unicode_output))
