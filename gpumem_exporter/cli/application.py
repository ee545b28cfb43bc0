"""The click application: every command, each imported when it is used.

A command's module has a function of the command's name, which is the click command.
"""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from difflib import get_close_matches

import click

from gpumem_client.wire.errors import ConfigurationError
from gpumem_exporter import __version__
from gpumem_exporter.cli.program import COMMANDS, PROGRAM

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

    Raises ConfigurationError for wrong usage, with the invalid word or option, and GpumemError if the command fails.
    """
    try:
        # Not click's `main`, which writes to stderr on Ctrl-C.
        with _application.make_context(PROGRAM, list(words)) as context:
            return int(_application.invoke(context) or 0)
    except click.exceptions.Exit as ended:
        return ended.exit_code
    except click.UsageError as error:
        # click gives no context if the value of an option is missing.
        command = error.ctx.command_path if error.ctx else f"{PROGRAM} {words[0]}"
        raise ConfigurationError(f"{error.format_message().rstrip('.')}; see {command} --help") from error


class _Commands(click.Group):
    """Imports the module of a command when the command is looked up."""

    def list_commands(self, ctx: click.Context) -> list[str]:  # noqa: ARG002 - the signature of click
        """Return the names in the order of the help."""
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command:  # noqa: ARG002 - the signature of click
        """Return a command. Raises ConfigurationError if there is no such command."""
        module = COMMANDS.get(cmd_name)
        if module is None:
            close = get_close_matches(cmd_name, COMMANDS, n=1)
            hint = f"did you mean {close[0]!r}?" if close else f"the commands are {', '.join(COMMANDS)}"
            raise ConfigurationError(f"no command {cmd_name!r}; {hint}")
        command: click.Command = getattr(importlib.import_module(module), cmd_name.replace("-", "_"))
        return command


@click.group(
    cls=_Commands,
    epilog=_EXAMPLES,
    no_args_is_help=False,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
)
@click.version_option(__version__, message="%(prog)s %(version)s")
def _application() -> None:
    """Show where every byte of GPU memory is in PyTorch processes, and release it."""
