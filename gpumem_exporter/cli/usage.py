"""What all commands share, `serve` too: the group, click's errors as one plain line in this project's words, --quiet.

Apart from `options`, so that `serve` starts without the options and the tables of the other commands.
"""

from __future__ import annotations

import re
import sys
from typing import Any

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
    """Return what is wrong and what is accepted. click's own texts speak of types and arguments."""
    context, name = error.ctx, getattr(error, "option_name", None)
    if isinstance(error, click.NoSuchOption):
        return f"no option {name}; {did_you_mean(name or '', error.possibilities or ())}".removesuffix("; ")
    if isinstance(error, click.BadOptionUsage):
        return f"{name} takes no value" if "does not take" in error.message else f"{name} needs a value"
    if isinstance(error, click.MissingParameter) and error.param is not None:
        return f"{_flag(error.param)} is required"
    if isinstance(error, click.BadParameter) and error.param is not None:
        value = error.message.partition(" is not ")[0]
        return f"invalid {_flag(error.param)} {value}: expected {_expected(error.param.type)}"
    if extra := re.fullmatch(r"Got unexpected extra arguments? \((.*)\)", error.message.rstrip(".")):
        return f"unexpected {extra[1]!r}"
    if context is not None and isinstance(context.command, click.Group):
        return f"no command; give one of {', '.join(context.command.list_commands(context))}"
    return error.format_message().rstrip(".")


def _flag(parameter: click.Parameter) -> str:
    return parameter.opts[0] if isinstance(parameter, click.Option) else parameter.metavar or str(parameter.name)


def _expected(kind: Any) -> str:
    if isinstance(kind, click.Choice):
        return ", ".join(map(str, kind.choices))
    if isinstance(kind, click.IntRange):
        return f"a whole number from {kind.min}" + ("" if kind.max is None else f" to {kind.max}")
    known = {"integer": "a whole number", "float": "a number", "duration": "seconds, or a time such as 30s, 5m or 1h"}
    return known.get(kind.name, f"a {kind.name}")
