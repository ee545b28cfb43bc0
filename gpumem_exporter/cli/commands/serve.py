"""`serve`: run the exporter. The fields of `Settings` are its options."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, get_origin

import click

from gpumem_exporter.cli.options import option_group
from gpumem_exporter.server.settings import ENVIRONMENT_PREFIX, Settings, load_settings, setting_key

if TYPE_CHECKING:
    from pydantic.fields import FieldInfo

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


def _option(name: str, field: FieldInfo) -> Callable[[Any], Any]:
    """The option of a setting. Its value stays text: `load_settings` checks the values of every source."""
    flag = f"--{setting_key(name)}"
    if field.annotation is bool:
        return click.option(flag, name, is_flag=True, default=None, help=field.description)
    repeatable = _repeatable(field)
    text = f"{field.description}{' (repeatable)' if repeatable else ''} [default: {_shown_default(field)}]"
    return click.option(flag, name, metavar=_metavar(name, field), multiple=repeatable, help=text)


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


@click.command(help=_DESCRIPTION, epilog=_EXAMPLES)
@click.option("--demo", is_flag=True, help="simulate devices and processes; needs no GPU, no driver and no torch")
@click.option("--config.file", "config_file", metavar="PATH", help="YAML file whose keys are the options below")
@option_group(*(_option(name, field) for name, field in Settings.model_fields.items()))
def serve(*, demo: bool, **flags: Any) -> int:
    """Serve until a signal ends the exporter."""
    settings = load_settings({name: None if value == () else value for name, value in flags.items()})
    from gpumem_exporter.server.serve import run

    return run(settings, demo=demo)
