"""`plan`: the command of gpumem-toolkit, which parses its words itself."""

from __future__ import annotations

import click

from gpumem_client.wire.errors import ConfigurationError
from gpumem_exporter.cli.program import PROGRAM


@click.command(
    context_settings={"ignore_unknown_options": True, "allow_interspersed_args": False}, add_help_option=False
)
@click.argument("words", nargs=-1, type=click.UNPROCESSED)
def plan(words: tuple[str, ...]) -> int:
    """Predict the GPU memory of a training job before it runs."""
    try:
        from gpumem_toolkit.planning.command import main
    except ModuleNotFoundError as error:
        if not (error.name or "").startswith("gpumem_toolkit"):
            raise
        raise ConfigurationError(
            "`plan` is part of gpumem-toolkit, which is not installed; install its wheel of this version"
        ) from error
    return main(words, f"{PROGRAM} plan")
