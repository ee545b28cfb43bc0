"""`top`: devices and processes, live in a terminal, or once for scripts."""

from __future__ import annotations

import contextlib
import os
from typing import TYPE_CHECKING, Any

import click

from gpumem_client.wire.errors import ConfigurationError
from gpumem_client.wire.http import shown_url
from gpumem_exporter.cli.api_client import ExporterApi
from gpumem_exporter.cli.options import (
    action_token,
    connection_options,
    exporter_urls,
    interval_option,
    pop_target,
    target_options,
)
from gpumem_exporter.cli.render.terminal import open_console, print_json, require_terminal, show
from gpumem_exporter.cli.top import content
from gpumem_exporter.cli.top.content import SORTS, View
from gpumem_exporter.cli.top.source import Reading, Source

if TYPE_CHECKING:
    from gpumem_exporter.cli.top.driver import DriverReader

_EXAMPLES = """\b
Examples:
  gpumem-exporter top
  gpumem-exporter top --url http://gpu-node-7:9844 --sort idle-cache
  gpumem-exporter top --gpu 0,1 --user alice --filter train
  gpumem-exporter top --once | head -20
  gpumem-exporter top --once --json | jq -r '.rows[] | select(.fragmented_bytes > 1e9) | .workload'

\b
Keys: arrows or j and k select, s sorts, r reverses, / filters, c clears after a question,
e shows the events, ? helps, q quits.

\b
--once --json prints one document:
  exporter   the address that answered; null if only the driver was read
  source     nvml, or demo for simulated devices
  taken_unix_seconds, nvml, devices
             as GET /api/v1/devices has them; a device's ledger is null without an exporter
  rows       one for each process on each device, filtered and in order: pid, gpu, uuid, workload,
             rank, command, user, k8s_namespace, k8s_pod, state, used_bytes, allocated_bytes,
             reserved_bytes, idle_cache_bytes, reclaimable_bytes, fragmented_bytes, non_torch_bytes,
             nccl_bytes, unmapped_bytes, step, sample_age_seconds, actions; null if unknown

\b
Exit codes: 0 shown; 1 neither the exporter answers nor, without --url, the driver; 2 wrong usage.
"""
_ANSWER_SECONDS = 2.0
"""The timeout for an answer, which is short because the driver may replace the exporter."""


@click.command(epilog=_EXAMPLES)
@click.option("--sort", metavar="COLUMN", default="used", show_default=True, help=f"Sort rows by: {', '.join(SORTS)}.")
@click.option("--reverse", is_flag=True, help="Reverse the order.")
@click.option(
    "--filter",
    "filter_text",
    metavar="WORDS",
    default="",
    help="Only rows that contain every word in their pid, uuid, workload, command, user, pod or state.",
)
@interval_option(1.0)
@click.option("--once", is_flag=True, help="Print the current values once and exit.")
@target_options
@connection_options
def top(
    *,
    sort: str,
    reverse: bool,
    filter_text: str,
    interval_seconds: float,
    once: bool,
    url: str | None,
    token_file: str | None,
    as_json: bool,
    **selectors: Any,
) -> int:
    """Show devices, their ledgers and the processes on them, live.

    If no exporter answers, and neither --url nor GPUMEM_EXPORTER_URL is set, `top` reads only the driver: devices and
    the memory of each process. A dash is a value that is not known. `top` takes the same target options as actions:
    each is repeatable and takes a list. Only the devices that the selected processes use are shown.
    """
    if sort not in SORTS:
        raise ConfigurationError(f"--sort {sort}: must be one of {', '.join(SORTS)}")
    if as_json and not once:
        raise ConfigurationError("--json prints one document; add --once")
    view, target = View(text=filter_text, sort=sort, reverse=reverse), pop_target(selectors)
    if not once:
        require_terminal("top --once")
    token = action_token(token_file)
    named = url is not None or bool(os.environ.get("GPUMEM_EXPORTER_URL", "").strip())
    urls = exporter_urls(url)
    source = Source(
        lambda: ExporterApi(urls, token=token, timeout_seconds=_ANSWER_SECONDS),
        open_driver=None if named else _open_driver,
        target=target,
    )
    with contextlib.closing(source) if once else contextlib.nullcontext():
        reading = source.read(with_events=not as_json)
    if once:
        _print_once(reading, view, as_json=as_json)
        return 0
    from gpumem_exporter.cli.top.app import NodeTop

    def open_api(address: str) -> ExporterApi:
        return ExporterApi((address,), token=token)

    return NodeTop(source.read, reading, view, interval_seconds=interval_seconds, open_api=open_api).run_to_end()


def _print_once(reading: Reading, view: View, *, as_json: bool) -> None:
    if as_json:
        exporter = shown_url(reading.url) if reading.url else None
        print_json({"exporter": exporter, **reading.node.devices, "rows": view.rows(reading.rows)})
        return
    console = open_console()
    show(console, content.once(reading, view, console.width))


def _open_driver() -> DriverReader:
    from gpumem_exporter.cli.top.driver import DriverReader

    return DriverReader()
