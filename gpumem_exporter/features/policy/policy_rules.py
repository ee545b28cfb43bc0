"""The rules of a policy, as the file `--policy.file` has them."""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Collection
from dataclasses import replace
from fnmatch import fnmatchcase
from functools import cached_property
from math import inf, isinf
from pathlib import Path
from typing import Annotated, Any, NamedTuple

from pydantic import (
    AfterValidator,
    BeforeValidator,
    Field,
    PlainValidator,
    ValidationInfo,
    create_model,
    model_validator,
)
from typing_extensions import Self

from gpumem_exporter.actions.action_options import (
    ACTIONS,
    GROUP_IS_DEPRECATED,
    MAX_SETTLE_SECONDS,
    OPTIONS,
    ActionRequest,
    Target,
    invalid_fields,
)
from gpumem_exporter.actions.engines import MIN_IDLE_SECONDS
from gpumem_exporter.core.spelling import did_you_mean
from gpumem_exporter.core.yaml_file import FileSection, Flag, YamlFile, section_error
from gpumem_exporter.features.policy.policy_values import FIELDS, Observation, read_quantity, shown_quantity

_log = logging.getLogger(__name__)

MAX_RULES = 100
_DAY_SECONDS = 86400.0
# The actions that release memory to the driver, of which some may be taken again soon.
_RELEASING = ("empty_cache", "release_memory")
# The actions that free memory: a rule may find that they do not help.
_FREEING = (*_RELEASING, "collect_garbage")
# The options of a request that a rule may set, by key. A time in a file has its unit, so that its key has none.
_OPTION_OF = {
    **{name: name for name in ("mode", "group", "collect_garbage", "fraction", "force", "keep")},
    "wait_idle": "wait_idle_seconds",
    "deadline": "deadline_seconds",
    "duration": "duration_seconds",
    "search": "search_seconds",
}


def read_policy(path: Path, *, allowed: Collection[str]) -> tuple[Rule, ...]:
    """Read the rules of a file, whose actions `--action.allow` must have. May block on the disk.

    Raises ConfigurationError: one line with the file, the line, the error and what is accepted.
    """
    file = YamlFile(path, "policy file")
    rules = file.read(_Policy, allowed).rules
    first: dict[str, int] = {}
    for index, rule in enumerate(rules):
        if rule.name in first:
            twice = f"the rule {rule.name!r} appears twice, first in line {first[rule.name]}"
            raise file.error(("rules", index), twice, of=())
        if rule.request.group:
            _log.warning(GROUP_IS_DEPRECATED, extra={"fields": {"rule": rule.name}})
        first[rule.name] = file.line(("rules", index))
    return tuple(rules)


def _quantity(unit: str, least: float = 0.0, most: float = inf) -> Callable[[object], float]:
    """Return what reads a number with its unit, such as `4GiB`."""

    def read(text: object) -> float:
        if not isinstance(text, str):
            raise ValueError("expected a string")  # noqa: TRY004 - pydantic takes a ValueError
        try:
            value = read_quantity(text, unit)
        except ValueError as error:
            raise ValueError(f"expected {error}") from None
        if value < least:
            raise ValueError(f"expected at least {shown_quantity(least, unit)}")
        if value > most:
            raise ValueError(f"expected at most {shown_quantity(most, unit)}")
        return value

    return read


def _require(valid: Callable[[Any], object], expected: str) -> AfterValidator:
    def check(value: Any) -> Any:
        if not valid(value):
            raise ValueError(f"expected {expected}")
        return value

    return AfterValidator(check)


class Condition(NamedTuple):
    """A value is strictly between two bounds. An unknown value never is."""

    field: str
    """A key of `policy_values.FIELDS`."""
    over: float = -inf
    under: float = inf

    def is_met(self, seen: Observation) -> bool:
        """Return whether the condition is true."""
        value = FIELDS[self.field].of(seen)
        return value is not None and self.over < value < self.under

    def shown(self, seen: Observation) -> str:
        """Format the value, which is known, and its bounds."""
        field = FIELDS[self.field]
        bounds = " and ".join(
            f"{word} {shown_quantity(bound, field.unit)}"
            for word, bound in (("over", self.over), ("under", self.under))
            if not isinf(bound)
        )
        return f"{self.field} {shown_quantity(field.of(seen) or 0, field.unit)} ({bounds})"


def _read_conditions(given: object) -> tuple[Condition, ...]:
    fields = ", ".join(FIELDS)
    if not isinstance(given, dict) or not given:
        raise ValueError(f"expected at least one of {fields}")
    conditions = []
    for name, bounds in given.items():
        if name not in FIELDS:
            advice = did_you_mean(name, FIELDS, f"the keys are {fields}")
            raise section_error(name, f"unknown key {name[:64]!r}; {advice}")
        if not isinstance(bounds, dict) or not bounds or not bounds.keys() <= {"over", "under"}:
            raise section_error(name, f"{name}: expected over, under or both, not {str(bounds)[:64]!r}")
        unit = FIELDS[name].unit
        try:
            condition = Condition(name, **{key: _quantity(unit)(text) for key, text in bounds.items()})
        except ValueError as error:
            raise section_error(name, f"{name}: {str(bounds)[:64]} is invalid: {error}") from None
        if condition.over >= condition.under:
            over, under = shown_quantity(condition.over, unit), shown_quantity(condition.under, unit)
            raise section_error(name, f"{name}: no value is over {over} and under {under}")
        conditions.append(condition)
    return tuple(conditions)


