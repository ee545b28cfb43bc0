"""`top`: devices and processes, live in a terminal, or once for scripts."""

from __future__ import annotations

import os
import sys
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Annotated, Any

import typer

from gpumem_client.wire.errors import ConfigurationError
from gpumem_client.wire.http import shown_url
from gpumem_exporter.cli.action_options import SelectorOptions
from gpumem_exporter.cli.api_client import ExporterApi
from gpumem_exporter.cli.options import ConnectionOptions, checked_interval, command_from_options
from gpumem_exporter.cli.render.terminal import open_console, print_json, require_terminal, show
from gpumem_exporter.cli.top.rows import SORTS
from gpumem_exporter.cli.top.source import Reading, Source
from gpumem_exporter.cli.top.view import View

if TYPE_CHECKING:
    from gpumem_exporter.cli.top.driver import DriverReader

__all__ = ["build"]

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


@dataclass(frozen=True, kw_only=True)
class TopOptions(ConnectionOptions):
    """The options of `top`."""

    sort: Annotated[str, typer.Option("--sort", metavar="COLUMN", help=f"Sort rows by: {', '.join(SORTS)}.")] = "used"
    reverse: Annotated[bool, typer.Option("--reverse", help="Reverse the order.")] = False
    filter_text: Annotated[
        str,
        typer.Option(
            "--filter",
            metavar="WORDS",
            help="Only rows that contain every word in their pid, uuid, workload, command, user, pod or state.",
        ),
    ] = ""
    interval_seconds: Annotated[
        float, typer.Option("--interval", metavar="SECONDS", help="Seconds between updates: 0.2 to 3600.")
    ] = 1.0
    once: Annotated[bool, typer.Option("--once", help="Print the current values once and exit.")] = False

    def view(self) -> View:
        """Return the view at the start.

        Raises:
            ConfigurationError: an option is invalid.
        """
        if self.sort not in SORTS:
            raise ConfigurationError(f"--sort {self.sort}: must be one of {', '.join(SORTS)}")
        checked_interval(self.interval_seconds)
        if self.as_json and not self.once:
            raise ConfigurationError("--json prints one document; add --once")
        return View(text=self.filter_text, sort=self.sort, reverse=self.reverse)


def build(name: str) -> typer.Typer:
    """Return the command."""
    return command_from_options(name, _top, TopOptions, SelectorOptions, epilog=_EXAMPLES)


def _top(options: TopOptions, selectors: SelectorOptions) -> int:
    """Show devices, their ledgers and the processes on them, live.

    If no exporter answers, and neither --url nor GPUMEM_EXPORTER_URL is set, `top` reads only the driver: devices and
    the memory of each process. A dash is a value that is not known. The options that select processes are those of the
    actions: each is repeatable and takes a list. Only the devices that the selected processes use are shown.
    """
    view, target = options.view(), selectors.selection()
    if not options.once:
        require_terminal("top --once")
    token = options.token()
    named = options.url is not None or bool(os.environ.get("GPUMEM_EXPORTER_URL", "").strip())
    source = Source(options.urls(), token=token, driver=None if named else _open_driver, target=target)
    try:
        reading = source.read(with_past=not options.as_json)
    except BaseException:
        source.close()
        raise
    if options.once:
        source.close()
        _print_once(reading, view, as_json=options.as_json)
        return 0
    return _live(source, reading, view, options.interval_seconds, token)


def _live(source: Source, reading: Reading, view: View, interval_seconds: float, token: str) -> int:
    from gpumem_exporter.cli.top.loop import run
    from gpumem_exporter.cli.top.screen import Screen, exit_code_of

    keyboard = sys.stdin.fileno()
    ended = run(
        source,
        reading,
        view,
        interval_seconds=interval_seconds,
        screen=Screen(sys.stdout, keyboard),
        keyboard=keyboard,
        open_api=lambda url: ExporterApi((url,), token=token),
    )
    return exit_code_of(ended)


def _print_once(reading: Reading, view: View, *, as_json: bool) -> None:
    if as_json:
        print_json(_document(reading, view))
        return
    from gpumem_exporter.cli.top.frame import print_lines

    console = open_console()
    show(console, print_lines(reading, view, console.width))


def _document(reading: Reading, view: View) -> dict[str, Any]:
    return {
        "exporter": shown_url(reading.url) if reading.url else None,
        **reading.devices,
        "rows": [asdict(row) for row in view.rows(reading.rows)],
    }


def _open_driver() -> DriverReader:
    from gpumem_exporter.cli.top.driver import open_driver

    return open_driver()
