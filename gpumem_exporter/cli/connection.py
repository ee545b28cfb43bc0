"""The exporter and the token of a command, from its options and the environment."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from gpumem_client.wire.errors import ConfigurationError
from gpumem_client.wire.http import exporter_urls as default_urls
from gpumem_client.wire.http import full_url
from gpumem_client.wire.trust import Trust
from gpumem_exporter.cli.api_client import ExporterApi

if TYPE_CHECKING:
    from gpumem_exporter.cli.kube import Forward


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


def exporter_trust() -> Trust:
    """Return which servers receive the token: over --kube, kubectl of this user needs no certificate."""
    return replace(Trust.from_environment(), own_tunnel=kube_forward() is not None)


def open_api(token_file: str | None, **options: Any) -> ExporterApi:
    """Return the API of the exporter that --url, --kube or the environment names."""
    return ExporterApi(exporter_urls(), token=action_token(token_file), trust=exporter_trust(), **options)


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
