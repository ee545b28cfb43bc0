"""A request for an action, the limits of its fields, and their one validator.

The HTTP API, alerts, the policy file and the command line build an `ActionRequest` and call `invalid_fields`. This
module imports the standard library only, besides the protocol.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from gpumem_client.wire.protocol import MAX_INTEGER, MAX_LABEL_LENGTH, MODES

__all__ = [
    "ACTIONS",
    "DEFAULT_ACTIONS",
    "DEFAULT_DEADLINE_SECONDS",
    "MAX_DEADLINE_SECONDS",
    "MAX_REASON_LENGTH",
    "MAX_SETTLE_SECONDS",
    "SELECTORS",
    "ActionRequest",
    "InvalidField",
    "Target",
    "invalid_fields",
    "mode_for",
]

ACTIONS = ("empty_cache", "collect_garbage", "reset_peak", "snapshot", "set_memory_fraction", "terminate")
DEFAULT_ACTIONS = tuple(action for action in ACTIONS if action != "terminate")
"""The actions that the exporter allows by default: those that end no process."""
DEFAULT_DEADLINE_SECONDS = 30.0
MAX_DEADLINE_SECONDS = 3600.0
MAX_SETTLE_SECONDS = 3600.0
MAX_REASON_LENGTH = 1000

SELECTORS = ("gpu", "uuid", "pid", "workload", "rank", "user")
"""The fields of a target that select processes."""

_MAX_VALUES = 1000
_MAX_TARGET_BYTES = 16 << 10
"""The events of an action have its target, and an event has at most 64 KiB."""
_MAX_PID = 2**31 - 1
_PID = re.compile(r"([1-9][0-9]{0,9})(@[0-9]{1,20}(:[0-9]{1,10}(:[0-9a-z.]{1,64})?)?)?")
_ACTIONS_OF_OPTION = {
    "fraction": ("set_memory_fraction",),
    "force": ("empty_cache", "set_memory_fraction", "terminate"),
    "collect_garbage": ("empty_cache",),
    "settle_seconds": ("empty_cache",),
}
"""The only actions that accept each of these fields."""


_Given = str | int | Sequence[str | int] | None


@dataclass(frozen=True, slots=True, init=False)
class Target:
    """The processes and devices that a request selects.

    A field admits each of its values; an empty one admits everything. Different fields narrow each other.
    """

    gpu: tuple[str, ...]
    uuid: tuple[str, ...]
    pid: tuple[str, ...]
    """Names of `core.naming`: "4711", or "1@4026532007:1001"."""
    workload: tuple[str, ...]
    rank: tuple[str, ...]
    user: tuple[str, ...]
    """The names or the uids of users."""
    all: bool

    def __init__(
        self,
        *,
        gpu: _Given = None,
        uuid: _Given = None,
        pid: _Given = None,
        workload: _Given = None,
        rank: _Given = None,
        user: _Given = None,
        all: bool = False,  # noqa: A002 - the name in the API
    ) -> None:
        given = {"gpu": gpu, "uuid": uuid, "pid": pid, "workload": workload, "rank": rank, "user": user}
        for name, value in given.items():
            object.__setattr__(self, name, _values(value))
        object.__setattr__(self, "all", all)

    def admits(self, selector: str, *values: str) -> bool:
        """Return whether one of a process's values is among those of a field."""
        wanted = getattr(self, selector)
        return not wanted or any(value in wanted for value in values)

    def given(self) -> dict[str, tuple[str, ...]]:
        """Return the fields that narrow the target."""
        return {name: values for name in SELECTORS if (values := getattr(self, name))}

    def document(self) -> dict[str, Any]:
        """Return the target as JSON: several values are a list, and a pid is a number if possible."""
        given = {
            name: [_json_pid(v) for v in values] if name == "pid" else list(values)
            for name, values in self.given().items()
        }
        selected = {name: values if len(values) > 1 else values[0] for name, values in given.items()}
        return {**selected, "all": True} if self.all else selected

    def describe(self) -> str:
        """Return the target as a caller writes it: `gpu=0,1 workload=llm`."""
        return " ".join(f"{name}={','.join(values)}" for name, values in self.given().items()) or "all"


@dataclass(frozen=True, slots=True)
class ActionRequest:
    """A request for an action. Inside the exporter, it has passed `invalid_fields`."""

    action: str
    target: Target
    mode: str = "now"
    """One of `protocol.MODES`."""
    group: bool = False
    """Every rank of the target's workload acts after the same step."""
    at_step: int | None = None
    """The step of a group. If None, the dispatcher chooses one that no rank has reached."""
    collect_garbage: bool = False
    """For `empty_cache`: run Python's garbage collector first."""
    fraction: float | None = None
    """For `set_memory_fraction`: the share of each device that the allocator may reserve."""
    force: bool = False
    """For `set_memory_fraction`: set the fraction even if more is reserved already. For `empty_cache` and `terminate`:
    do not wait until the inference engines on the devices have started."""
    deadline_seconds: float = DEFAULT_DEADLINE_SECONDS
    settle_seconds: float = 0.0
    """For `empty_cache`: when to measure how much of the freed memory is still free. 0: never."""
    dry_run: bool = False
    reason: str = ""


