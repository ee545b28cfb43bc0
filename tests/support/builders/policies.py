"""Policy files."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any


def rule(name: str = "tidy", **changes: Any) -> dict[str, Any]:
    """A rule that acts on any process with slack."""
    return {
        "name": name,
        "workloads": ["*"],
        "when": {"slack_bytes": {"over": "10MiB"}},
        "do": {"action": "empty_cache"},
        "dry_run": False,
        **changes,
    }


def alert_rule(name: str = "tidy", **changes: Any) -> dict[str, Any]:
    """A rule that acts if an alert names it, on a process with more than 3 MiB of slack on a device."""
    return rule(name, **{"trigger": "alert", "when": {"slack_bytes": {"over": "3MiB"}}, **changes})


def written(path: Path, *rules: dict[str, Any]) -> Path:
    """Write a policy file: JSON is YAML."""
    path.write_text(json.dumps({"rules": list(rules)}, indent=1))
    return path
