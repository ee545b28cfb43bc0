"""Reads the rules of `--policy.file`: every key and value is checked, and what is wrong is told with its line."""

from __future__ import annotations

import re
from collections.abc import Collection
from pathlib import Path
from typing import TYPE_CHECKING

from gpumem_exporter.actions.policy.figures import FIELDS
from gpumem_exporter.actions.policy.model import DEFAULT_COOLDOWN_SECONDS, FREEING, Condition, Rule, StopAfter
from gpumem_exporter.actions.policy.values import shown_value
from gpumem_exporter.actions.policy.yaml_nodes import NodeReader, is_scalar, line_of
from gpumem_exporter.actions.request import ACTIONS, ActionRequest, Target
from gpumem_exporter.wire.protocol import MODES

if TYPE_CHECKING:
    from yaml.nodes import Node

__all__ = ["MAX_RULES", "read_policy"]

MAX_RULES = 100

_RULE_KEYS = ("name", "workloads", "when", "for", "do", "cooldown", "max_per_hour", "stop_after", "dry_run")
_DO_KEYS = ("action", "mode", "group", "collect_garbage", "fraction", "force", "deadline")
_STOP_KEYS = ("clears", "freed_under", "still_free_after")
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,63}")

DAY_SECONDS = 86400.0
MAX_DEADLINE_SECONDS = 3600.0


def read_policy(path: Path, *, allowed: Collection[str]) -> tuple[Rule, ...]:
    """Read the rules of a file. May block on the disk.

    Args:
        path: the file.
        allowed: the actions of `--action.allow`.

    Raises:
        ConfigurationError: one line that names the file, the line, what is wrong and what would be right.
    """
    return _Reader(path, allowed).rules()


class _Reader(NodeReader):
    def __init__(self, path: Path, allowed: Collection[str]) -> None:
        super().__init__(path)
        self._allowed = allowed

    def rules(self) -> tuple[Rule, ...]:
        root = self.compose()
        listed = self.mapping(root, ("rules",), ("rules",))["rules"]
        nodes = self.sequence(listed, "rules")
        if len(nodes) > MAX_RULES:
            self.fail(listed, f"{len(nodes)} rules; at most {MAX_RULES} are taken")
        rules: dict[str, Rule] = {}
        for node in nodes:
            rule = self._rule(node)
            if rule.name in rules:
                self.fail(node, f"the rule {rule.name!r} is there twice, first in line {rules[rule.name].line}")
            rules[rule.name] = rule
        return tuple(rules.values())

    def _rule(self, node: Node) -> Rule:
        given = self.mapping(node, _RULE_KEYS, ("name", "workloads", "when", "do"), "a rule")
        name = self.text(given["name"], "name")
        if not _NAME.fullmatch(name):
            self.fail(
                given["name"], f"name: {name[:64]!r} is not right: expected letters, digits and _ . -, at most 64"
            )
        asks = self._asks(given["do"])
        seconds = {
            key: self.number(given[key], key, "seconds", least, most)
            for key, least, most in (("for", 0.0, DAY_SECONDS), ("cooldown", 1.0, DAY_SECONDS))
            if key in given
        }
        return Rule(
            name=name,
            when=self._when(given["when"]),
            asks=asks,
            workloads=self._workloads(given["workloads"]),
            for_seconds=seconds.get("for", 0.0),
            cooldown_seconds=seconds.get("cooldown", DEFAULT_COOLDOWN_SECONDS),
            max_per_hour=self.count(given, "max_per_hour", 12, 600),
            stop_after=self._stop_after(given.get("stop_after"), asks.action),
            dry_run=self.flag(given, "dry_run", default=True),
            line=line_of(node),
        )

    def _when(self, node: Node) -> tuple[Condition, ...]:
        fields = self.mapping(node, tuple(FIELDS), (), "when")
        if not fields:
            self.fail(node, f"when: expected at least one of {', '.join(FIELDS)}")
        return tuple(self._condition(field, bounds) for field, bounds in fields.items())

    def _condition(self, field: str, node: Node) -> Condition:
        unit = FIELDS[field].unit
        bounds = self.mapping(node, ("over", "under"), (), field)
        if not bounds:
            self.fail(node, f"{field}: expected over, under or both")
        read = {key: self.number(bounds[key], f"{field}: {key}", unit) for key in bounds}
        condition = Condition(field, **read)
        if condition.over >= condition.under:
            self.fail(node, f"{field}: nothing is over {shown_value(condition.over, unit)} and under "
                       f"{shown_value(condition.under, unit)}")  # fmt: skip
        return condition

    def _asks(self, node: Node) -> ActionRequest:
        given = self.mapping(node, _DO_KEYS, ("action",), "do")
        action = self.choice(given["action"], "action", ACTIONS)
        if action not in self._allowed:
            allowed = ", ".join(sorted(self._allowed)) or "none"
            self.fail(given["action"], f"action: {action} is not allowed here; --action.allow has {allowed}")
        group = self.flag(given, "group", default=False)
        mode = self.choice(given["mode"], "mode", MODES) if "mode" in given else "step" if group else "now"
        if group and mode != "step":
            self.fail(given["mode"], f"mode: a group acts at the end of a step: step, or left out, not {mode}")
        if action == "terminate" and (group or mode != "now"):
            self.fail(given.get("mode", given["action"]), "mode: a process is terminated now, or not at all")
        if ("fraction" in given) != (action == "set_memory_fraction"):
            wrong = "is for set_memory_fraction alone" if "fraction" in given else "is missing: over 0, at most 1"
            self.fail(given.get("fraction", node), f"fraction: {wrong}")
        for key, owner in (("collect_garbage", "empty_cache"), ("force", "set_memory_fraction")):
            if key in given and action != owner:
                self.fail(given[key], f"{key}: is for {owner} alone")
        deadline = 30.0
        if "deadline" in given:
            deadline = self.number(given["deadline"], "deadline", "seconds", 0.1, MAX_DEADLINE_SECONDS)
        return ActionRequest(
            action=action,
            target=Target(),
            mode=mode,
            group=group,
            collect_garbage=self.flag(given, "collect_garbage", default=False),
            fraction=self.number(given["fraction"], "fraction", "ratio", 1e-6) if "fraction" in given else None,
            force=self.flag(given, "force", default=False),
            deadline_seconds=deadline,
        )

    def _stop_after(self, node: Node | None, action: str) -> StopAfter | None:
        if node is None:
            return StopAfter() if action in FREEING else None
        if action not in FREEING:
            self.fail(node, f"stop_after: is for {' and '.join(FREEING)} alone")
        if is_scalar(node) and node.value == "never":
            return None
        given = self.mapping(node, _STOP_KEYS, (), "stop_after")
        default = StopAfter()
        freed, still = given.get("freed_under"), given.get("still_free_after")
        return StopAfter(
            clears=self.count(given, "clears", default.clears, 100),
            freed_under_bytes=default.freed_under_bytes
            if freed is None
            else self.number(freed, "freed_under", "bytes", 1.0),
            still_free_seconds=None
            if still is None
            else self.number(still, "still_free_after", "seconds", 1.0, DAY_SECONDS),
        )

    def _workloads(self, node: Node) -> tuple[str, ...]:
        patterns = tuple(self.text(item, "workloads") for item in self.sequence(node, "workloads"))
        if not patterns:
            self.fail(node, 'workloads: expected names or patterns, such as [notebook-*]; ["*"] is every workload')
        return patterns
