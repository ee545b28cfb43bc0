"""What all commands share, `serve` too: the exporter and the token of a command, --quiet, and errors of usage.

Apart from `options`, so that `serve` starts without the options and the tables of the other commands.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from gpumem_client.wire.errors import ConfigurationError
from gpumem_client.wire.http import exporter_urls as default_urls
from gpumem_client.wire.http import full_url
from gpumem_client.wire.trust import Trust
from gpumem_exporter.cli.api_client import ExporterApi
from gpumem_exporter.cli.program import one_line
from gpumem_exporter.core.spelling import did_you_mean

if TYPE_CHECKING:
    from gpumem_exporter.cli.kube import Forward

_QUIET = "gpumem_exporter.quiet"


def use_exporter(context: click.Context, option: click.Parameter, given: str | None) -> str | None:
    """Keep --url or --kube, before or after the command, until the command ends."""
    root = context.find_root()
    if given is not None:
        if root.obj is not None:
            raise ConfigurationError("--kube and --url both name the exporter; give one of them, once")
        root.obj = given
        if option.name == "kube":
            from gpumem_exporter.cli.kube import Forward

            root.obj = Forward(given)
            root.call_on_close(root.obj.close)
    return given


def named_exporter() -> str | Forward | None:
    """Return the value of --url, or the port of --kube; None without both."""
    named: str | Forward | None = click.get_current_context().find_root().obj
    return named


def kube_forward() -> Forward | None:
    """Return the port of --kube; None without --kube."""
    named = named_exporter()
    return None if isinstance(named, str) else named


def exporter_urls() -> Iterable[str]:
    """Return the addresses to try, in order. With --kube, to read them takes until kubectl has connected."""
    named = named_exporter()
    if isinstance(named, str):
        return (full_url(named),)
    return default_urls(os.environ) if named is None else (each.url for each in (named,))


def api_opener(token_file: str | None) -> Callable[..., ExporterApi]:
    """Return what opens the API at some addresses, also in threads, which have no context of click."""
    # Over --kube, kubectl of this user needs no certificate.
    trust = replace(Trust.from_environment(), own_tunnel=kube_forward() is not None)
    return partial(ExporterApi, token=action_token(token_file), trust=trust)


def open_api(token_file: str | None, **options: Any) -> ExporterApi:
    """Return the API of the exporter that --url, --kube or the environment names."""
    return api_opener(token_file)(exporter_urls(), **options)


def action_token(token_file: str | None, environ: Mapping[str, str] = os.environ) -> str:
    """Return the token for actions, or an empty string if there is none: from --token-file, else the environment."""
    token = environ.get("GPUMEM_ACTION_TOKEN", "").strip()
    if token and not token_file:
        return _checked_token(token, "GPUMEM_ACTION_TOKEN")
    path = token_file or environ.get("GPUMEM_ACTION_TOKEN_FILE", "").strip()
    return read_token(path) if path else ""


def read_token(path: str) -> str:
    """Read the token in a file, which has nothing else."""
    try:
        token = Path(path).read_text(encoding="utf-8").strip()
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "the file is not UTF-8 text"
        raise ConfigurationError(f"token file {path}: {reason}; give a readable file with --token-file") from error
    return _checked_token(token, f"token file {path}")


def _checked_token(token: str, source: str) -> str:
    """The token if a header can carry it. The message must not show the token."""
    if not token or not (token.isascii() and token.isprintable()) or " " in token:
        raise ConfigurationError(f"{source}: expected one token of printable ASCII characters without blanks")
    return token


quiet_option = click.option(
    "-q",
    "--quiet",
    is_flag=True,
    is_eager=True,
    expose_value=False,
    callback=lambda context, _option, quiet: context.meta.update({_QUIET: True} if quiet else {}),
    help="Show only the result and errors.",
)


def is_quiet() -> bool:
    """Return whether the command has --quiet."""
    context = click.get_current_context(silent=True)
    return context is not None and _QUIET in context.meta


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
