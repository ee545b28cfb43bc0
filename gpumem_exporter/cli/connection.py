"""The exporter and the token of a command, from its options and the environment."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import click

from gpumem_client.wire.errors import ConfigurationError
from gpumem_client.wire.http import exporter_urls as default_urls
from gpumem_client.wire.http import full_url
from gpumem_client.wire.trust import Trust

if TYPE_CHECKING:
    from gpumem_exporter.cli.kube import Forward

_URL = "gpumem_exporter.url"


def kube_forward() -> Forward | None:
    """Return the port of --kube; None without --kube."""
    context = click.get_current_context(silent=True)
    return context.find_root().obj if context is not None else None


def use_kube(context: click.Context, _option: click.Parameter, target: str | None) -> str | None:
    """Reach the exporter of a node or pod, until the command ends: --kube, before or after the command."""
    if target is None:
        return None
    root = context.find_root()
    if root.obj is not None:
        raise ConfigurationError("--kube is given twice")
    from gpumem_exporter.cli.kube import Forward, Kubectl

    root.obj = Forward(Kubectl.from_environment(), target)
    root.call_on_close(root.obj.close)
    return target


def use_url(context: click.Context, _option: click.Parameter, url: str | None) -> str | None:
    """Return the value of --url, before or after the command. Raises ConfigurationError for both."""
    given = context.find_root().meta
    if url is not None:
        if _URL in given:
            raise ConfigurationError("--url is given twice")
        given[_URL] = url
    found: str | None = given.get(_URL)
    return found


def exporter_urls(url: str | None, environ: Mapping[str, str] = os.environ) -> Iterable[str]:
    """Return the addresses to try, in order. With --kube, to read them takes until kubectl has connected."""
    forward = kube_forward()
    if forward is not None:
        if url is not None:
            raise ConfigurationError("--kube and --url both name the exporter; give one of them")
        return (each.url for each in (forward,))
    return (full_url(url),) if url is not None else default_urls(environ)


def exporter_trust() -> Trust:
    """Return which servers receive the token: over --kube, kubectl of this user needs no certificate."""
    return replace(Trust.from_environment(), own_tunnel=kube_forward() is not None)


def action_token(token_file: str | None, environ: Mapping[str, str] = os.environ) -> str:
    """Return the token for actions, or an empty string if there is none: from --token-file, else the environment."""
    if not token_file:
        token = environ.get("GPUMEM_ACTION_TOKEN", "").strip()
        if token:
            return _checked_token(token, "GPUMEM_ACTION_TOKEN")
        token_file = environ.get("GPUMEM_ACTION_TOKEN_FILE", "").strip()
    return read_token(token_file) if token_file else ""


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
