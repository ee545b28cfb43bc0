"""Reads the rules of `--policy.file`."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from dataclasses import replace
from math import inf
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gpumem_exporter.actions.policy.model import (
    DEFAULT_COOLDOWN_SECONDS,
    DEFAULT_STILL_FREE_SECONDS,
    FREEING,
    Condition,
    Rule,
    StopAfter,
)
from gpumem_exporter.actions.policy.quantities import read_quantity, shown_quantity
from gpumem_exporter.actions.policy.values import FIELDS
from gpumem_exporter.actions.request import (
    ACTIONS,
    MAX_SETTLE_SECONDS,
    OPTIONS,
    ActionRequest,
    Target,
    invalid_fields,
)
from gpumem_exporter.core.yaml_file import YamlReader, is_scalar, line_of

if TYPE_CHECKING:
    from yaml.nodes import Node

__all__ = ["MAX_RULES", "read_policy"]

MAX_RULES = 100

_RULE_KEYS = ("name", "workloads", "when", "for", "do", "cooldown", "max_per_hour", "stop_after", "dry_run")
_DO_KEYS = ("action", "mode", "group", "collect_garbage", "fraction", "force", "deadline")
_SECONDS = {"deadline": "deadline_seconds"}
"""A time in a file has its unit, so that its key has none."""
_STOP_KEYS = ("clears", "freed_under", "still_free_after")
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,63}")
_DAY_SECONDS = 86400.0


def read_policy(path: Path, *, allowed: Collection[str]) -> tuple[Rule, ...]:
    """Read the rules of a file. May block on the disk.

    Args:
        path: the file.
        allowed: the actions of `--action.allow`.

    Raises:
        ConfigurationError: the file is invalid; one line with the file, the line, the error and what is accepted.
    """
    return _Reader(path, allowed).rules()


class _Reader(YamlReader):
    def __init__(self, path: Path, allowed: Collection[str]) -> None:
        super().__init__(path, "policy file")
        self._allowed = allowed

    def rules(self) -> tuple[Rule, ...]:
        root = self.root("the key rules, with a list of them")
        listed = self.mapping(root, ("rules",), ("rules",))["rules"]
        nodes = self.sequence(listed, "rules")
        if len(nodes) > MAX_RULES:
            self.fail(listed, f"rules: {len(nodes)} rules; at most {MAX_RULES} are accepted")
        rules: dict[str, Rule] = {}
        for node in nodes:
            rule = self._rule(node)
            if rule.name in rules:
                self.fail(node, f"the rule {rule.name!r} appears twice, first in line {rules[rule.name].line}")
            rules[rule.name] = rule
        return tuple(rules.values())

    def _rule(self, node: Node) -> Rule:
        given = self.mapping(node, _RULE_KEYS, ("name", "workloads", "when", "do"), "a rule")
        name = self.text(given["name"], "name")
        if not _NAME.fullmatch(name):
            self.fail_value(given["name"], "name", name, "letters, digits and _ . -, at most 64")
        request = self._request(given["do"])
        stop_after = self._stop_after(given.get("stop_after"), request.action)
        cooldown_seconds = self._number(given, "cooldown", "seconds", DEFAULT_COOLDOWN_SECONDS, 1.0, _DAY_SECONDS)
        settle_seconds = stop_after.still_free_seconds if stop_after is not None else 0.0
        if cooldown_seconds < settle_seconds:
            at_least = f"at least still_free_after of stop_after, which is {shown_quantity(settle_seconds, 'seconds')}"
            shown = shown_quantity(cooldown_seconds, "seconds")
            self.fail_value(given.get("cooldown", node), "cooldown", shown, at_least)
        return Rule(
            name=name,
            when=self._when(given["when"]),
            request=replace(request, settle_seconds=settle_seconds),
            workloads=self._workloads(given["workloads"]),
            for_seconds=self._number(given, "for", "seconds", 0.0, most=_DAY_SECONDS),
            cooldown_seconds=cooldown_seconds,
            max_per_hour=self.count(given, "max_per_hour", 12, 600),
            stop_after=stop_after,
            dry_run=self.flag(given, "dry_run", default=True),
            line=line_of(node),
        )

    def _workloads(self, node: Node) -> tuple[str, ...]:
        patterns = tuple(self.text(item, "workloads") for item in self.sequence(node, "workloads"))
        if not patterns:
            self.fail(node, 'workloads: expected names or patterns, such as [notebook-*]; ["*"] is every workload')
        return patterns

    def _when(self, node: Node) -> tuple[Condition, ...]:
        fields = self.mapping(node, tuple(FIELDS), what="when")
        if not fields:
            self.fail(node, f"when: expected at least one of {', '.join(FIELDS)}")
        return tuple(self._condition(field, bounds) for field, bounds in fields.items())

    def _condition(self, field: str, node: Node) -> Condition:
        unit = FIELDS[field].unit
        bounds = self.mapping(node, ("over", "under"), what=field)
        if not bounds:
            self.fail(node, f"{field}: expected over, under or both")
        condition = Condition(field, **{key: self._quantity(bounds[key], f"{field}: {key}", unit) for key in bounds})
        if condition.over >= condition.under:
            over, under = shown_quantity(condition.over, unit), shown_quantity(condition.under, unit)
            self.fail(node, f"{field}: no value is over {over} and under {under}")
        return condition

    def _request(self, node: Node) -> ActionRequest:
        """Return the request of a rule, with a target that each decision replaces."""
        given = self.mapping(node, _DO_KEYS, ("action",), "do")
        action = self.choice(given["action"], "action", ACTIONS)
        if action not in self._allowed:
            allowed = ", ".join(sorted(self._allowed)) or "none"
            self.fail(given["action"], f"action: {action} is not allowed here; --action.allow has {allowed}")
        values = {_SECONDS.get(key, key): self._option(node, key) for key, node in given.items() if key != "action"}
        request = ActionRequest(action, Target(all=True), **values)
        for invalid in invalid_fields(request):
            key = invalid.field.removesuffix("_seconds")
            self.fail(given.get(key, node), f"{key}: {invalid.message}")
        return request

    def _option(self, node: Node, key: str) -> Any:
        option = OPTIONS[_SECONDS.get(key, key)]
        if option.unit:
            return self._quantity(node, key, option.unit)
        choice = self.choice(node, key, option.choices or ("true", "false"))
        return choice if option.choices else choice == "true"

    def _stop_after(self, node: Node | None, action: str) -> StopAfter | None:
        clears = action == "empty_cache"  # no other action releases memory to the driver
        default = StopAfter(still_free_seconds=DEFAULT_STILL_FREE_SECONDS if clears else 0.0)
        if node is None:
            return default if action in FREEING else None
        if action not in FREEING:
            self.fail(node, f"stop_after: only {' and '.join(FREEING)} accept it")
        if is_scalar(node) and node.value == "never":
            return None
        given = self.mapping(node, _STOP_KEYS, what="stop_after")
        if "still_free_after" in given and not clears:
            self.fail(given["still_free_after"], "still_free_after: only empty_cache accepts it")
        return StopAfter(
            clears=self.count(given, "clears", default.clears, 100),
            freed_under_bytes=self._number(given, "freed_under", "bytes", default.freed_under_bytes, least=1.0),
            still_free_seconds=self._number(
                given, "still_free_after", "seconds", default.still_free_seconds, most=MAX_SETTLE_SECONDS
            ),
        )

    def _number(
        self, given: Mapping[str, Node], key: str, unit: str, default: float, least: float = 0.0, most: float = inf
    ) -> float:
        return self._quantity(given[key], key, unit, least, most) if key in given else default

    def _quantity(self, node: Node, key: str, unit: str, least: float = 0.0, most: float = inf) -> float:
        """Return a number with its unit, such as `4GiB`."""
        text = self.text(node, key)
        try:
            value = read_quantity(text, unit)
        except ValueError as error:
            self.fail_value(node, key, text, str(error))
        if value < least:
            self.fail_value(node, key, text, f"at least {shown_quantity(least, unit)}")
        if value > most:
            self.fail_value(node, key, text, f"at most {shown_quantity(most, unit)}")
        return value
