"""`serve`: run the exporter. The fields of its settings are its options."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, get_origin

import click

from gpumem_exporter.settings import ENVIRONMENT_PREFIX, setting_key
from gpumem_exporter.settings_sources import load_settings, settings_model

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

MAX_DEMO_PROCESSES = 512
"""The reporting thread of the demo has time for about this number."""
# The kind of a value, by the last word of its name.
_METAVARS = {
    **dict.fromkeys(("directory", "file", "path", "socket"), "PATH"),
    "address": "ADDRESS",
    "allow": "ACTION",
}


def _option(name: str, field: FieldInfo) -> click.Option:
    """Return the option of a setting."""
    # Its value stays text: `load_settings` checks the values of every source in the same way.
    flags = [f"--{setting_key(name)}", name]
    if field.annotation is bool:
        if field.default:
            flags[0] += f"/--no-{setting_key(name)}"
        return click.Option(flags, is_flag=True, default=None, help=field.description)
    kind, default = field.annotation, field.default
    metavar = _METAVARS.get(name.rpartition("_")[2]) or ("SECONDS" if kind is float else "N" if kind is int else "WORD")
    if get_origin(kind) is tuple:
        text = f"{field.description} (repeatable) [default: {', '.join(default)}]"
        return click.Option(flags, metavar=metavar, multiple=True, help=text)
    shown = f"{default:g}" if kind is float else default or "none"
    return click.Option(flags, metavar=metavar, help=f"{field.description} [default: {shown}]")


def _serve(*, demo: bool, demo_processes: int | None, **flags: Any) -> int:
    if demo_processes is not None and not demo:
        raise click.UsageError("--demo.processes needs --demo")
    settings = load_settings({setting_key(name): None if value == () else value for name, value in flags.items()})
    from gpumem_exporter.serving import run

    return run(settings, demo=demo, demo_processes=demo_processes)


serve = click.Command(
    "serve",
    params=[
        click.Option(
            ["--demo"], is_flag=True, help="simulate devices and processes; needs no GPU, no driver and no torch"
        ),
        click.Option(
            ["--demo.processes", "demo_processes"],
            metavar="N",
            type=click.IntRange(1, MAX_DEMO_PROCESSES),
            help="the number of simulated processes: more are copies of the demo's workloads on other devices",
        ),
        click.Option(
            ["--config.file", "config_file"], metavar="PATH", help="YAML file whose keys are the options below"
        ),
        *(_option(name, field) for name, field in settings_model().model_fields.items()),
    ],
    callback=_serve,
    help=_DESCRIPTION,
    epilog=_EXAMPLES,
)
