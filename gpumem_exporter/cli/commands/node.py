"""`info` and `top`: jobs and devices, once, or live in a terminal."""

from __future__ import annotations

import os
import textwrap
from typing import Any

import click

from gpumem_client.wire.errors import ConfigurationError, ExporterError
from gpumem_client.wire.http import shown_url
from gpumem_exporter.cli.api_client import Document, ExporterApi, rights_line
from gpumem_exporter.cli.node_view import Node, node_document, read_live, require_known, selected
from gpumem_exporter.cli.options import (
    api_options,
    connection_options,
    interval_option,
    pop_target,
    pop_view,
    target_options,
    view_options,
    wide_option,
)
from gpumem_exporter.cli.render.node_tables import PROCESS_FIELDS, device_lines, node_tables, process_documents
from gpumem_exporter.cli.render.terminal import open_console, print_json, require_terminal, show
from gpumem_exporter.cli.usage import api_opener, exporter_urls, named_exporter

_INFO_EXAMPLES = """\b
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
_ROWS = f"  rows       one for each process on each device, filtered and in order: {', '.join(PROCESS_FIELDS)}"
_TOP_EXAMPLES = f"""\b
Examples:
  gpumem-exporter top
  gpumem-exporter top --url http://gpu-node-7:9844 --sort idle-cache
  gpumem-exporter top --gpu 0,1 --user alice --filter train
  gpumem-exporter top --once | head -20
  gpumem-exporter top --once --json | jq -r '.rows[] | select(.fragmented_bytes > 1e9) | .workload'

\b
Keys: arrows or j and k select, enter shows the job or the device, space folds, / filters, s sorts, r reverses,
c clears after a question, ? helps, q quits. The mouse works, too.

\b
--once --json prints one document:
  exporter   the address that answered; null if only the driver was read
  source, taken_unix_seconds, nvml, devices, jobs, findings
             as `info --json` has them; a device's ledger is null without an exporter
{textwrap.fill(f"{_ROWS}; null if unknown", 100, subsequent_indent=" " * 13)}

\b
Exit codes: 0 shown; 1 neither the exporter answers nor, without --url, the driver; 2 wrong usage.
"""
# The timeout for an answer to `top`, which is short because the driver may replace the exporter.
_ANSWER_SECONDS = 2.0


@click.command(epilog=_INFO_EXAMPLES)
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
    console = open_console(wide=wide)
    show(console, node_tables([Node(shown)], view, console.width, wide=wide, ledger=True))
    if line := rights_line(api.rights(), "clear"):
        print(f"\n{line}")
    return 0


@click.command(epilog=_TOP_EXAMPLES)
@view_options
@interval_option(1.0)
@click.option("--once", is_flag=True, help="Print the current values once and exit.")
@target_options
@connection_options
def top(*, interval_seconds: float, once: bool, token_file: str | None, as_json: bool, **values: Any) -> int:
    """Show findings, jobs and devices, live.

    If no exporter answers, and neither --url nor GPUMEM_EXPORTER_URL is set, `top` reads only the driver: devices and
    the memory of each process. If a later answer is missing, the last values stay, dimmed, with their time. `top` takes
    the same target options as actions: each is repeatable and takes a list.
    """
    if as_json and not once:
        raise ConfigurationError("--json prints one document; add --once")
    view, target = pop_view(values), pop_target(values)
    if not once:
        require_terminal("top --once")
    connect = api_opener(token_file)
    api = connect(tuple(exporter_urls()), timeout_seconds=_ANSWER_SECONDS)

    def read_exporter() -> tuple[Document, str]:
        try:
            return read_live(api, "all" if as_json else "none"), api.url
        except ExporterError:
            api.close()  # another address may answer the next time, from another exporter
            raise

    read_document = read_exporter
    try:
        live, url = read_document()
    except ExporterError as error:
        if named_exporter() or os.environ.get("GPUMEM_EXPORTER_URL", "").strip():
            raise
        from gpumem_exporter.cli.top.driver import DriverReader

        read_document = DriverReader(str(error)).read
        live, url = read_document()
    require_known(live, target)  # later, a process may exit

    def shown(live: Document, url: str) -> list[Node]:
        return [Node(selected(live, target), url)]

    nodes = shown(live, url)
    if as_json:
        described = node_document(selected(live, target))
        del described["processes"]
        exporter = shown_url(url) if url else None
        print_json({"exporter": exporter, **described, "rows": process_documents(nodes, view)})
        return 0
    if once:
        console = open_console()
        show(console, node_tables(nodes, view, console.width))
        return 0
    from gpumem_exporter.cli.top.app import Top

    return Top(
        lambda: (shown(*read_document()), ()),
        (nodes, ()),
        view,
        interval_seconds=interval_seconds,
        open_api=lambda url: connect((url,)),
    ).run_to_end()
