"""What all commands share, `serve` too: the group, click's errors as one plain line, --quiet.

Apart from `options`, so that `serve` starts without the options and the tables of the other commands.
"""

from __future__ import annotations

import sys

import click

from gpumem_client.wire.errors import ConfigurationError
from gpumem_exporter.cli.program import one_line
from gpumem_exporter.core.spelling import did_you_mean

_QUIET = "gpumem_exporter.quiet"


def _set_quiet(context: click.Context, _option: click.Parameter, quiet: bool) -> None:
    context.meta[_QUIET] = quiet or context.meta.get(_QUIET, False)


quiet_option = click.option(
    "-q",
    "--quiet",
    is_flag=True,
    is_eager=True,
    expose_value=False,
    callback=_set_quiet,
    help="Show only the result and errors.",
)


def is_quiet() -> bool:
    """Return whether the command has --quiet."""
    context = click.get_current_context(silent=True)
    return context is not None and bool(context.meta.get(_QUIET))


def note(text: str) -> None:
    """Print one line about the progress of a command to stderr, unless it has --quiet."""
    if not is_quiet():
        print(one_line(text), file=sys.stderr, flush=True)


class CommandGroup(click.Group):
    """A group whose commands stay in the order of their definition; a mistyped command is an error with the nearest."""

    def list_commands(self, ctx: click.Context) -> list[str]:  # noqa: ARG002 - the signature of click
        """Return the names in the order of the help."""
        return list(self.commands)

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        """Return the command of the words. Raises ConfigurationError if there is no such command."""
        if not ctx.resilient_parsing and args[0][:1] != "-" and self.get_command(ctx, args[0]) is None:
            names = self.list_commands(ctx)
            advice = did_you_mean(args[0], names) or f"the commands are {', '.join(names)}"
            raise ConfigurationError(f"no command {args[0]!r}; {advice}")
        return super().resolve_command(ctx, args)


def usage_text(error: click.UsageError) -> str:
    """Return what is wrong and what is accepted, in the words of click."""
    if isinstance(error, click.NoSuchOption):
        name = error.option_name
        return f"no option {name}; {did_you_mean(name, error.possibilities or ())}".removesuffix("; ")
    text = error.format_message().rstrip(".")
    return text[:1].lower() + text[1:]
