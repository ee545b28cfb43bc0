"""Options that several commands share, each written once, and the way a command takes them as one object."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import MISSING, Field, dataclass, fields
from inspect import Parameter, Signature
from pathlib import Path
from typing import Annotated, Any, TypeVar, get_type_hints

import typer

from gpumem_exporter.errors import ConfigurationError

__all__ = ["AccessOptions", "ConnectionOptions", "command_from", "read_token", "with_options"]

OptionsT = TypeVar("OptionsT")


@dataclass(frozen=True, kw_only=True)
class AccessOptions:
    """What lets a command in at an exporter, and how it answers."""

    token_file: Annotated[
        Path | None,
        typer.Option(
            "--token-file",
            metavar="PATH",
            help="File with the token that lets actions in. Default: GPUMEM_ACTION_TOKEN_FILE; "
            "GPUMEM_ACTION_TOKEN is the token itself.",
        ),
    ] = None
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON, sizes in bytes.")] = False

    def token(self, environ: Mapping[str, str] = os.environ) -> str:
        """The token for actions, empty where none is given: option, else environment.

        Raises:
            ConfigurationError: the file cannot be read, or holds no token.
        """
        named = str(self.token_file) if self.token_file is not None else ""
        if not named:
            token = environ.get("GPUMEM_ACTION_TOKEN", "").strip()
            if token:
                return _header_safe(token, "GPUMEM_ACTION_TOKEN")
            named = environ.get("GPUMEM_ACTION_TOKEN_FILE", "").strip()
        return read_token(named) if named else ""


@dataclass(frozen=True, kw_only=True)
class ConnectionOptions(AccessOptions):
    """How a command reaches the exporter."""

    url: Annotated[
        str | None,
        typer.Option(
            "--url",
            metavar="URL",
            help="The exporter: http://host:port, https://host:port or unix:///path/to.sock; user:password@ before the "
            "host is basic auth. Default: GPUMEM_EXPORTER_URL, else first unix:///run/gpumem/exporter.sock, then "
            "http://127.0.0.1:9844.",
        ),
    ] = None

    def urls(self, environ: Mapping[str, str] = os.environ) -> tuple[str, ...]:
        """The addresses to try, in order."""
        if self.url is not None:
            return (self.url,)
        from gpumem_exporter.client.reporter.settings import exporter_urls

        return exporter_urls(environ)


def read_token(path: str) -> str:
    """The token that a file holds.

    Raises:
        ConfigurationError: the file cannot be read, or holds no token.
    """
    try:
        token = Path(path).read_text(encoding="utf-8").strip()
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not UTF-8 text"
        raise ConfigurationError(f"token file {path}: {reason}") from error
    if not token:
        raise ConfigurationError(f"token file {path} is empty; it must hold the token alone")
    return _header_safe(token, f"token file {path}")


def _header_safe(token: str, source: str) -> str:
    if not (token.isascii() and token.isprintable()) or " " in token:
        raise ConfigurationError(f"{source} must hold one token of printable ASCII without blanks")
    return token


def with_options(options: type[OptionsT]) -> Callable[[Callable[[OptionsT], int]], Callable[..., int]]:
    """Give a command the fields of a dataclass as options; the command takes the one object.

    Each field is `name: Annotated[type, typer.Option(...)] = default`.
    """
    hints = get_type_hints(options, include_extras=True)
    owners = {
        name: place for place, base in enumerate(options.__mro__) for name in getattr(base, "__annotations__", ())
    }
    parameters = [
        Parameter(item.name, Parameter.KEYWORD_ONLY, default=_default(item), annotation=hints[item.name])
        # What a command alone takes stands before what it shares with others.
        for item in sorted(fields(options), key=lambda item: owners[item.name])  # type: ignore[arg-type]
    ]

    def decorate(command: Callable[[OptionsT], int]) -> Callable[..., int]:
        return command_from(parameters, lambda values: command(options(**values)), command.__doc__)

    return decorate


def command_from(
    parameters: list[Parameter], command: Callable[[dict[str, Any]], int], description: str | None
) -> Callable[..., int]:
    """A function that Typer reads as one with these parameters, and that hands their values over as a mapping."""

    def typed(**values: Any) -> int:
        return command(values)

    typed.__doc__ = description
    typed.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    typed.__signature__ = Signature(parameters)  # type: ignore[attr-defined]
    return typed


def _default(item: Field[Any]) -> Any:
    return Parameter.empty if item.default is MISSING else item.default
