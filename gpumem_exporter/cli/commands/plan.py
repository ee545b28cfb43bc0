"""`plan`: the toolkit's `gpumem-plan`."""

from __future__ import annotations

from typing import TYPE_CHECKING

from gpumem_client.wire.errors import ConfigurationError

if TYPE_CHECKING:
    import typer


def build(name: str) -> typer.Typer:
    """Return the command.

    Raises:
        ConfigurationError: the toolkit is not installed.
    """
    try:
        from gpumem_toolkit.planning import command
    except ModuleNotFoundError as error:
        raise ConfigurationError(
            "`plan` is part of gpumem-toolkit, which is not installed; install its wheel of this version"
        ) from error
    return command.build(name)
