"""The alerts of the project's rules over a history, evaluated by promtool with `for`."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from tests.support.demo_history import History
from tests.support.paths import REPOSITORY

RULES = sorted((REPOSITORY / "deploy" / "prometheus" / "rules").glob("*.yml"))
_FOUND = re.compile(r'^ +expr: (".*"), time: .*\n +exp: nil\n +got: (.*)$', re.MULTILINE)
_LABEL = re.compile(r'(\w+)="([^"]*)"')


def metrics_in_rules() -> frozenset[str]:
    """Return the names of the metrics in the rules."""
    return frozenset(name for rules in RULES for name in re.findall(r"\bgpumem_\w+", rules.read_text()))


@dataclass(frozen=True, slots=True)
class Alerts:
    """The labels of alerts, sorted by name."""

    raised: Sequence[Mapping[str, str]]
    """Alerts that fired at any time."""
    firing: Sequence[Mapping[str, str]]
    """Alerts that fire at the end."""


def alerts_over(history: History, folder: Path) -> Alerts:
    """Evaluate the rules over a history."""
    promtool = shutil.which("promtool")
    assert promtool, "promtool is not on PATH: run the tests by `sh tests/run.sh`, which brings it"
    firing = 'ALERTS{alertstate="firing"}'
    raised = f"count_over_time({firing}[{history.seconds + 1}s])"
    # promtool prints results only if they differ from the expected ones, so none are expected.
    expected = [
        {"expr": expression, "eval_time": f"{history.seconds}s", "exp_samples": []} for expression in (raised, firing)
    ]
    question = {
        "rule_files": [str(path) for path in RULES],
        "evaluation_interval": f"{history.interval_seconds}s",
        "tests": [
            {
                "interval": f"{history.interval_seconds}s",
                "input_series": [
                    {"series": series, "values": _notation(values)} for series, values in history.series.items()
                ],
                "promql_expr_test": expected,
            }
        ],
    }
    file = folder / "history.json"  # JSON is YAML
    file.write_text(json.dumps(question))
    run = subprocess.run([promtool, "test", "rules", file], capture_output=True, text=True, timeout=300, check=False)
    answer = run.stdout + run.stderr
    found = {json.loads(expression): labels for expression, labels in _FOUND.findall(answer)}
    assert run.returncode == 0 or found, answer
    return Alerts(*(_labels(found.get(expression, "")) for expression in (raised, firing)))


def _labels(text: str) -> list[dict[str, str]]:
    return [dict(_LABEL.findall(each)) for each in re.findall(r"\{([^}]*)\}", text)]


def _notation(values: list[str | None]) -> str:
    """Return a series in promtool's notation: `_` is missing, `stale` ends a series, `v+0xN` is N + 1 times v."""
    words: list[str] = []
    i = 0
    while i < len(values):
        value, first = values[i], i
        while i + 1 < len(values) and values[i + 1] == value:
            i += 1
        more = i - first
        i += 1
        if value is not None:
            words.append(f"{value}+0x{more}" if more else value)
            continue
        if first:
            words.append("stale")
            more -= 1
        if more >= 0:
            words.append(f"_x{more + 1}")
    return " ".join(words)
