"""What `serve` is told: each setting is a flag, an environment variable and a key of the configuration file.

One rule derives the three names from a field of `Settings`: `report_max_processes` is the flag
`--report.max-processes`, the variable `GPUMEM_REPORT_MAX_PROCESSES` and the key `report.max-processes`. One name is
Prometheus' own instead: `--web.config.file`.
A flag beats the environment, the environment beats the file, the file beats the default.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, ValidationError

from gpumem_exporter.actions.request import ACTIONS, DEFAULT_ACTIONS
from gpumem_exporter.errors import ConfigurationError
from gpumem_exporter.server.config_file import read_config_file
from gpumem_exporter.server.http.addresses import parse_listen_address
from gpumem_exporter.server.security.tokens import TokenFile

__all__ = ["ENVIRONMENT_PREFIX", "Settings", "environment_name", "load_settings", "setting_key"]

ENVIRONMENT_PREFIX = "GPUMEM_"

MAX_SOCKET_PATH_BYTES = 107
"""`sun_path` of unix(7), less its closing zero."""

_OWN_PATHS = ("/", "/health", "/openapi.json")
_NAMED_OTHERWISE = {"web_config_file": "web.config.file"}


def _listed(value: Any) -> Any:
    """One value, or several with commas between them, or a list of them."""
    if isinstance(value, str):
        return tuple(part.strip() for part in value.split(",") if part.strip())
    if isinstance(value, (list, tuple, set, frozenset)) and all(isinstance(part, str) for part in value):
        return tuple(part for item in value for part in _listed(item))
    raise ValueError("expected one text, or a list of them")


def _number(value: Any) -> Any:
    if isinstance(value, bool):
        raise ValueError("expected a number")  # noqa: TRY004 - pydantic takes no TypeError
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
        raise ValueError("the same address is given twice")
    return values


def _actions(values: tuple[str, ...]) -> tuple[str, ...]:
    if values == ("none",):
        return ()
    for value in values:
        if value not in ACTIONS:
            raise ValueError(f"{value!r} is no action; the actions are {', '.join(ACTIONS)}")
    return tuple(dict.fromkeys(values))


def _socket_path(value: str) -> str:
    if value and not value.startswith("/"):
        raise ValueError("expected an absolute path")
    if len(os.fsencode(value)) > MAX_SOCKET_PATH_BYTES or "\0" in value:
        raise ValueError(f"expected a path of at most {MAX_SOCKET_PATH_BYTES} bytes, which is all that a socket takes")
    return value


def _folder(value: str) -> str:
    if "\0" in value:
        raise ValueError("expected the path of a folder")
    return value


def _telemetry_path(value: str) -> str:
    if not value.startswith("/") or any(c in value for c in "{}?#% \\") or not value.isprintable():
        raise ValueError("expected a path such as /metrics")
    if value in _OWN_PATHS or value.startswith(("/api/", "/-/")):
        raise ValueError("expected a path that is not another route's")
    return value


_Seconds = Annotated[float, BeforeValidator(_number), Field(allow_inf_nan=False)]
_LEVEL_WORDS = {"warn": "warning"}


class Settings(BaseModel):
    """All that `serve` can be told. Values are checked alone and against each other; files are not opened here."""

    model_config = ConfigDict(frozen=True, extra="forbid", validate_default=False, hide_input_in_errors=True)

    web_listen_address: Annotated[tuple[str, ...], BeforeValidator(_listed), AfterValidator(_addresses)] = Field(
        (":9844",), description="TCP addresses to listen at; `:9844` is port 9844 of every address"
    )
    web_listen_socket: Annotated[str, AfterValidator(_socket_path)] = Field(
        "", description="path of a unix socket to listen at as well"
    )
    web_telemetry_path: Annotated[str, AfterValidator(_telemetry_path)] = Field(
        "/metrics", description="path of the metrics"
    )
    web_config_file: str = Field(
        "", description="file with the certificate and the users of the TCP addresses, as Prometheus' exporters take it"
    )
    collect_interval: Annotated[_Seconds, Field(ge=0.05, le=3600)] = Field(
        1.0, description="seconds between two polls of the driver"
    )
    report_interval: Annotated[_Seconds, Field(ge=0.01, le=3600)] = Field(
        1.0, description="seconds between two reports of a process"
    )
    report_expiry: Annotated[_Seconds, Field(gt=0, le=86400)] = Field(
        15.0, description="seconds after which a silent process' series go"
    )
    report_max_processes: Annotated[int, BeforeValidator(_number), Field(ge=1, le=100_000)] = Field(
        512, description="how many reporting processes are kept at most"
    )
    action_token_file: str = Field(
        "", description="file with the token that actions, the audit log and the events need"
    )
    report_token_file: str = Field("", description="file with the token that reports need")
    action_allow: Annotated[tuple[str, ...], BeforeValidator(_listed), AfterValidator(_actions)] = Field(
        DEFAULT_ACTIONS, description="the actions that may be asked for, or none"
    )
    policy_file: str = Field("", description="file with the rules that act by themselves")
    action_caller_limit: Annotated[int, BeforeValidator(_number), Field(ge=1, le=1_000_000)] = Field(
        600, description="actions that one caller may ask for within a minute"
    )
    action_process_limit: Annotated[int, BeforeValidator(_number), Field(ge=1, le=1_000_000)] = Field(
        120, description="actions that one process is asked within a minute, whoever asks"
    )
    storage_path: Annotated[str, AfterValidator(_folder)] = Field(
        "", description="folder for what outlives the exporter: its events; made if it is not there"
    )
    storage_retention: Annotated[_Seconds, Field(ge=1, le=10 * 365 * 86400)] = Field(
        604800.0, description="seconds after which an event goes"
    )
    storage_max_bytes: Annotated[int, BeforeValidator(_number), Field(ge=8 << 20, le=1 << 40)] = Field(
        64 << 20, description="bytes that the events take at most: the oldest go"
    )
    log_level: Annotated[
        Literal["debug", "info", "warning", "error"],
        BeforeValidator(lambda value: _LEVEL_WORDS.get(str(value).lower(), str(value).lower())),
    ] = Field("info", description="debug, info, warning or error")
    log_format: Literal["logfmt", "json"] = Field("logfmt", description="logfmt or json")


def setting_key(field: str) -> str:
    """The dotted name of a field: `web_listen_address` is `web.listen-address`."""
    section, _, name = field.partition("_")
    return _NAMED_OTHERWISE.get(field) or f"{section}.{name.replace('_', '-')}"


def environment_name(key: str) -> str:
    """The variable of a dotted name: `web.listen-address` is `GPUMEM_WEB_LISTEN_ADDRESS`."""
    return ENVIRONMENT_PREFIX + key.replace(".", "_").replace("-", "_").upper()


def load_settings(flags: Mapping[str, Any] | None = None, environ: Mapping[str, str] = os.environ) -> Settings:
    """Put the settings together from flags, environment, configuration file and defaults.

    Args:
        flags: by dotted name (`web.listen-address`) or by field name; None means that the flag was not given.
            `config.file` names the configuration file.
        environ: the environment; an empty variable counts as not set.

    Raises:
        ConfigurationError: one line that names the source, the key, the value and what would be right.
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
        raise ConfigurationError(f"{source}: {_shown(value)} is not right: {_expected(first)}") from None
    _check_together(settings, {key: source for key, (source, _) in given.items()})
    return settings


