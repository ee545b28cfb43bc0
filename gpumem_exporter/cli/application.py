"""The Typer application: every command, each imported when it is used.

A command's module has `build(name)`, which returns a Typer application with that command.
"""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from difflib import get_close_matches
from typing import Any

import typer
from typer.core import TyperGroup

from gpumem_client.wire.errors import ConfigurationError
from gpumem_exporter.cli.options import new_application
from gpumem_exporter.cli.program import COMMANDS, INTERRUPTED, PROGRAM

__all__ = ["invoke"]

_EXAMPLES = """\b
Examples:
  gpumem-exporter serve                               # on a node with GPUs
  gpumem-exporter serve --demo                        # anywhere: simulated devices and processes
  gpumem-exporter run -- python train.py              # report without a code change
  gpumem-exporter info                                # where every byte is
  gpumem-exporter top                                 # the same, live
  gpumem-exporter clear --gpu 0                       # release cached memory
  gpumem-exporter plan train:make_model --input 'float32[B,3,224,224]' --gpu 80GiB
  gpumem-exporter doctor                              # what is wrong and how to fix it

\b
Exit codes: 0 done; 1 the request failed; 2 wrong usage or configuration.
"""


def invoke(words: Sequence[str]) -> int:
    """Run a command and return its exit code.

    Args:
        words: the command and its arguments.

    Raises:
        ConfigurationError: wrong usage; the message names the invalid word or option.
        GpumemError: the command failed.
    """
    try:
        return int(typer.main.get_command(_build()).main(list(words), PROGRAM, standalone_mode=False) or 0)
    except typer.Abort:
        return INTERRUPTED
    except Exception as error:
        # Typer exports only one of its usage errors, but all of them have this method.
        if not hasattr(error, "format_message"):
            raise
        raise ConfigurationError(_with_hint(error, words)) from error


def _build() -> typer.Typer:
    application = new_application(cls=_Commands)

    @application.callback(epilog=_EXAMPLES)
    def _root(
        _version: bool = typer.Option(False, "--version", help="Show the version and exit."),
    ) -> None:
        """Show where every byte of GPU memory is in PyTorch processes, and release it."""
        # The console script handles --version before it imports Typer.

    return application


class _Commands(TyperGroup):
    """Imports the module of a command when the command is looked up."""

    def list_commands(self, ctx: Any) -> list[str]:  # noqa: ARG002 - the signature of Click
        """Return the names in the order of the help."""
        return list(COMMANDS)

    def get_command(self, ctx: Any, cmd_name: str) -> Any:  # noqa: ARG002 - the signature of Click
        """Return a command.

        Raises:
            ConfigurationError: there is no such command.
        """
        module = COMMANDS.get(cmd_name)
        if module is None:
            raise ConfigurationError(_unknown(cmd_name))
        return typer.main.get_command(importlib.import_module(module).build(cmd_name))


def _unknown(word: str) -> str:
    close = get_close_matches(word, COMMANDS, n=1)
    hint = f"did you mean {close[0]!r}?" if close else f"the commands are {', '.join(COMMANDS)}"
    return f"no command {word!r}; {hint}"


def _with_hint(error: Any, words: Sequence[str]) -> str:
    """Typer's message, and the command whose help to read."""
    context = getattr(error, "ctx", None)
    name = words[0] if words and words[0] in COMMANDS else ""
    command = context.command_path if context else f"{PROGRAM} {name}".rstrip()
    return f"{error.format_message().rstrip('.')}; see {command} --help"
