"""A request for an action, the limits of its fields, and their one validator.

The HTTP API, alerts, the policy file and the command line build an `ActionRequest` and call `invalid_fields`. This
module imports the standard library only, besides the protocol.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from dataclasses import dataclass, fields

from gpumem_exporter.wire.protocol import MAX_INTEGER, MAX_LABEL_LENGTH, MODES

__all__ = [
    "ACTIONS",
    "DEFAULT_ACTIONS",
    "DEFAULT_DEADLINE_SECONDS",
    "MAX_DEADLINE_SECONDS",
    "MAX_REASON_LENGTH",
    "MAX_SETTLE_SECONDS",
    "ActionRequest",
    "InvalidField",
    "Target",
    "invalid_fields",
    "mode_for",
    "pid_of",
]

ACTIONS = ("empty_cache", "collect_garbage", "reset_peak", "snapshot", "set_memory_fraction", "terminate")
DEFAULT_ACTIONS = tuple(action for action in ACTIONS if action != "terminate")
"""The actions that the exporter allows by default: those that end no process."""
DEFAULT_DEADLINE_SECONDS = 30.0
MAX_DEADLINE_SECONDS = 3600.0
MAX_SETTLE_SECONDS = 3600.0
MAX_REASON_LENGTH = 1000

_MAX_PID = 2**31 - 1
_PID_IN_NAMESPACE = re.compile(r"[0-9]{1,10}@[0-9]{1,20}(:[0-9]{1,10})?")
_ACTION_OF_OPTION = {
    "fraction": "set_memory_fraction",
    "force": "set_memory_fraction",
    "collect_garbage": "empty_cache",
    "settle_seconds": "empty_cache",
}
"""The only action that accepts each of these fields."""


@dataclass(frozen=True, slots=True)
class Target:
    """The processes and devices that a request selects. Several fields narrow each other."""

    gpu: str | None = None
    uuid: str | None = None
    pid: int | str | None = None
    """A name of `core.naming`: 4711, or "1@4026532007"."""
    workload: str | None = None
    rank: str | None = None
    all: bool = False

    def describe(self) -> str:
        """Return the target as a caller writes it: `gpu=0 workload=llm`."""
        given = ((f.name, getattr(self, f.name)) for f in fields(self))
        return " ".join(f"{name}={value}" for name, value in given if value not in (None, False)) or "all"


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
    """For `set_memory_fraction`: set the fraction even if more is reserved already."""
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


def pid_of(text: str) -> int | str:
    """Return a pid from text: a number, or the text if it has a namespace. `invalid_fields` checks the result."""
    return int(text) if text.isascii() and text.isdecimal() and len(text) <= len(str(_MAX_PID)) else text


def invalid_fields(request: ActionRequest) -> tuple[InvalidField, ...]:
    """Return what is invalid in a request whose fields have the right types; empty for a valid request."""
    return (*_invalid_target(request.target), *_invalid_values(request), *_invalid_combinations(request))


def _invalid_target(target: Target) -> Iterator[InvalidField]:
    selectors = ("gpu", "uuid", "pid", "workload", "rank")
    if not target.all and all(getattr(target, name) is None for name in selectors):
        yield InvalidField("target", {}, "gpu, uuid, pid, workload or rank, or all: true")
    # An empty gpu or uuid is usually an unset variable. An empty workload or rank selects processes without one.
    for name, shortest in (("gpu", 1), ("uuid", 1), ("workload", 0), ("rank", 0)):
        value = getattr(target, name)
        if value is not None and not shortest <= len(value) <= MAX_LABEL_LENGTH:
            yield InvalidField(f"target.{name}", value, f"{shortest} to {MAX_LABEL_LENGTH} characters")
    pid = target.pid
    if pid is not None and not (_PID_IN_NAMESPACE.fullmatch(pid) if isinstance(pid, str) else 1 <= pid <= _MAX_PID):
        yield InvalidField("target.pid", pid, f"an integer from 1 to {_MAX_PID}, or a string such as 1@4026532007")


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
    for name, action in _ACTION_OF_OPTION.items():
        value = getattr(request, name)
        if value not in (None, False) and request.action in ACTIONS and request.action != action:
            yield InvalidField(name, value, f"no value, because only {action} accepts it")


def _shortened(value: object) -> str:
    return repr(value[:64]) if isinstance(value, str) else repr(value)
