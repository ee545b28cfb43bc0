"""`serve`: run the exporter. The fields of `Settings` are its options."""

from __future__ import annotations

from collections.abc import Sequence
from inspect import Parameter
from typing import TYPE_CHECKING, Annotated, Any, get_origin

from gpumem_exporter.server.settings import ENVIRONMENT_PREFIX, Settings, load_settings, setting_key

if TYPE_CHECKING:
    import typer
    from pydantic.fields import FieldInfo

__all__ = ["build", "read_plain_words", "serve"]

_DESCRIPTION = f"""\
Run the exporter.

Without a GPU or a driver the exporter stays up, reports the error in /health, and attaches as soon as the driver
answers.

Each option is also an environment variable (`--report.max-processes` is {ENVIRONMENT_PREFIX}REPORT_MAX_PROCESSES) and
a key of the file that --config.file names (`report.max-processes: 512`). An option overrides the variable, and the
variable overrides the file.
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


def build(name: str) -> typer.Typer:
    """Return the command."""
    from gpumem_exporter.cli.options import command_from_parameters

    return command_from_parameters(name, serve, _parameters(), description=_DESCRIPTION, epilog=_EXAMPLES)


def read_plain_words(words: Sequence[str]) -> dict[str, Any] | None:
    """Return the values of switches, `--name VALUE` and `--name=VALUE`; None if Typer must read the words.

    The import of Typer takes 7 % of the exporter's start.
    """
    names = {f"--{setting_key(name)}": name for name in ("config_file", *Settings.model_fields)}
    switches = {flag for flag, name in names.items() if _is_switch(name)}
    values: dict[str, Any] = {}
    rest = iter(words)
    for word in rest:
        if word == "--demo":
            values["demo"] = True
            continue
        if word in switches:
            values[names[word]] = True
            continue
        flag, equals, value = word.partition("=")
        if not equals:
            value = next(rest, "-")
        if flag not in names or flag in switches or value.startswith("-"):
            return None
        name = names[flag]
        if name in Settings.model_fields and _repeatable(Settings.model_fields[name]):
            values.setdefault(name, []).append(value)
        else:
            values[name] = value
    return values


def _is_switch(name: str) -> bool:
    return name in Settings.model_fields and Settings.model_fields[name].annotation is bool


def serve(values: dict[str, Any]) -> int:
    """Serve until a signal ends the exporter. A value is None, an empty list or absent if its flag is not given."""
    demo = values.pop("demo", False)
    settings = load_settings({name: None if value == [] else value for name, value in values.items()})
    from gpumem_exporter.server.serve import run

    return run(settings, demo=demo)


def _parameters() -> list[Parameter]:
    """One option for each setting. The values stay text: `load_settings` checks those of every source."""
    import typer

    demo = typer.Option("--demo", help="simulate devices and processes; needs no GPU, no driver and no torch")
    config = typer.Option("--config.file", metavar="PATH", help="YAML file whose keys are the options below")
    return [
        Parameter("demo", Parameter.KEYWORD_ONLY, default=False, annotation=Annotated[bool, demo]),
        Parameter("config_file", Parameter.KEYWORD_ONLY, default=None, annotation=Annotated[str | None, config]),
        *(_parameter(name, field) for name, field in Settings.model_fields.items()),
    ]


def _parameter(name: str, field: FieldInfo) -> Parameter:
    import typer

    if field.annotation is bool:
        flag = typer.Option(f"--{setting_key(name)}", help=field.description, show_default=False)
        return Parameter(name, Parameter.KEYWORD_ONLY, default=None, annotation=Annotated[bool | None, flag])
    repeatable = _repeatable(field)
    text = f"{field.description}{' (repeatable)' if repeatable else ''} [default: {_shown_default(field)}]"
    option = typer.Option(f"--{setting_key(name)}", metavar=_metavar(name, field), help=text, show_default=False)
    kind = list[str] | None if repeatable else str | None
    return Parameter(name, Parameter.KEYWORD_ONLY, default=None, annotation=Annotated[kind, option])


def _repeatable(field: FieldInfo) -> bool:
    return get_origin(field.annotation) is tuple


def _shown_default(field: FieldInfo) -> str:
    default = field.default
    if isinstance(default, Sequence) and not isinstance(default, str):
        return ", ".join(default) or "none"
    return f"{default:g}" if isinstance(default, float) else str(default) or "none"


def _metavar(name: str, field: FieldInfo) -> str:
    for ending, metavar in _METAVARS_BY_NAME.items():
        if name.endswith(ending):
            return metavar
    return _METAVARS.get(field.annotation, "WORD") if isinstance(field.annotation, type) else "WORD"
