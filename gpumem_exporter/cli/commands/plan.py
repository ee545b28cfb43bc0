"""`plan`: the toolkit's `gpumem-plan`, which parses its own options."""

from __future__ import annotations

import typer

from gpumem_client.wire.errors import ConfigurationError
from gpumem_exporter.cli.options import new_application
from gpumem_exporter.cli.program import PROGRAM


def build(name: str) -> typer.Typer:
    """Return the command."""
    application = new_application()
    every_word = {"ignore_unknown_options": True, "allow_extra_args": True, "allow_interspersed_args": False}

    @application.command(name, context_settings=every_word, add_help_option=False)
    def _plan(context: typer.Context) -> int:
        """Predict the GPU memory of a training job before it runs."""
        try:
            from gpumem_toolkit.planning.command import main
        except ModuleNotFoundError as error:
            if error.name != "gpumem_toolkit":
                raise
            raise ConfigurationError(
                "`plan` is part of gpumem-toolkit, which is not installed; install its wheel of this version"
            ) from error
        return main(context.args, f"{PROGRAM} {name}")

    return application
