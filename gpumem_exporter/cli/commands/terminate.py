"""`terminate`: end processes that hold GPU memory."""

from __future__ import annotations

import typer

from gpumem_exporter.cli.action_requests import ActionOptions, ask
from gpumem_exporter.cli.options import with_options

__all__ = ["register"]

_EXAMPLES = """\b
Examples:
  gpumem-exporter terminate --pid 4711 --dry-run
  gpumem-exporter terminate --pid 4711 --reason "left behind by job 17"
"""


def register(application: typer.Typer) -> None:
    """Add the command."""
    application.command("terminate", epilog=_EXAMPLES)(with_options(ActionOptions)(terminate))


def terminate(options: ActionOptions) -> int:
    """End processes: SIGTERM, ten seconds, SIGKILL.

    Only processes that the driver lists on a device or that report, and only where `serve --action.allow` names
    terminate. The exporter sends the signals: it can end what its own user may. It must know who asks: over its unix
    socket, or with the token of --action.token-file.
    """
    return ask("terminate", options)
