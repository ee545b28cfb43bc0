"""The settings of `serve`: each is a flag, an environment variable and a key of the configuration file.

One rule derives the three names from a field of `Settings`: `report_max_processes` is the flag
`--report.max-processes`, the variable `GPUMEM_REPORT_MAX_PROCESSES` and the key `report.max-processes`. The exception
is `--web.config.file`, which has its name from Prometheus.

A flag takes precedence over the environment, the environment over the file, the file over the default.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, ValidationError

from gpumem_client.wire.errors import ConfigurationError
from gpumem_exporter.actions.request import ACTIONS, DEFAULT_ACTIONS
from gpumem_exporter.core.yaml_file import expected, shown
from gpumem_exporter.server.config_file import read_config_file
from gpumem_exporter.server.http.listeners import parse_listen_address
from gpumem_exporter.server.security.tokens import TokenFile

__all__ = ["ENVIRONMENT_PREFIX", "Settings", "environment_name", "load_settings", "setting_key"]

ENVIRONMENT_PREFIX = "GPUMEM_"

MAX_SOCKET_PATH_BYTES = 107
"""`sun_path` of unix(7), without its terminating zero byte."""

_ROUTES = ("/", "/docs", "/health", "/openapi.json")
_EXCEPTIONS = {"web_config_file": "web.config.file"}


def _split(value: Any) -> Any:
    """Return the values of a string, separated by commas, or of a list of such strings."""
    if isinstance(value, str):
        return tuple(part.strip() for part in value.split(",") if part.strip())
    if isinstance(value, (list, tuple, set, frozenset)) and all(isinstance(part, str) for part in value):
        return tuple(part for item in value for part in _split(item))
    raise ValueError("expected a string or a list of strings")


def _number(value: Any) -> Any:
    if isinstance(value, bool):
        raise ValueError("expected a number")  # noqa: TRY004 - pydantic handles no TypeError
    return value.strip() if isinstance(value, str) else value


def _addresses(values: tuple[str, ...]) -> tuple[str, ...]:
    if not values:
        raise ValueError("expected at least one address, such as :9844")
    for value in values:
        try:
            parse_listen_address(value)
        except ValueError as error:
            raise ValueError(f"{value!r}: {error}") from None
    if len(set(values)) < len(values):
        raise ValueError("an address is repeated")
    return values


def _actions(values: tuple[str, ...]) -> tuple[str, ...]:
    if values == ("none",):
        return ()
    for value in values:
        if value not in (*ACTIONS, "default"):
            raise ValueError(f"{value!r} is not an action; expected default or actions of {', '.join(ACTIONS)}")
    return tuple(
        dict.fromkeys(each for value in values for each in (DEFAULT_ACTIONS if value == "default" else (value,)))
    )


def _socket_path(value: str) -> str:
    if value and not value.startswith("/"):
        raise ValueError("expected an absolute path")
    if len(os.fsencode(value)) > MAX_SOCKET_PATH_BYTES or "\0" in value:
        raise ValueError(f"expected a path of at most {MAX_SOCKET_PATH_BYTES} bytes, the maximum of a unix socket")
    return value


def _telemetry_path(value: str) -> str:
    if not value.startswith("/") or any(c in value for c in "{}?#% \\") or not value.isprintable():
        raise ValueError("expected a path such as /metrics")
    if value in _ROUTES or value.startswith(("/api/", "/-/")):
        raise ValueError("expected a path that no other route uses")
    return value


_Seconds = Annotated[float, BeforeValidator(_number), Field(allow_inf_nan=False)]
_LEVEL_WORDS = {"warn": "warning"}


class Settings(BaseModel):
    """The settings of `serve`. Each value is validated; no file is opened."""

    model_config = ConfigDict(frozen=True, extra="forbid", validate_default=False, hide_input_in_errors=True)

    web_listen_address: Annotated[tuple[str, ...], BeforeValidator(_split), AfterValidator(_addresses)] = Field(
        (":9844",), description="TCP addresses to listen on; `:9844` is port 9844 of every address"
    )
    web_listen_socket: Annotated[str, AfterValidator(_socket_path)] = Field(
        "", description="path of a unix socket to listen on as well"
    )
    web_systemd_socket: bool = Field(
        False, description="listen on the sockets that systemd passes, instead of the two options above"
    )
    web_telemetry_path: Annotated[str, AfterValidator(_telemetry_path)] = Field(
        "/metrics", description="path of the metrics"
    )
    web_hide_identities: bool = Field(False, description="hide user, command and pod of others' processes")
    web_config_file: str = Field(
        "", description="file with certificate and users for the TCP addresses, in the format of Prometheus' exporters"
    )
    collect_interval: Annotated[_Seconds, Field(ge=0.05, le=3600)] = Field(
        1.0, description="seconds between two polls of the driver"
    )
    report_interval: Annotated[_Seconds, Field(ge=0.01, le=3600)] = Field(
        1.0, description="seconds between two reports of a process"
    )
    report_expiry: Annotated[_Seconds, Field(gt=0, le=86400)] = Field(
        15.0, description="seconds after which the series of a silent process are removed"
    )
    report_max_processes: Annotated[int, BeforeValidator(_number), Field(ge=1, le=100_000)] = Field(
        512, description="maximum number of reporting processes"
    )
    action_token_file: str = Field("", description="file with the token that actions, the audit log and events require")
    report_token_file: str = Field("", description="file with the token that reports require")
    action_allow: Annotated[tuple[str, ...], BeforeValidator(_split), AfterValidator(_actions)] = Field(
        DEFAULT_ACTIONS, description="the allowed actions, or `none`; `default,terminate` adds to the default"
    )
    policy_file: str = Field("", description="file with the rules of automatic actions")
    action_caller_limit: Annotated[int, BeforeValidator(_number), Field(ge=1, le=1_000_000)] = Field(
        600, description="maximum number of actions per minute that one caller may request"
    )
    action_process_limit: Annotated[int, BeforeValidator(_number), Field(ge=1, le=1_000_000)] = Field(
        120, description="maximum number of actions per minute for one process, from all callers"
    )
    storage_path: str = Field("", description="folder in which events survive a restart; created if it is missing")
    storage_retention: Annotated[_Seconds, Field(ge=1, le=10 * 365 * 86400)] = Field(
        604800.0, description="seconds after which an event is deleted"
    )
    storage_max_bytes: Annotated[int, BeforeValidator(_number), Field(ge=8 << 20, le=1 << 40)] = Field(
        64 << 20, description="maximum size of the stored events in bytes; the oldest are deleted"
    )
    log_level: Annotated[
        Literal["debug", "info", "warning", "error"],
        BeforeValidator(lambda value: _LEVEL_WORDS.get(str(value).lower(), str(value).lower())),
    ] = Field("info", description="debug, info, warning or error")
    log_format: Literal["logfmt", "json"] = Field("logfmt", description="logfmt or json")


def setting_key(field: str) -> str:
    """Return the dotted name of a field: `web.listen-address` for `web_listen_address`."""
    section, _, name = field.partition("_")
    return _EXCEPTIONS.get(field) or f"{section}.{name.replace('_', '-')}"


def environment_name(key: str) -> str:
    """Return the variable of a dotted name: `GPUMEM_WEB_LISTEN_ADDRESS` for `web.listen-address`."""
    return ENVIRONMENT_PREFIX + key.replace(".", "_").replace("-", "_").upper()


def load_settings(flags: Mapping[str, Any] | None = None, environ: Mapping[str, str] = os.environ) -> Settings:
    """Return the settings from flags, environment, configuration file and defaults.

    Args:
        flags: by dotted name (`web.listen-address`) or by field name; None if the flag is absent.
            `config.file` is the path of the configuration file.
        environ: the environment; an empty variable counts as absent.

    Raises:
        ConfigurationError: one line with the source, the key, the value and the expected values.
    """
    keys = {setting_key(field): field for field in Settings.model_fields}
    given: dict[str, tuple[str, Any]] = {}
    flags = {key if "." in key else setting_key(key): value for key, value in (flags or {}).items()}
    config_file = flags.pop("config.file", None) or environ.get(environment_name("config.file"), "")
    if config_file:
        for key, setting in read_config_file(Path(config_file), known=tuple(keys)).items():
            given[key] = (f"{config_file}:{setting.line}: {key}", setting.value)
    for key in keys:
        if text := environ.get(environment_name(key), ""):
            given[key] = (environment_name(key), text)
    for key, value in flags.items():
        if key not in keys:
            raise ConfigurationError(f"--{key}: there is no such flag")
        if value is not None:
            given[key] = (f"--{key}", value)
    try:
        settings = Settings.model_validate({keys[key]: value for key, (_, value) in given.items()})
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        key = setting_key(str(first["loc"][0]))
        source, value = given[key]
        raise ConfigurationError(f"{source}: {shown(value)} is invalid: {expected(first)}") from None
    _check_combinations(settings, {key: source for key, (source, _) in given.items()})
    return settings


def _check_combinations(settings: Settings, sources: Mapping[str, str]) -> None:
    if settings.report_expiry < 2 * settings.report_interval:
        key = "report.expiry" if "report.expiry" in sources else "report.interval"
        raise ConfigurationError(
            f"{sources.get(key, '--' + key)}: report.expiry {settings.report_expiry:g} is invalid: expected at least "
            f"twice report.interval ({settings.report_interval:g}), because a single report may be late"
        )
    for key, path in (
        ("action.token-file", settings.action_token_file),
        ("report.token-file", settings.report_token_file),
    ):
        if path:
            try:
                TokenFile(Path(path)).read()
            except (OSError, ValueError) as error:
                reason = error.strerror if isinstance(error, OSError) else str(error)
                raise ConfigurationError(
                    f"{sources.get(key, '--' + key)}: {path!r} is invalid: {reason}; expected a readable file "
                    "that contains the token"
                ) from None
    if settings.web_config_file:
        from gpumem_exporter.server.security.web_access import WebAccess

        WebAccess(Path(settings.web_config_file))
    if settings.policy_file:
        from gpumem_exporter.actions.policy.file import read_policy

        read_policy(Path(settings.policy_file), allowed=settings.action_allow)
