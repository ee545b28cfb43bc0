"""The settings of `serve`: each is a flag, an environment variable and a key of the configuration file.

One rule derives the three names from a field of `Settings`: `report_max_processes` is the flag
`--report.max-processes`, the variable `GPUMEM_REPORT_MAX_PROCESSES` and the key `report.max-processes`.
Each feature has a model of its own settings; `serve_command` reads all of them as one.
"""

from __future__ import annotations

import os
from typing import Annotated, Any, Literal, TypeVar

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field

from gpumem_exporter.actions.action_options import DEFAULT_ACTIONS
from gpumem_exporter.actions.kinds import COMMAND_NAMES
from gpumem_exporter.core.spelling import did_you_mean
from gpumem_exporter.edge.listeners import parse_listen_address

ENVIRONMENT_PREFIX = "GPUMEM_"

MAX_SOCKET_PATH_BYTES = 107
"""`sun_path` of unix(7), without its terminating zero byte."""

PROFILES_SHARE = 4
"""Of `storage_max_bytes`, one part in this number is for profiles, and the others are for events."""

_ROUTES = ("/", "/docs", "/health", "/openapi.json")
ACTION_WORDS = {
    "default": DEFAULT_ACTIONS,
    **{name: (action,) for action, command in COMMAND_NAMES.items() for name in (action, command)},
}
"""The actions of each word of `action.allow`. An action is also known by its command."""

_LEVEL_WORDS = {"warn": "warning"}


def setting_key(field: str) -> str:
    """Return the dotted name of a field: `web.listen-address` for `web_listen_address`."""
    if field == "web_config_file":
        return "web.config.file"  # as Prometheus' exporters name it
    section, _, name = field.partition("_")
    return f"{section}.{name.replace('_', '-')}"


def environment_name(key: str) -> str:
    """Return the variable of a dotted name: `GPUMEM_WEB_LISTEN_ADDRESS` for `web.listen-address`."""
    return ENVIRONMENT_PREFIX + key.replace(".", "_").replace("-", "_").upper()


def _split(value: Any) -> Any:
    """Return the values of a string, separated by commas, or of a list of such strings."""
    if isinstance(value, str):
        return tuple(part.strip() for part in value.split(",") if part.strip())
    if isinstance(value, (list, tuple)) and all(isinstance(part, str) for part in value):
        return tuple(part for item in value for part in _split(item))
    raise ValueError("expected a string or a list of strings")


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
        if value not in ACTION_WORDS:
            expected = f"expected default, none, or {', '.join(COMMAND_NAMES.values())}"
            raise ValueError(f"no action {value!r}; {did_you_mean(value, ACTION_WORDS, expected)}")
    return tuple(dict.fromkeys(each for value in values for each in ACTION_WORDS[value]))


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


class SettingsModel(BaseModel):
    """Settings of `serve`, by field or by dotted name. Each value is validated; no file is opened."""

    model_config = ConfigDict(frozen=True, extra="forbid", alias_generator=setting_key, populate_by_name=True)


COLLECTORS = {
    "poll": "the poll of the driver",
    "devices": "devices",
    "ledger": "the ledger",
    "processes": "processes",
    "reporters": "reporters",
    "torch": "PyTorch's allocator",
    "ooms": "the last out-of-memory errors",
    "orphans": "orphans",
    "engines": "inference engines",
    "exporter": "the exporter itself",
}
"""The collectors of the metrics, in the order of the page, and what their series are about."""

Part = TypeVar("Part", bound=SettingsModel)


class Settings(SettingsModel):
    """The settings of the core; `serve_command` adds the fields of the features and of the collectors."""

    web_listen_address: Annotated[tuple[str, ...], BeforeValidator(_split), AfterValidator(_addresses)] = Field(
        default=(":9844",), description="TCP addresses to listen on; `:9844` is port 9844 of every address"
    )
    web_listen_socket: Annotated[str, AfterValidator(_socket_path)] = Field(
        default="", description="path of a unix socket to listen on as well"
    )
    web_systemd_socket: bool = Field(
        default=False, description="listen on the sockets that systemd passes, instead of the two options above"
    )
    web_telemetry_path: Annotated[str, AfterValidator(_telemetry_path)] = Field(
        default="/metrics", description="path of the metrics"
    )
    web_hide_identities: bool = Field(
        default=False, description="hide user, command, pod and Slurm job of others' processes"
    )
    web_config_file: str = Field(
        default="",
        description="file with certificate and users for the TCP addresses, in the format of Prometheus' exporters",
    )
    collect_interval: float = Field(
        default=1.0, ge=0.05, le=3600, description="seconds between two polls of the driver"
    )
    report_interval: float = Field(
        default=1.0, ge=0.01, le=3600, description="seconds between two reports of a process"
    )
    report_expiry: float = Field(
        default=15.0, gt=0, le=86400, description="seconds after which the series of a silent process are removed"
    )
    report_max_processes: int = Field(
        default=512, ge=1, le=100_000, description="maximum number of reporting processes"
    )
    action_token_file: str = Field(
        default="", description="file with the token that actions, the audit log and events require"
    )
    report_token_file: str = Field(default="", description="file with the token that reports require")
    action_allow: Annotated[tuple[str, ...], BeforeValidator(_split), AfterValidator(_actions)] = Field(
        default=DEFAULT_ACTIONS, description="the allowed actions, or `none`; `default,sleep,wake` adds to the default"
    )
    action_caller_limit: int = Field(
        default=600, ge=1, le=1_000_000, description="maximum number of actions per minute that one caller may request"
    )
    action_process_limit: int = Field(
        default=120,
        ge=1,
        le=1_000_000,
        description="maximum number of actions per minute for one process, from all callers",
    )
    storage_path: str = Field(
        default="", description="folder in which events, history and profiles survive a restart; created if missing"
    )
    storage_max_bytes: int = Field(
        default=64 << 20,
        ge=8 << 20,
        le=1 << 40,
        description="maximum size of the stored events and profiles in bytes; the oldest are deleted",
    )
    log_level: Annotated[
        Literal["debug", "info", "warning", "error"],
        BeforeValidator(lambda value: _LEVEL_WORDS.get(str(value).lower(), str(value).lower())),
    ] = Field(default="info", description="debug, info, warning or error")
    log_format: Literal["logfmt", "json"] = Field(default="logfmt", description="logfmt or json")

    def of(self, model: type[Part]) -> Part:
        """Return the settings of a feature; the defaults if none were read."""
        return self if isinstance(self, model) else model()
