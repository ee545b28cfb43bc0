"""`run`: the client's `gpumem-run`. This module is for the help: the console script calls the client directly."""

from __future__ import annotations

from typing import TYPE_CHECKING

from gpumem_client.run import SUMMARY, run
from gpumem_exporter.cli.options import command_from_parameters

if TYPE_CHECKING:
    import typer


def build(name: str) -> typer.Typer:
    """Return the entry of the help."""
    return command_from_parameters(name, lambda _: run([]), [], description=SUMMARY)
