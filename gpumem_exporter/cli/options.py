"""Options that several commands share, and functions that build a Typer command from groups of options."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import MISSING, dataclass, fields
from inspect import Parameter, Signature
from pathlib import Path
from typing import Annotated, Any, get_type_hints

import typer

from gpumem_client.wire.errors import ConfigurationError

__all__ = [
    "AccessOptions",
    "ConnectionOptions",
    "checked_interval",
    "comma_separated",
    "command_from_options",
    "command_from_parameters",
    "new_application",
    "read_token",
]


@dataclass(frozen=True, kw_only=True)
class AccessOptions:
    """The token of a command, and the form of its output."""

    token_file: Annotated[
        Path | None,
        typer.Option(
            "--token-file",
            metavar="PATH",
            help="File with the token for actions. Default: GPUMEM_ACTION_TOKEN_FILE. "
            "GPUMEM_ACTION_TOKEN is the token itself.",
        ),
    ] = None
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON with sizes in bytes.")] = False

    def token(self, environ: Mapping[str, str] = os.environ) -> str:
        """Return the token for actions, or an empty string if there is none: from the option, else the environment.

        Raises:
            ConfigurationError: the file cannot be read, or does not contain one token.
        """
        path = str(self.token_file) if self.token_file is not None else ""
        if not path:
            token = environ.get("GPUMEM_ACTION_TOKEN", "").strip()
            if token:
                return _checked_token(token, "GPUMEM_ACTION_TOKEN")
            path = environ.get("GPUMEM_ACTION_TOKEN_FILE", "").strip()
        return read_token(path) if path else ""


@dataclass(frozen=True, kw_only=True)
class ConnectionOptions(AccessOptions):
    """The address of the exporter."""

    url: Annotated[
        str | None,
        typer.Option(
            "--url",
            metavar="URL",
            help="The exporter: http://host:port, https://host:port or unix:///path/to.sock. user:password@ before the "
            "host is basic auth. Default: GPUMEM_EXPORTER_URL, else unix:///run/gpumem/exporter.sock, then "
            "http://127.0.0.1:9844.",
        ),
    ] = None

    def urls(self, environ: Mapping[str, str] = os.environ) -> tuple[str, ...]:
        """Return the addresses to try, in order."""
        if self.url is not None:
            return (self.url,)
        from gpumem_client.reporter.settings import exporter_urls

        return exporter_urls(environ)


def read_token(path: str) -> str:
    """Read the token in a file.

    Raises:
        ConfigurationError: the file cannot be read, or does not contain one token.
    """
    try:
        token = Path(path).read_text(encoding="utf-8").strip()
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "the file is not UTF-8 text"
        raise ConfigurationError(f"token file {path}: {reason}") from error
    return _checked_token(token, f"token file {path}")


def _checked_token(token: str, source: str) -> str:
    """The token if a header can carry it. The message must not show the token."""
    if not token or not (token.isascii() and token.isprintable()) or " " in token:
        raise ConfigurationError(f"{source}: expected one token of printable ASCII characters without blanks")
    return token


def comma_separated(values: Sequence[str]) -> tuple[str, ...]:
    """Return the values of a repeatable option, each of which may be a list with commas: `0,1` and `7`."""
    return tuple(part.strip() for value in values for part in value.split(","))


def checked_interval(seconds: float) -> float:
    """Return the value of --interval.

    Raises:
        ConfigurationError: the value is out of range.
    """
    if not 0.2 <= seconds <= 3600:
        raise ConfigurationError(f"--interval {seconds:g}: must be 0.2 to 3600 seconds")
    return seconds


def new_application(**settings: Any) -> typer.Typer:
    """Return an empty Typer application with the settings that all commands share."""
    return typer.Typer(
        add_completion=False,
        pretty_exceptions_enable=False,
        rich_markup_mode=None,
        context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
        **settings,
    )


def command_from_options(
    name: str,
    run: Callable[..., int],
    *groups: type[Any],
    description: str | None = None,
    epilog: str = "",
    application: typer.Typer | None = None,
) -> typer.Typer:
    """Return an application with a command whose options are the fields of some dataclasses.

    Args:
        name: the command's name.
        run: takes one instance of each group, in their order, and returns the exit code.
        groups: dataclasses whose fields are `name: Annotated[type, typer.Option(...)] = default`.
        description: the help text; the docstring of `run` by default.
        epilog: printed below the options.
        application: gets the command; a new one by default.
    """

    def run_with(values: dict[str, Any]) -> int:
        return run(*(group(**{item.name: values[item.name] for item in fields(group)}) for group in groups))

    parameters = [parameter for group in groups for parameter in _parameters(group)]
    description = description or run.__doc__
    return command_from_parameters(
        name, run_with, parameters, description=description, epilog=epilog, application=application
    )


def command_from_parameters(
    name: str,
    run: Callable[[dict[str, Any]], int],
    parameters: Sequence[Parameter],
    *,
    description: str | None,
    epilog: str = "",
    application: typer.Typer | None = None,
) -> typer.Typer:
    """Return an application with a command. `run` takes the values of the parameters by name."""

    def typed(**values: Any) -> int:
        return run(values)

    # Typer reads the parameters from the signature.
    typed.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    typed.__signature__ = Signature(list(parameters))  # type: ignore[attr-defined]
    application = application or new_application()
    application.command(name, help=description, epilog=epilog)(typed)
    return application


def _parameters(group: type[Any]) -> list[Parameter]:
    """One parameter for each field. A group's own fields come before those that it inherits."""
    hints = get_type_hints(group, include_extras=True)
    depths = {name: depth for depth, base in enumerate(group.__mro__) for name in getattr(base, "__annotations__", ())}
    parameters = []
    for item in sorted(fields(group), key=lambda item: depths[item.name]):
        default = Parameter.empty if item.default is MISSING else item.default
        parameters.append(Parameter(item.name, Parameter.KEYWORD_ONLY, default=default, annotation=hints[item.name]))
    return parameters