def _check_together(settings: Settings, sources: Mapping[str, str]) -> None:
    if settings.report_expiry < 2 * settings.report_interval:
        key = "report.expiry" if "report.expiry" in sources else "report.interval"
        raise ConfigurationError(
            f"{sources.get(key, '--' + key)}: report.expiry {settings.report_expiry:g} is not right: expected at least "
            f"twice report.interval ({settings.report_interval:g}), or a process would be lost with one late report"
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
                    f"{sources.get(key, '--' + key)}: {path!r} is not right: {reason}; expected a readable file "
                    "with the token in it"
                ) from None
    if settings.web_config_file:
        from gpumem_exporter.server.security.web_access import (
            WebAccess,  # only whoever has such a file pays for what it takes
        )

        WebAccess(Path(settings.web_config_file))
    if settings.policy_file:
        from gpumem_exporter.actions.policy.file import read_policy  # only whoever has such a file pays for its parser

        read_policy(Path(settings.policy_file), allowed=settings.action_allow)


def _expected(error: Any) -> str:
    """What would be right, from one of pydantic's errors."""
    context = error.get("ctx", {})
    if "error" in context:
        return str(context["error"])
    message = str(error["msg"])
    for prefix in ("Input should be ", "Value error, "):
        message = message.removeprefix(prefix)
    return message if message.startswith("expected") else f"expected {message[:1].lower()}{message[1:]}"


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 200 else text[:200] + "…"
