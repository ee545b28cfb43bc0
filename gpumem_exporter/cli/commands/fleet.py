"""`fleet`: look at many nodes, and act on what a PromQL query names there, without an inventory of them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

import typer

from gpumem_exporter.cli.fleet.acting import act
from gpumem_exporter.cli.fleet.options import (
    ActOptions,
    FleetClearOptions,
    FleetFractionOptions,
    FleetTimedOptions,
    LookOptions,
)
from gpumem_exporter.cli.fleet.outcome import warn
from gpumem_exporter.cli.fleet.overview import look
from gpumem_exporter.cli.main import FAILED
from gpumem_exporter.cli.options import with_options
from gpumem_exporter.cli.render.terminal import open_console, print_json, show
from gpumem_exporter.errors import ConfigurationError

__all__ = ["register"]

_EXAMPLES = """\b
Examples:
  gpumem-exporter fleet info --prometheus http://prometheus:9090
  gpumem-exporter fleet clear --prometheus http://prometheus:9090 \\
    --query 'gpumem_torch_reclaimable_bytes > 8e9' --dry-run
  gpumem-exporter fleet clear --group --deadline 60 \\
    --query 'gpumem_reporter_up{workload="llm-pretrain"}'
  gpumem-exporter fleet gc --query 'sum by (instance, pid) (gpumem_torch_fragmented_bytes) > 4e9'

\b
How a series is read:
  instance                          its exporter: http://INSTANCE, or what --instance-url says
  pid, workload, rank, gpu, uuid    the processes there; labels narrow each other

\b
Nothing is done that the query does not name, to no more processes than --max-processes, and each
exporter's answer is held against what was asked. Exporters on other machines want a token, which
goes to the addresses that the series name.

\b
Exit codes: 0 all done; 1 something was not: an exporter that is down or refuses, a process that has
gone; 2 wrong usage or query.
"""

_ACT = """\b
Examples:
  gpumem-exporter fleet {name} --prometheus http://prometheus:9090 --dry-run \\
    --query '{query}'
  GPUMEM_PROMETHEUS_URL=https://mimir/prometheus gpumem-exporter fleet {name} --json \\
    --prometheus-header 'X-Scope-OrgID: gpu' --query '{query}' | jq .results

\b
`gpumem-exporter fleet --help` says how a series is read.
"""
_QUERY = "gpumem_torch_reclaimable_bytes > 8e9"


@dataclass(frozen=True, kw_only=True)
class TopOptions(LookOptions):
    """What `fleet top` takes."""

    interval_seconds: Annotated[
        float, typer.Option("--interval", metavar="SECONDS", help="How often to look: 0.2 to 3600.")
    ] = 5.0


def register(application: typer.Typer) -> None:
    """Add the commands."""
    fleet = typer.Typer(
        help="Look at many nodes, and act on them, by a query.",
        epilog=_EXAMPLES,
        rich_markup_mode=None,
        add_completion=False,
    )
    fleet.command("info")(with_options(LookOptions)(info))
    fleet.command("top")(with_options(TopOptions)(top))
    fleet.command("clear", epilog=_examples("clear"))(with_options(FleetClearOptions)(clear))
    fleet.command("gc", epilog=_examples("gc"))(with_options(FleetTimedOptions)(collect))
    fleet.command("reset-peak", epilog=_examples("reset-peak"))(with_options(FleetTimedOptions)(reset_peak))
    fleet.command("snapshot", epilog=_examples("snapshot"))(with_options(FleetTimedOptions)(snapshot))
    fleet.command("fraction", epilog=_examples("fraction 0.5"))(with_options(FleetFractionOptions)(fraction))
    fleet.command("terminate", epilog=_examples("terminate"))(with_options(ActOptions)(terminate))
    application.add_typer(fleet, name="fleet")


def info(options: LookOptions) -> int:
    """Show a row for each device of each exporter.

    The figures are what each exporter says now, not what Prometheus scraped: Prometheus only says which there are.
    """
    overview = look(options.connect(), options, options.token())
    if options.as_json:
        print_json(overview.document())
    else:
        warn(overview.warnings)
        show(open_console(), overview.tables())
    return 0 if overview.complete else FAILED


def top(options: TopOptions) -> int:
    """Show what `fleet info` shows, live; q quits."""
    from gpumem_exporter.cli.fleet.live import need_terminal, show_live

    if not 0.2 <= options.interval_seconds <= 3600:
        raise ConfigurationError(f"--interval {options.interval_seconds:g}: must be 0.2 to 3600 seconds")
    need_terminal()
    prometheus, token = options.connect(), options.token()
    show_live(lambda: look(prometheus, options, token), interval_seconds=options.interval_seconds)
    return 0


def clear(options: FleetClearOptions) -> int:
    """Give cached memory back to the driver.

    Each process that the query names does what `clear` has it do.
    """
    return act("empty_cache", options)


def collect(options: FleetTimedOptions) -> int:
    """Run Python's garbage collector in processes.

    Each process that the query names does what `gc` has it do.
    """
    return act("collect_garbage", options)


def reset_peak(options: FleetTimedOptions) -> int:
    """Begin the peaks of processes anew.

    Each process that the query names does what `reset-peak` has it do; where its series name devices, for those alone.
    """
    return act("reset_peak", options)


def snapshot(options: FleetTimedOptions) -> int:
    """Have processes write a memory snapshot.

    Each process that the query names does what `snapshot` has it do, on its own node: --json says where the files are.
    """
    return act("snapshot", options)


def fraction(options: FleetFractionOptions) -> int:
    """Cap what processes may reserve.

    Each process that the query names does what `fraction` has it do; where its series name devices, on those alone.
    """
    return act("set_memory_fraction", options)


def terminate(options: ActOptions) -> int:
    """End processes: SIGTERM, ten seconds, SIGKILL.

    Each process that the query names is ended as `terminate` ends it, by exporters whose --action.allow names it, for
    whoever has their token.
    """
    return act("terminate", options)


def _examples(name: str) -> str:
    return _ACT.format(name=name, query=_QUERY)
