"""`serve`: run the exporter. The fields of its settings are its options, environment variables and keys of a file.

A flag takes precedence over the environment, the environment over the file, the file over the default.
"""

from __future__ import annotations

import functools
import importlib
import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, get_origin

import click
from pydantic import Field, ValidationError, create_model
from pydantic.fields import FieldInfo

from gpumem_client.wire.errors import ConfigurationError
from gpumem_exporter.core.spelling import did_you_mean
from gpumem_exporter.core.yaml_file import YamlFile, expected, shown
from gpumem_exporter.features import features
from gpumem_exporter.settings import COLLECTORS, ENVIRONMENT_PREFIX, Settings, environment_name, setting_key

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


@functools.cache
def settings_model() -> type[Settings]:
    """Return the model of all settings: of the core, of each feature, and of the collectors."""
    of_features = {name: feature.settings for name, feature in features().items() if feature.settings}
    modules = {name: f"gpumem_exporter.features.{name}.{name}_settings" for name in of_features}
    found = [getattr(importlib.import_module(modules[name]), model) for name, model in of_features.items()]
    collectors: Any = {
        f"collector_{name}": (bool, Field(default=True, description=f"export the series of {subject}"))
        for name, subject in COLLECTORS.items()
    }
    # pydantic orders the fields from the last base to the first one.
    bases: Any = (*reversed(found), Settings)
    model: type[Settings] = create_model("AllSettings", __base__=bases, **collectors)
    return model


def load_settings(flags: Mapping[str, Any] | None = None, environ: Mapping[str, str] = os.environ) -> Settings:
    """Return the settings from flags, environment, configuration file and defaults.

    The flags are by dotted name, and `config.file` is the path of the configuration file. A flag that is None and an
    empty variable are absent. Raises ConfigurationError with the source, the key, the value and the expected values.
    """
    model = settings_model()
    known = [setting_key(field) for field in model.model_fields]
    flags = dict(flags or {})
    config_file = flags.pop("config.file", None) or environ.get(environment_name("config.file"))
    variables = {key: environment_name(key) for key in known}
    # The source and the value, by key.
    given: dict[str, tuple[str, Any]] = {
        **(_read_config_file(Path(config_file), known) if config_file else {}),
        **{key: (name, environ[name]) for key, name in variables.items() if environ.get(name)},
        **{key: (f"--{key}", value) for key, value in flags.items() if value is not None},
    }
    try:
        settings = model.model_validate({key: value for key, (_, value) in given.items()})
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        source, value = given[str(first["loc"][0])]
        if isinstance(value, tuple):  # of a flag that may be repeated
            value = ",".join(value)
        raise ConfigurationError(f"{source}: {shown(value)} is invalid: {expected(first)}") from None
    if settings.report_expiry < 2 * settings.report_interval:
        source, _ = given.get("report.expiry") or given["report.interval"]
        raise ConfigurationError(
            f"{source}: report.expiry {settings.report_expiry:g} is invalid: expected at least twice report.interval "
            f"({settings.report_interval:g}), because a single report may be late"
        )
    return settings


def _read_config_file(path: Path, known: Sequence[str]) -> dict[str, tuple[str, Any]]:
    """Return the source and the value of each setting of a file with dotted keys, nested keys, or both."""
    file = YamlFile(path, "configuration file")
    if not isinstance(file.document, dict | None):
        raise file.error((), 'expected keys with values, such as `web.listen-address: ":9844"`')
    found: dict[str, tuple[str, Any]] = {}
    for location, value in _leaves(file.document or {}, ()):
        key = ".".join(location)
        if key not in known:
            advice = did_you_mean(key, known) or f"the keys are {', '.join(known)}"
            raise file.error(location, f"unknown key {key!r}; {advice}", of=())
        if key in found:
            raise file.error(location, f"the key {key!r} appears twice, first at {found[key][0]}", of=())
        found[key] = (f"{path}:{file.line(location)}: {key}", value)
    return found


def _leaves(value: Any, location: tuple[str, ...]) -> Iterator[tuple[tuple[str, ...], Any]]:
    if not isinstance(value, dict):
        yield location, value
        return
    for key, inner in value.items():
        yield from _leaves(inner, (*location, key))


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