@dataclass(frozen=True, slots=True)
class InvalidField:
    """A field of a request that is invalid."""

    field: str
    """The path as in the API: `target.pid`."""
    value: object
    expected: str

    @property
    def message(self) -> str:
        """The error without the field's name."""
        if self.value is None:
            return f"is missing: expected {self.expected}"
        return f"{_shortened(self.value)} is invalid: expected {self.expected}"


def mode_for(mode: str | None, *, group: bool) -> str:
    """Return the requested mode, or the default one if none is requested."""
    return mode or ("step" if group else "now")


def invalid_fields(request: ActionRequest) -> tuple[InvalidField, ...]:
    """Return what is invalid in a request whose fields have the right types; empty for a valid request."""
    return (*_invalid_target(request.target), *_invalid_values(request), *_invalid_combinations(request))


def _invalid_target(target: Target) -> Iterator[InvalidField]:
    given = target.given()
    size = len(json.dumps(target.document()))
    if size > _MAX_TARGET_BYTES:
        yield InvalidField("target", size, f"at most {_MAX_TARGET_BYTES} bytes of JSON")
    if not target.all and not given:
        yield InvalidField("target", {}, f"{', '.join(SELECTORS[:-1])} or {SELECTORS[-1]}, or all: true")
    for name, values in given.items():
        if len(values) > _MAX_VALUES:
            yield InvalidField(f"target.{name}", len(values), f"at most {_MAX_VALUES} values")
            continue
        for value in values:
            expected = _expected_pid(value) if name == "pid" else _expected_name(name, value)
            if expected:
                yield InvalidField(f"target.{name}", value, expected)
                break


def _expected_name(selector: str, value: str) -> str:
    """Return what is expected instead of a name; empty if the name is valid."""
    # An empty workload or rank selects processes without one. Another empty name is usually an unset variable.
    shortest = 0 if selector in ("workload", "rank") else 1
    return "" if shortest <= len(value) <= MAX_LABEL_LENGTH else f"{shortest} to {MAX_LABEL_LENGTH} characters"


def _expected_pid(value: str) -> str:
    found = _PID.fullmatch(value)
    valid = found is not None and int(found[1]) <= _MAX_PID
    return "" if valid else f"an integer from 1 to {_MAX_PID}, or a string such as 1@4026532007:1001"


def _invalid_values(request: ActionRequest) -> Iterator[InvalidField]:
    if request.action not in ACTIONS:
        yield InvalidField("action", request.action, ", ".join(ACTIONS))
    if request.mode not in MODES:
        yield InvalidField("mode", request.mode, ", ".join(MODES))
    if request.at_step is not None and not 1 <= request.at_step <= MAX_INTEGER:
        yield InvalidField("at_step", request.at_step, f"an integer from 1 to {MAX_INTEGER}")
    if request.fraction is not None and not 0 < request.fraction <= 1:
        yield InvalidField("fraction", request.fraction, "a number over 0 and at most 1")
    if not (math.isfinite(request.deadline_seconds) and 0 < request.deadline_seconds <= MAX_DEADLINE_SECONDS):
        expected = f"a finite number of seconds over 0 and at most {MAX_DEADLINE_SECONDS:g}"
        yield InvalidField("deadline_seconds", request.deadline_seconds, expected)
    if not (math.isfinite(request.settle_seconds) and 0 <= request.settle_seconds <= MAX_SETTLE_SECONDS):
        expected = f"a finite number of seconds from 0 to {MAX_SETTLE_SECONDS:g}"
        yield InvalidField("settle_seconds", request.settle_seconds, expected)
    if len(request.reason) > MAX_REASON_LENGTH:
        yield InvalidField("reason", request.reason, f"at most {MAX_REASON_LENGTH} characters")


def _invalid_combinations(request: ActionRequest) -> Iterator[InvalidField]:
    """Check the combination of fields that are valid by themselves."""
    if request.group and request.mode in ("now", "idle"):
        yield InvalidField("mode", request.mode, "step, because a group acts at the end of a step")
    elif request.action == "terminate" and request.mode in ("step", "idle"):
        yield InvalidField("mode", request.mode, "now, because terminate has no other mode")
    if request.at_step is not None and not request.group:
        yield InvalidField("at_step", request.at_step, "no value without group: true")
    if request.action == "set_memory_fraction" and request.fraction is None:
        yield InvalidField("fraction", None, "a number over 0 and at most 1")
    for name, actions in _ACTIONS_OF_OPTION.items():
        value = getattr(request, name)
        if value not in (None, False) and request.action in ACTIONS and request.action not in actions:
            verb = "accept" if len(actions) > 1 else "accepts"
            yield InvalidField(name, value, f"no value, because only {' and '.join(actions)} {verb} it")


def _values(given: _Given) -> tuple[str, ...]:
    if given is None:
        return ()
    values = (given,) if isinstance(given, (str, int)) else given
    return tuple(dict.fromkeys(map(str, values)))


def _json_pid(pid: str) -> int | str:
    return int(pid) if _PID.fullmatch(pid) and pid.isdecimal() else pid


def _shortened(value: object) -> str:
    return repr(value[:64]) if isinstance(value, str) else repr(value)
