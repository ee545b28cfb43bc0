"""`serve`: run the exporter. Its options are the fields of `Settings`, so that each is described in one place.

Typer is imported only to help and to complain: see `read_flags`.
"""

from __future__ import annotations

from collections.abc import Sequence
from inspect import Parameter
from typing import TYPE_CHECKING, Annotated, Any, get_origin

from gpumem_exporter.server.settings import ENVIRONMENT_PREFIX, Settings, load_settings, setting_key

if TYPE_CHECKING:
    import typer
    from pydantic.fields import FieldInfo

__all__ = ["read_flags", "register", "start"]

_DESCRIPTION = f"""\
Run the exporter.

With no GPU and no driver it stays up, says so in /health, and attaches as soon as the driver answers.

Each option is also a variable (`--report.max-processes` is {ENVIRONMENT_PREFIX}REPORT_MAX_PROCESSES) and a key of the
file that --config.file names (`report.max-processes: 512`). An option beats the variable, the variable the file.
"""

_EXAMPLES = """\b
Examples:
  gpumem-exporter serve
  gpumem-exporter serve --demo --web.listen-address 127.0.0.1:9844
  gpumem-exporter serve --web.listen-socket /run/gpumem/exporter.sock --action.token-file /etc/gpumem/token
  gpumem-exporter serve --config.file /etc/gpumem/exporter.yaml --log.format json
"""

_METAVARS = {float: "SECONDS", int: "N"}
_METAVARS_BY_NAME = {"address": "ADDRESS", "file": "PATH", "socket": "PATH", "path": "PATH", "allow": "ACTION"}


def register(application: typer.Typer) -> None:
    """Add the command."""
    from gpumem_exporter.cli.options import command_from

    application.command("serve", help=_DESCRIPTION, epilog=_EXAMPLES)(command_from(_parameters(), start, None))


def start(flags: dict[str, Any]) -> int:
    """Serve until told to stop.

    Args:
        flags: `demo`, `config_file` and the fields of `Settings`; None, or no value, where a flag was not given.

    Raises:
        ConfigurationError: a flag, a variable or the file is wrong.
    """
    given = dict(flags)
    demo = bool(given.pop("demo", False))
    settings = load_settings({name: None if value in ([], ()) else value for name, value in given.items()})
    from gpumem_exporter.server.serve import run

    return run(settings, demo=demo)


def read_flags(words: Sequence[str]) -> dict[str, Any] | None:
    """Read flags as Typer would.

    None for whatever Typer should see itself: help, mistakes, and values that begin with a dash.
    """
    names = {f"--{setting_key(name)}": name for name in ("config_file", *Settings.model_fields)}
    flags: dict[str, Any] = {}
    rest = iter(words)
    for word in rest:
        if word == "--demo":
            flags["demo"] = True
            continue
        flag, equals, value = word.partition("=")
        name = names.get(flag)
        if name is None:
            return None
        if not equals:
            value = next(rest, "-")
            if value.startswith("-"):
                return None
        if name in Settings.model_fields and _several(Settings.model_fields[name]):
            flags.setdefault(name, []).append(value)
        else:
            flags[name] = value
    return flags


def _parameters() -> list[Parameter]:
    """One option for each field. Values are left as text: `load_settings` checks those of every source alike."""
    import typer

    demo = typer.Option("--demo", help="simulated devices and processes: needs no GPU, no driver and no torch")
    config = typer.Option("--config.file", metavar="PATH", help="YAML file whose keys are the options below")
    return [
        Parameter("demo", Parameter.KEYWORD_ONLY, default=False, annotation=Annotated[bool, demo]),
        Parameter("config_file", Parameter.KEYWORD_ONLY, default=None, annotation=Annotated[str | None, config]),
        *(_parameter(name, field) for name, field in Settings.model_fields.items()),
    ]


def _parameter(name: str, field: FieldInfo) -> Parameter:
    import typer

    several = _several(field)
    text = f"{field.description}{' (repeatable)' if several else ''} [default: {_shown(field)}]"
    option = typer.Option(f"--{setting_key(name)}", metavar=_metavar(name, field), help=text, show_default=False)
    kind = list[str] | None if several else str | None
    return Parameter(name, Parameter.KEYWORD_ONLY, default=None, annotation=Annotated[kind, option])


def _several(field: FieldInfo) -> bool:
    return get_origin(field.annotation) is tuple


def _shown(field: FieldInfo) -> str:
    default = field.default
    if isinstance(default, Sequence) and not isinstance(default, str):
        return ", ".join(default) or "none"
    return f"{default:g}" if isinstance(default, float) else str(default) or "none"


def _metavar(name: str, field: FieldInfo) -> str:
    for part, metavar in _METAVARS_BY_NAME.items():
        if name.endswith(part):
            return metavar
    return _METAVARS.get(field.annotation, "WORD") if isinstance(field.annotation, type) else "WORD"
