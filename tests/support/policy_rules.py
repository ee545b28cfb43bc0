"""Rules of a policy, written with numbers."""

from __future__ import annotations

from math import isinf
from typing import Any

from gpumem_exporter.actions.policy.rules import Condition, Rule
from gpumem_exporter.actions.request import ACTIONS


def policy_rule(
    name: str, *when: Condition, workloads: tuple[str, ...] = ("*",), stop_after: object = None, **changes: Any
) -> Rule:
    """Return a rule; options of its action and keys of the rule are given by name, `stop_after` None is never."""
    do = {key: changes.pop(key) for key in ("action", "mode", "group", "force") if key in changes}
    document = {
        "name": name,
        "workloads": list(workloads),
        "when": {each.field: _bounds(each) for each in when},
        "do": {"action": "empty_cache", **do},
        "dry_run": False,
        **changes,
    }
    if document["do"]["action"] == "empty_cache":
        document["stop_after"] = stop_after or "never"
    return Rule.model_validate(_as_texts(document), context=ACTIONS)


def stop_after(clears: int = 3, freed_under: float = 64 << 20, still_free_after: float = 0.0) -> dict[str, Any]:
    return {"clears": clears, "freed_under": freed_under, "still_free_after": still_free_after}


def _bounds(condition: Condition) -> dict[str, float]:
    return {key: bound for key in ("over", "under") if not isinf(bound := getattr(condition, key))}


def _as_texts(value: Any) -> Any:
    """Return a document as a YAML file has it."""
    if isinstance(value, dict):
        return {key: _as_texts(each) for key, each in value.items()}
    if isinstance(value, list):
        return [_as_texts(each) for each in value]
    return str(value).lower() if isinstance(value, bool) else str(value)
