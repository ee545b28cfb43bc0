"""The commands that Typer parses: which module each lives in, and how Typer's own complaints are told.

Only the module of the command that was asked for is imported, because what a command needs is what its start costs.
"""

from __future__ import annotations

import importlib
import io
import sys
from collections.abc import Sequence
from typing import cast

import typer

from gpumem_exporter.cli.commands.run import SUMMARY as RUN_SUMMARY
from gpumem_exporter.cli.main import COMMANDS, INTERRUPTED, PROGRAM, WRONG_USAGE
from gpumem_exporter.errors import ConfigurationError

__all__ = ["build", "invoke"]

_EXAMPLES = """\b
Examples:
  gpumem-exporter serve                               # on a node with GPUs
  gpumem-exporter serve --demo                        # anywhere: simulated devices and processes
  gpumem-exporter run -- python train.py              # report without a code change
  gpumem-exporter info                                # where every byte is
  gpumem-exporter top                                 # the same, live
  gpumem-exporter clear --gpu 0                       # give cached memory back
  gpumem-exporter plan train:make_model --input 'float32[B,3,224,224]' --gpu 80GiB
  gpumem-exporter doctor                              # what is wrong, and what mends it

\b
Exit codes: 0 done; 1 the thing asked for failed; 2 wrong usage or configuration.
"""

_MODULES = {name: f"gpumem_exporter.cli.commands.{name.replace('-', '_')}" for name in COMMANDS if name != "run"}

_PARAMETER_ERROR = cast(type[Exception], typer.BadParameter.__mro__[2])
"""The root of what Typer raises for wrong usage. Its module has moved with Typer's releases, its place has not."""


def invoke(words: Sequence[str]) -> int:
    """Run the command that the words name and return its exit code.

    Raises:
        ConfigurationError: the words are not what the command takes; names what is wrong.
        GpumemError: what the command asked for failed.
    """
    if isinstance(sys.stdout, io.TextIOWrapper):
        # A terminal that lacks a character shows another; it is no reason to end in a traceback.
        sys.stdout.reconfigure(errors="replace")
    name = words[0] if words and words[0] in COMMANDS else None
    command = typer.main.get_command(build(name))
    try:
        code = command.main(args=list(words), prog_name=PROGRAM, standalone_mode=False)
    except typer.Abort:
        return INTERRUPTED
    except _PARAMETER_ERROR as error:
        message = getattr(error, "format_message", error.__str__)()
        context = getattr(error, "ctx", None)
        # An option without its argument is told before there is a context.
        command_path = context.command_path if context else f"{PROGRAM} {name or ''}".rstrip()
        raise ConfigurationError(_complaint(message, command_path)) from error
    return int(code or 0)


def build(name: str | None = None) -> typer.Typer:
    """The application with one command, or with all of them."""
    application = typer.Typer(
        add_completion=False,
        pretty_exceptions_enable=False,
        rich_markup_mode=None,
        context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
    )

    @application.callback(epilog=_EXAMPLES)
    def _root(
        version: bool = typer.Option(False, "--version", help="Show the version and exit."),
    ) -> None:
        """Where every byte of GPU memory went in PyTorch processes, and a way to give it back."""

    for listed in COMMANDS if name is None else (name,):
        if listed == "run":
            application.command("run", help=RUN_SUMMARY)(_run)
        else:
            importlib.import_module(_MODULES[listed]).register(application)
    return application


def _run() -> int:
    """Stand in the list of commands; the console script hands `run` to its own module before Typer is imported."""
    return WRONG_USAGE


def _complaint(message: str, command: str) -> str:
    return f"{message.rstrip('.')}; see {command} --help"