def _type_of(name: str) -> Any:
    option = OPTIONS[name]
    if option.unit:
        return Annotated[float, BeforeValidator(_quantity(option.unit))]
    return Flag if option.kind is bool else str


_OPTION_FIELDS: dict[str, Any] = {key: (_type_of(name), None) for key, name in _OPTION_OF.items()}
_Options: Any = create_model("_Options", __base__=FileSection, **_OPTION_FIELDS)


class _Do(_Options):  # type: ignore[misc]
    action: str

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
        given = {_OPTION_OF[key]: getattr(self, key) for key in self.model_fields_set - {"action"}}
        return ActionRequest(self.action, Target(pid=1), **given)  # the process that the rule finds replaces the target


class StopAfter(FileSection):
    """When a rule stops for a process: after several consecutive actions that did not help."""

    clears: Annotated[int, Field(ge=1, le=100)] = 3
    freed_under: Annotated[float, BeforeValidator(_quantity("bytes", least=1.0))] = float(64 << 20)
    """An action that released less than this did not help."""
    still_free_after: Annotated[float, BeforeValidator(_quantity("seconds", most=MAX_SETTLE_SECONDS))] = 10.0
    """Of a clear, only what is still free after this settling time counts. 0: everything that it released counts."""
    resume_after: Annotated[float, BeforeValidator(_quantity("seconds", 1.0))] = _DAY_SECONDS
    """The rule acts again after this time since the last action."""


class Rule(FileSection):
    """One rule. It is evaluated for each process on each device."""

    name: Annotated[
        str,
        _require(re.compile("[A-Za-z0-9][A-Za-z0-9_.-]{0,63}").fullmatch, "letters, digits and _ . -, at most 64"),
    ]
    workloads: Annotated[list[str], _require(len, 'names or patterns, such as [notebook-*]; ["*"] is every workload')]
    """The workloads of the rule, as shell patterns."""
    when: Annotated[tuple[Condition, ...], PlainValidator(_read_conditions)]
    """All of them must be true."""
    trigger: Annotated[str, _require(("conditions", "alert").__contains__, "conditions or alert")] = "conditions"
    """`alert`: the rule acts only if an alert names it, on a process that meets the conditions at that moment."""
    for_seconds: Annotated[float, BeforeValidator(_quantity("seconds", most=_DAY_SECONDS)), Field(alias="for")] = 0.0
    """All conditions must have been true for this time, without a break."""
    do: _Do
    cooldown: Annotated[float, BeforeValidator(_quantity("seconds", 1.0, _DAY_SECONDS))] = 300.0
    """The seconds between two actions on a process, whatever the result of the first one."""
    max_per_hour: Annotated[int, Field(ge=1, le=600)] = 12
    """The number of actions per hour on this node."""
    stop_after: Annotated[StopAfter | None, BeforeValidator(lambda text: None if text == "never" else text)] = (
        StopAfter()
    )
    """None: never. It is for the actions of `_FREEING` only."""
    dry_run: Flag = True

    @model_validator(mode="after")
    def _check_stop(self) -> Self:
        stop = self.stop_after
        if self.do.action not in _FREEING:
            if "stop_after" in self.model_fields_set:
                raise section_error("stop_after", f"stop_after: only {' and '.join(_FREEING)} accept it")
            object.__setattr__(self, "stop_after", None)
        elif self.do.action not in _RELEASING and stop is not None and "still_free_after" in stop.model_fields_set:
            raise section_error("stop_after", f"still_free_after: only {' and '.join(_RELEASING)} accept it")
        if self.cooldown < self.settle_seconds:
            settle, cooldown = (shown_quantity(seconds, "seconds") for seconds in (self.settle_seconds, self.cooldown))
            expected = f"at least still_free_after of stop_after, which is {settle}"
            raise section_error("cooldown", f"cooldown: {cooldown!r} is invalid: expected {expected}")
        return self

    @model_validator(mode="after")
    def _check_idle_engine(self) -> Self:
        idle_seconds = max((each.over for each in self.when if each.field == "engine_idle_seconds"), default=0.0)
        if self.do.action == "release_memory" and not self.do.request.force and idle_seconds < MIN_IDLE_SECONDS:
            expected = f"engine_idle_seconds over at least {shown_quantity(MIN_IDLE_SECONDS, 'seconds')}"
            raise section_error("when", f"when: release_memory expects {expected}")
        return self

    @property
    def settle_seconds(self) -> float:
        """The time after which it counts how much of the released memory is still free; 0 if that does not count."""
        releases = self.do.action in _RELEASING
        return self.stop_after.still_free_after if releases and self.stop_after is not None else 0.0

    @cached_property
    def request(self) -> ActionRequest:
        """The requested action; its target is replaced by the process."""
        return replace(self.do.request, settle_seconds=self.settle_seconds)

    def concerns(self, workload: str) -> bool:
        """Return whether the rule is for this workload. Only `*` matches processes without one."""
        if not workload:
            return "*" in self.workloads
        return any(fnmatchcase(workload, pattern) for pattern in self.workloads)

    def is_met(self, seen: Observation) -> bool:
        """Return whether all conditions are true."""
        return all(condition.is_met(seen) for condition in self.when)

    def reason(self, seen: Observation) -> str:
        """Return the values that met the conditions, for the audit log."""
        return ", ".join(condition.shown(seen) for condition in self.when)


class _Policy(FileSection):
    rules: Annotated[list[Rule], Field(max_length=MAX_RULES)]
