"""The rules of a policy, as the file `--policy.file` has them."""

from __future__ import annotations

import logging
from collections.abc import Collection, Mapping
from dataclasses import replace
from fnmatch import fnmatchcase
from functools import cached_property, partial
from math import inf, isinf
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, ValidationInfo, create_model, field_validator, model_validator
from typing_extensions import Self

from gpumem_exporter.actions.action_options import (
    ACTIONS,
    GROUP_IS_DEPRECATED,
    MAX_DEADLINE_SECONDS,
    ActionRequest,
    Target,
    invalid_fields,
)
from gpumem_exporter.actions.engines import MIN_IDLE_SECONDS
from gpumem_exporter.core.yaml_file import FileSection, Flag, YamlFile, section_error
from gpumem_exporter.features.policy.policy_values import FIELDS, read_quantity, shown_quantity

_log = logging.getLogger(__name__)

MAX_RULES = 100
_DAY_SECONDS = 86400.0
# The actions that release memory to the driver, of which some may be taken again soon.
_RELEASING = ("empty_cache", "release_memory")
# The actions that free memory: a rule may find that they do not help.
_FREEING = (*_RELEASING, "collect_garbage")

Bytes = Annotated[float, BeforeValidator(partial(read_quantity, unit="bytes"))]
Ratio = Annotated[float, BeforeValidator(partial(read_quantity, unit="ratio"))]
Seconds = Annotated[float, BeforeValidator(partial(read_quantity, unit="seconds"))]


def read_policy(path: str, *, allowed: Collection[str]) -> tuple[Rule, ...]:
    """Read the rules of a file, whose actions `--action.allow` must have; "" has none. May block on the disk.

    Raises ConfigurationError: one line with the file, the line, the error and what is accepted.
    """
    if not path:
        return ()
    file = YamlFile(Path(path), "policy file")
    rules = file.read(_Policy, allowed).rules
    names: list[str] = []
    for index, rule in enumerate(rules):
        if rule.name in names:
            raise file.error(("rules", index), f"another rule has the name {rule.name!r}", of=())
        if rule.request.group:
            _log.warning(GROUP_IS_DEPRECATED, extra={"fields": {"rule": rule.name}})
        names.append(rule.name)
    return tuple(rules)


class Bounds(FileSection):
    """A value is strictly between two bounds."""

    over: float = -inf
    under: float = inf

    @model_validator(mode="after")
    def _check(self) -> Self:
        if not self.model_fields_set or self.over >= self.under:
            raise section_error("", "expected over, under, or both with values between them")
        return self


_CONDITIONS: dict[str, Any] = dict.fromkeys(FIELDS, (Bounds, None))
_Conditions: Any = create_model("_Conditions", __base__=FileSection, **_CONDITIONS)


class When(_Conditions):  # type: ignore[misc]
    """The conditions of a rule, by value. All of them must be true."""

    @field_validator("*", mode="before")
    @classmethod
    def _read_bounds(cls, given: Any, info: ValidationInfo) -> Any:
        if not isinstance(given, dict):
            return given
        return {key: read_quantity(text, FIELDS[info.field_name or ""]) for key, text in given.items()}

    @model_validator(mode="after")
    def _check(self) -> Self:
        if not self.model_fields_set:
            raise section_error("", f"expected at least one of {', '.join(FIELDS)}")
        return self

    @cached_property
    def bounds(self) -> dict[str, Bounds]:
        """The bounds of each value that has a condition."""
        return {name: getattr(self, name) for name in FIELDS if name in self.model_fields_set}

    def is_met(self, values: Mapping[str, float | None]) -> bool:
        """Return whether all conditions are true. An unknown value meets none."""
        found = ((values[name], each) for name, each in self.bounds.items())
        return all(value is not None and each.over < value < each.under for value, each in found)

    def shown(self, values: Mapping[str, float | None]) -> str:
        """Format the values, which are known, and their bounds."""
        texts = []
        for name, each in self.bounds.items():
            show = partial(shown_quantity, unit=FIELDS[name])
            bounds = " and ".join(f"{word} {show(bound)}" for word, bound in each if not isinf(bound))
            texts.append(f"{name} {show(values[name] or 0)} ({bounds})")
        return ", ".join(texts)


