"""The options that several commands share, and what their values mean: exporter, token, target and action.

A decorator such as `target_options` adds a group of options to a command, in the order of its help.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import wraps
from typing import Any, TypeVar

import click

from gpumem_client.wire.errors import ConfigurationError
from gpumem_exporter.actions.action_options import (
    GROUP_IS_DEPRECATED,
    OPTIONS,
    ORPHANS,
    SELECTORS,
    ActionRequest,
    RequestOption,
    Target,
    invalid_fields,
)
from gpumem_exporter.cli.completion import JOBS, of_list
from gpumem_exporter.cli.completion import SELECTORS as COMPLETIONS
from gpumem_exporter.cli.render.columns import SORTS
from gpumem_exporter.cli.render.layout import Order
from gpumem_exporter.cli.render.node_tables import View
from gpumem_exporter.cli.usage import note, open_api, quiet_option, use_exporter
from gpumem_exporter.core.spelling import did_you_mean

_SECONDS = {"s": 1, "m": 60, "h": 3600, "d": 86400}

_Command = TypeVar("_Command", bound=Callable[..., Any])


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
    quiet_option,
)
"""The token of a command, and the form of its output."""

connection_options = option_group(
    click.option(
        "--url",
        metavar="URL",
        expose_value=False,
        callback=use_exporter,
        help="The exporter: host:port, https://host:port or unix:///path/to.sock. user:password@ before the "
        "host is basic auth. Default: GPUMEM_EXPORTER_URL, else unix:///run/gpumem/exporter.sock, then "
        "http://127.0.0.1:9844.",
    ),
    click.option(
        "--kube",
        metavar="NODE|POD",
        expose_value=False,
        callback=use_exporter,
        help="The exporter of a node of Kubernetes. --url and --kube may also stand before the command.",
    ),
    access_options,
)


def api_options(command: Callable[..., int]) -> Callable[..., int]:
    """Add `connection_options` to a command, which receives the API of the exporter as `api`, and `as_json`."""

    @connection_options
    @wraps(command)
    def run(*, token_file: str | None, **values: Any) -> int:
        with open_api(token_file) as api:
            return command(api=api, **values)

    return run


def duration(text: object) -> float:
    """Return the seconds of `30`, `30s`, `5m`, `1h` or `2d`. Raises ValueError if the text is not a duration."""
    number, unit = str(text)[:-1], str(text)[-1:]
    return float(number) * _SECONDS[unit] if unit in _SECONDS else float(str(text))


class Seconds(click.FloatRange):
    """Seconds in a range, as `duration` reads them."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        """Return the seconds. Raises click.BadParameter if the value is invalid."""
        try:
            seconds = duration(value)
        except ValueError:
            seconds = math.nan
        if not math.isfinite(seconds):
            self.fail(f"{value}: expected seconds, or a time such as 30s, 5m or 1h", param, ctx)
        return super().convert(seconds, param, ctx)


def interval_option(default: float) -> Callable[[_Command], _Command]:
    """Return the option --interval of a live view."""
    return click.option(
        *("--interval", "interval_seconds"),
        type=Seconds(0.2, 3600),
        metavar="SECONDS",
        default=default,
        show_default=True,
        help="Seconds between updates.",
    )


target_options = option_group(
    *(
        click.option(
            selector.flag,
            multiple=True,
            metavar=selector.metavar,
            help=selector.description,
            shell_complete=COMPLETIONS[name],
        )
        for name, selector in SELECTORS.items()
    ),
    click.option(ORPHANS.flag, is_flag=True, help=ORPHANS.description),
    click.option("--all", is_flag=True, help="Every process; an action reaches the processes that report."),
)
"""The processes that a command acts on or shows. Each is repeatable and takes a list: --gpu 0 --gpu 1 is --gpu 0,1."""


def pop_target(values: dict[str, Any], *, required: bool = False) -> Target:
    """Remove the values of `target_options` from `values`, and return the target, which is empty without any."""
    everything, orphans = values.pop("all"), values.pop("orphans")
    given: dict[str, Any] = {name: split_list(texts) for name in SELECTORS if (texts := values.pop(name))}
    if everything and given:
        names = ", ".join(f"--{name}" for name in given)
        raise ConfigurationError(f"--all selects every process; leave out --all or {names}")
    if required and not (everything or orphans or given):
        raise ConfigurationError("no target; give --gpu, --uuid, --pid, --workload, --rank, --user, --orphans or --all")
    target = Target(**given, orphans=orphans, all=everything)
    _check(ActionRequest("empty_cache", Target(**given, all=not given)))
    return target


def split_list(texts: Sequence[str]) -> list[str]:
    """The values of a repeatable option, each of which may be a list with commas: `0,1` and `7`."""
    return [part.strip() for text in texts for part in text.split(",")]


view_options = option_group(
    click.option(
        "--sort",
        type=click.Choice(list(SORTS)),
        metavar="COLUMN",
        default="used",
        show_default=True,
        help=f"Sort jobs by: {', '.join(SORTS)}.",
    ),
    click.option("--reverse", is_flag=True, help="Reverse the order."),
    click.option(
        "--filter",
        "filter_text",
        metavar="WORDS",
        default="",
        help="Only jobs that have every word in a name, owner, command, pod, state, pid or device, and their devices.",
    ),
)
"""What a command shows of a node, and in which order."""

wide_option = click.option(
    "-o",
    "wide",
    type=click.Choice(["wide"]),
    metavar="wide",
    help="Show the processes of each job and all columns, in lines of any length.",
    callback=lambda _context, _option, value: value == "wide",
)


def pop_view(values: dict[str, Any]) -> View:
    """Remove the values of `view_options` from `values`, and return them."""
    return View(values.pop("filter_text"), Order(SORTS[values.pop("sort")], values.pop("reverse")))


def list_option(flag: str, name: str, values: Mapping[str, str], text: str) -> Callable[[_Command], _Command]:
    """Return a repeatable option that takes lists of known values; the command receives what the values stand for."""

    def read(_context: click.Context, _option: click.Parameter, texts: Sequence[str]) -> list[str]:
        for word in (words := split_list(texts)):
            if word not in values:
                advice = did_you_mean(word, values, f"expected {', '.join(values)}")
                raise ConfigurationError(f"invalid {flag} {word!r}: {advice}")
        return list(dict.fromkeys(values[word] for word in words))

    return click.option(
        flag,
        name,
        metavar=flag.removeprefix("--").upper(),
        multiple=True,
        callback=read,
        shell_complete=lambda _context, _option, incomplete: of_list(values, incomplete),
        help=f"{text} Repeatable.",
    )


def job_option(text: str, *, required: bool = False) -> Callable[[_Command], _Command]:
    """Return the option that selects a job. `ExporterApi.page_job` is for routes that know no id of Slurm or Ray."""
    help_text = f"{text}: its id of Slurm or Ray, its workload, or its id on the page."
    return click.option("--job", metavar="JOB", required=required, shell_complete=JOBS, help=help_text)


def action_options(action: str, *, without: Collection[str] = ()) -> Callable[[_Command], _Command]:
    """Return the options of an action as `actions.action_options` has them. Their names are the fields of a request."""
    return option_group(
        *(
            _action_option(name, option, option.help[action])
            for name, option in OPTIONS.items()
            if option.flag and action in option.help and name not in without
        )
    )


yes_to_terminate = click.option("--yes", is_flag=True, help="Do not ask. Needed without a terminal, and with --json.")
"""An option of `terminate` and `fleet terminate`."""


def _action_option(name: str, option: RequestOption, text: str) -> Callable[[Any], Any]:
    if not option.flag.startswith("-"):
        return click.argument(name, type=option.kind, metavar=option.flag)
    if option.kind is bool:
        return click.option(option.flag, name, is_flag=True, help=text)
    default = option.default
    if option.terminal_default is not None:
        default, text = None, f"{text} Default: {option.terminal_default:g} on a terminal, otherwise {default:g}."
    return click.option(
        option.flag,
        name,
        type=Seconds(option.least, option.most) if option.unit == "seconds" else option.kind,
        metavar=option.metavar,
        default=default,
        show_default=bool(default),
        help=text,
    )


def action_request(action: str, values: Mapping[str, Any], *, on_terminal: bool) -> dict[str, Any]:
    """Return the request of an action, without its target, from the values of its options."""
    for_people = on_terminal and not values["dry_run"]
    given = {name: OPTIONS[name].terminal_default if v is None and for_people else v for name, v in values.items()}
    # What is not given is the exporter's choice.
    request = {"action": action, **{name: v for name, v in given.items() if v is not None and (v or name != "group")}}
    _check(ActionRequest(**request, target=Target(pid=1)))
    if values.get("group"):
        note(f"--{GROUP_IS_DEPRECATED}")
    return request


def _check(request: ActionRequest) -> None:
    for invalid in invalid_fields(request):
        name = invalid.field.removeprefix("target.")
        flag = OPTIONS[name].flag if name in OPTIONS else f"--{name}"
        raise ConfigurationError(f"invalid {flag} {invalid.value}: {invalid.advice}")
