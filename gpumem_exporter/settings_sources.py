"""Reads the settings of `serve` from flags, environment and configuration file.

A flag takes precedence over the environment, the environment over the file, the file over the default.
"""

from __future__ import annotations

import functools
import importlib
import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from pydantic import ValidationError, create_model

from gpumem_client.wire.errors import ConfigurationError
from gpumem_exporter.core.spelling import did_you_mean
from gpumem_exporter.core.yaml_file import YamlFile, expected, shown
from gpumem_exporter.features import features
from gpumem_exporter.settings import CollectorSettings, Settings, environment_name, setting_key


@functools.cache
def settings_model() -> type[Settings]:
    """Return the model of all settings: of the core, of the collectors, and of each feature."""
    of_features = {name: feature.settings for name, feature in features().items() if feature.settings}
    modules = {name: f"gpumem_exporter.features.{name}.{name}_settings" for name in of_features}
    found = [getattr(importlib.import_module(modules[name]), model) for name, model in of_features.items()]
    # pydantic orders the fields from the last base to the first one.
    bases: Any = (*reversed(found), CollectorSettings, Settings)
    model: type[Settings] = create_model("AllSettings", __base__=bases)
    return model


def load_settings(flags: Mapping[str, Any] | None = None, environ: Mapping[str, str] = os.environ) -> Settings:
    """Return the settings from flags, environment, configuration file and defaults.

    The flags are by dotted name, and `config.file` is the path of the configuration file. A flag that is None and an
    empty variable are absent. Raises ConfigurationError with the source, the key, the value and the expected values.
    """
    model = settings_model()
    known = [setting_key(field) for field in model.model_fields]
    given: dict[str, tuple[str, Any]] = {}  # the source and the value, by key
    flags = dict(flags or {})
    config_file = flags.pop("config.file", None) or environ.get(environment_name("config.file"), "")
    if config_file:
        given.update(_read_config_file(Path(config_file), known))
    for key in known:
        if text := environ.get(environment_name(key), ""):
            given[key] = (environment_name(key), text)
    for key, value in flags.items():
        if value is not None:
            given[key] = (f"--{key}", value)
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