class Do(FileSection):
    """The action of a rule, with options of `ActionRequest`. A time has its unit, so that its key has none."""

    action: str
    mode: str | None = None
    group: Flag = False
    collect_garbage: Flag = False
    fraction: Ratio | None = None
    force: Flag = False
    keep: str | None = None
    wait_idle_seconds: Annotated[Seconds, Field(alias="wait_idle")] = 0.0
    deadline_seconds: Annotated[Seconds | None, Field(alias="deadline")] = None
    duration_seconds: Annotated[Seconds, Field(alias="duration")] = 0.0
    search_seconds: Annotated[Seconds, Field(alias="search")] = 0.0

    @model_validator(mode="after")
    def _check(self, info: ValidationInfo) -> Self:
        allowed: Collection[str] = info.context or ()
        if self.action in ACTIONS and self.action not in allowed:
            has = ", ".join(sorted(allowed)) or "none"
            raise section_error("action", f"action: {self.action} is not allowed here; --action.allow has {has}")
        for invalid in invalid_fields(self.request):
            key = invalid.field.removesuffix("_seconds")
            raise section_error(key, f"{key}: {invalid.message}")
        return self

    @property
    def request(self) -> ActionRequest:
        """The requested action. The process that the rule finds replaces the target."""
        return ActionRequest(target=Target(pid=1), **self.model_dump(exclude_unset=True))


class StopAfter(FileSection):
    """When a rule stops for a process: after several consecutive actions that did not help."""

    clears: Annotated[int, Field(ge=1, le=100)] = 3
    freed_under: Annotated[Bytes, Field(ge=1)] = float(64 << 20)
    """An action that released less than this did not help."""
    still_free_after: Annotated[Seconds, Field(le=MAX_DEADLINE_SECONDS)] = 10.0
    """Of a clear, only what is still free after this settling time counts. 0: everything that it released counts."""
    resume_after: Annotated[Seconds, Field(ge=1)] = _DAY_SECONDS
    """The rule acts again after this time since the last action."""


class Rule(FileSection):
    """One rule. It is evaluated for each process on each device."""

    name: Annotated[str, Field(pattern="^[A-Za-z0-9][A-Za-z0-9_.-]{0,63}$")]
    workloads: Annotated[list[str], Field(min_length=1)]
    """The workloads of the rule, as shell patterns."""
    when: When
    trigger: Literal["conditions", "alert"] = "conditions"
    """`alert`: the rule acts only if an alert names it, on a process that meets the conditions at that moment."""
    for_seconds: Annotated[Seconds, Field(alias="for", le=_DAY_SECONDS)] = 0.0
    """All conditions must have been true for this time, without a break."""
    do: Do
    cooldown: Annotated[Seconds, Field(ge=1, le=_DAY_SECONDS)] = 300.0
    """The seconds between two actions on a process, whatever the result of the first one."""
    max_per_hour: Annotated[int, Field(ge=1, le=600)] = 12
    """The number of actions per hour on the processes of one user."""
    stop_after: Annotated[StopAfter | None, BeforeValidator(lambda text: None if text == "never" else text)] = (
        StopAfter()
    )
    """None: never. It has an effect with the actions of `_FREEING` only: see `stop`."""
    dry_run: Flag = True

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.do.action not in _FREEING and "stop_after" in self.model_fields_set:
            raise section_error("stop_after", f"stop_after: only {', '.join(_FREEING)} accept it")
        settle_seconds = self.request.settle_seconds
        if self.cooldown < settle_seconds:
            least = shown_quantity(settle_seconds, "seconds")
            raise section_error("cooldown", f"cooldown: expected at least still_free_after of stop_after, {least}")
        idle = self.when.bounds.get("engine_idle_seconds")
        if self.do.action == "release_memory" and not self.do.force and (not idle or idle.over < MIN_IDLE_SECONDS):
            least = shown_quantity(MIN_IDLE_SECONDS, "seconds")
            raise section_error("when", f"when: release_memory expects engine_idle_seconds over at least {least}")
        return self

    @property
    def stop(self) -> StopAfter | None:
        """When the rule stops for a process; None if it never does."""
        return self.stop_after if self.do.action in _FREEING else None

    @cached_property
    def request(self) -> ActionRequest:
        """The requested action; its target is replaced by the process."""
        releases = self.do.action in _RELEASING
        settle_seconds = self.stop_after.still_free_after if releases and self.stop_after is not None else 0.0
        return replace(self.do.request, dry_run=self.dry_run, settle_seconds=settle_seconds)

    def concerns(self, workload: str) -> bool:
        """Return whether the rule is for this workload; `*` matches also processes without one."""
        return any(fnmatchcase(workload, pattern) for pattern in self.workloads)


class _Policy(FileSection):
    rules: Annotated[list[Rule], Field(max_length=MAX_RULES)]
