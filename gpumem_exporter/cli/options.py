"""The options that several commands share, and what their values mean: exporter, token, target and action.

A decorator such as `target_options` adds a group of options to a command, in the order of its help.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import click

from gpumem_client.wire.errors import ConfigurationError
from gpumem_exporter.actions.request import (
    DEFAULT_DEADLINE_SECONDS,
    SELECTORS,
    ActionRequest,
    Target,
    invalid_fields,
)
from gpumem_exporter.cli.api_client import ExporterApi

ANSWER_GRACE_SECONDS = 10.0
"""How long after its deadline an action that started in time may still run."""

_SETTLE_SECONDS = 10.0
"""The settling time of a clear on a terminal."""

_Command = TypeVar("_Command", bound=Callable[..., Any])
_FIELDS = {"deadline_seconds": "--deadline", "settle_seconds": "--settle", "fraction": "F", "collect_garbage": "--gc"}
"""The options whose names differ from the fields of a request."""


def option_group(*options: Callable[[Any], Any]) -> Callable[[_Command], _Command]:
    """Return a decorator that adds several options or arguments to a command."""

    def decorate(command: _Command) -> _Command:
        for option in reversed(options):
            command = option(command)
        return command

    return decorate


access_options = option_group(
    click.option(
        "--token-file",
        metavar="PATH",
        help="File with the token for actions. Default: GPUMEM_ACTION_TOKEN_FILE. GPUMEM_ACTION_TOKEN is the token "
        "itself.",
    ),
    click.option("--json", "as_json", is_flag=True, help="Print JSON with sizes in bytes."),
)
"""The token of a command, and the form of its output."""

connection_options = option_group(
    click.option(
        "--url",
        metavar="URL",
        help="The exporter: http://host:port, https://host:port or unix:///path/to.sock. user:password@ before the "
        "host is basic auth. Default: GPUMEM_EXPORTER_URL, else unix:///run/gpumem/exporter.sock, then "
        "http://127.0.0.1:9844.",
    ),
    access_options,
)


def exporter_urls(url: str | None, environ: Mapping[str, str] = os.environ) -> tuple[str, ...]:
    """Return the addresses to try, in order."""
    if url is not None:
        return (url,)
    from gpumem_client.reporter.settings import exporter_urls as urls_of

    return urls_of(environ)


def action_token(token_file: str | None, environ: Mapping[str, str] = os.environ) -> str:
    """Return the token for actions, or an empty string if there is none: from --token-file, else the environment.

    Raises:
        ConfigurationError: the file cannot be read, or does not contain one token.
    """
    if not token_file:
        token = environ.get("GPUMEM_ACTION_TOKEN", "").strip()
        if token:
            return _checked_token(token, "GPUMEM_ACTION_TOKEN")
        token_file = environ.get("GPUMEM_ACTION_TOKEN_FILE", "").strip()
    return read_token(token_file) if token_file else ""


def open_api(url: str | None, token_file: str | None) -> ExporterApi:
    """Return the API of the exporter that `connection_options` name."""
    return ExporterApi(exporter_urls(url), token=action_token(token_file))


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


def interval_option(default: float) -> Callable[[_Command], _Command]:
    """Return the option --interval of a live view."""
    return click.option(
        "--interval",
        "interval_seconds",
        metavar="SECONDS",
        default=default,
        show_default=True,
        callback=_checked_interval,
        help="Seconds between updates: 0.2 to 3600.",
    )


def _checked_interval(_context: click.Context, _option: click.Parameter, seconds: float) -> float:
    if not 0.2 <= seconds <= 3600:
        raise ConfigurationError(f"--interval {seconds:g}: must be 0.2 to 3600 seconds")
    return seconds


target_options = option_group(
    click.option("--gpu", multiple=True, metavar="INDEX", help="Processes on these devices: 0, or 0:1 for MIG."),
    click.option("--uuid", multiple=True, metavar="UUID", help="Processes on these devices: GPU-… or MIG-…."),
    click.option("--pid", multiple=True, metavar="PID", help="These processes, as `info` lists them."),
    click.option("--workload", multiple=True, metavar="NAME", help="Processes of these workloads."),
    click.option("--rank", multiple=True, metavar="RANK", help="Processes of these ranks."),
    click.option("--user", multiple=True, metavar="USER", help="Processes of these users: names or uids."),
    click.option("--all", is_flag=True, help="Every process; an action reaches those that report."),
)
"""The processes that a command acts on or shows. Each is repeatable and takes a list: --gpu 0 --gpu 1 is --gpu 0,1."""


def pop_target(values: dict[str, Any]) -> Target:
    """Remove the values of `target_options` from `values`. Return the target; without a field it selects all processes.

    Raises:
        ConfigurationError: a value is invalid, or `--all` contradicts another option.
    """
    everything = values.pop("all")
    given: dict[str, Any] = {name: _split(texts) for name in SELECTORS if (texts := values.pop(name))}
    if everything and given:
        names = ", ".join(f"--{name}" for name in given)
        raise ConfigurationError(f"--all selects every process; leave out --all or {names}")
    checked_request({"action": "empty_cache", "target": given or {"all": True}})
    return Target(**given, all=everything)


def _split(texts: Sequence[str]) -> list[str]:
    """The values of a repeatable option, each of which may be a list with commas: `0,1` and `7`."""
    return [part.strip() for text in texts for part in text.split(",")]


_request_options = option_group(
    click.option("--dry-run", is_flag=True, help="Show what would happen. Change nothing."),
    click.option(
        "--deadline",
        "deadline_seconds",
        metavar="SECONDS",
        default=DEFAULT_DEADLINE_SECONDS,
        show_default=True,
        help="A process that has not started the action by then does not run it.",
    ),
    click.option("--reason", metavar="TEXT", default="", help="Recorded in the audit log."),
)
_mode_options = option_group(
    click.option(
        "--mode",
        metavar="MODE",
        help="When the process acts. now: at once, on the reporter's thread. step: in the training thread, at the end "
        "of a step. idle: while no step runs and nothing is allocated. Default: now; step with --group.",
    ),
    click.option("--group", is_flag=True, help="All ranks of the workload act after the same step, or none does."),
)
_force_option = click.option(
    "--force", is_flag=True, help="Do not wait for an inference engine that starts on the GPU; its start may fail."
)

ACTION_OPTIONS: Mapping[str, Callable[[Any], Any]] = {
    "empty_cache": option_group(
        _force_option,
        click.option(
            "--gc",
            "collect_garbage",
            is_flag=True,
            help="Run Python's garbage collector first, which also runs finalizers of user code.",
        ),
        click.option(
            "--settle",
            "settle_seconds",
            type=float,
            metavar="SECONDS",
            help="Measure after this time how much of the freed memory is still free; 0 does not. Default: "
            f"{_SETTLE_SECONDS:g} on a terminal, otherwise 0.",
        ),
        _mode_options,
        _request_options,
    ),
    **dict.fromkeys(("collect_garbage", "reset_peak", "snapshot"), option_group(_mode_options, _request_options)),
    "set_memory_fraction": option_group(
        click.argument("fraction", type=float, metavar="F"),
        click.option(
            "--force", is_flag=True, help="Cap also a process that has reserved more. Its next new segment fails."
        ),
        _mode_options,
        _request_options,
    ),
    "terminate": option_group(_force_option, _request_options),
}
"""The options of each action. Their values have the names of a request's fields."""


def action_request(action: str, values: Mapping[str, Any], *, on_terminal: bool) -> dict[str, Any]:
    """Return the request of an action, without its target, from the values of its options.

    Raises:
        ConfigurationError: a value is invalid, or options contradict each other.
    """
    request = {"action": action, **values}
    if "mode" in request:
        request["mode"] = request["mode"] or ("step" if request["group"] else "now")
    if "settle_seconds" in request:
        default = _SETTLE_SECONDS if on_terminal and not request["dry_run"] else None
        settle_seconds = request.pop("settle_seconds")
        if settle_seconds := default if settle_seconds is None else settle_seconds:
            request["settle_seconds"] = settle_seconds
    return checked_request(request)


def checked_request(document: dict[str, Any]) -> dict[str, Any]:
    """Return a request; one without a target is checked as if it had every process.

    Raises:
        ConfigurationError: a value is invalid, or options contradict each other.
    """
    target = Target(**document.get("target", {"all": True}))
    for invalid in invalid_fields(ActionRequest(**{**document, "target": target})):
        name = invalid.field.removeprefix("target.")
        option = _FIELDS.get(name, f"--{name}")
        raise ConfigurationError(f"invalid {option} {invalid.value}: expected {invalid.expected}")
    return document
