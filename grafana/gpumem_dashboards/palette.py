"""Colours and thresholds, the same on every dashboard, and the ledger's categories in their order."""

from __future__ import annotations

from typing import Any

from grafana_foundation_sdk.builders import dashboard
from grafana_foundation_sdk.models.dashboard import (
    DynamicConfigValue,
    Threshold,
    ThresholdsMode,
    ValueMap,
    ValueMappingResult,
)

from gpumem_dashboards.promql import ABOVE

__all__ = ["LEDGER", "PRESSURE", "UP", "colour", "ledger_words", "none_is_good", "shares", "steps", "words"]

LEDGER = (
    ("torch_allocated", "in tensors", "dark-blue"),
    ("torch_reclaimable", "cached, a clear gives it back", "green"),
    ("torch_fragmented", "cached, a clear cannot give it back", "orange"),
    ("non_torch", "CUDA context, NCCL, libraries", "purple"),
    ("other_processes", "processes without a reporter", "yellow"),
    ("driver_reserved", "held back by the driver", "dark-red"),
    ("unattributed", "of no known process", "super-light-red"),
    ("free", "free", "#80808030"),
)
"""Category, its name on graphs, its colour: from the bottom of the stack to its top."""

PRESSURE = ((None, "green"), (0.75, "yellow"), (ABOVE, "orange"), (0.97, "red"))
UP = ((None, "red"), (1, "green"))


def steps(*limits: tuple[float | None, str]) -> Any:
    """Thresholds: from which value on which colour; the first has no value."""
    made = [Threshold(value=value, color=name) for value, name in limits]
    return dashboard.ThresholdsConfig().mode(ThresholdsMode.ABSOLUTE).steps(made)


def none_is_good(name: str = "red") -> tuple[tuple[float | None, str], ...]:
    """Green at nought, that colour from one on (a counter's increase is no whole number)."""
    return ((None, "green"), (0.5, name))


def shares(warning: float, bad: float) -> tuple[tuple[float | None, str], ...]:
    """Green, yellow from the first, red from the second on."""
    return ((None, "green"), (warning, "yellow"), (bad, "red"))


def colour(name: str) -> DynamicConfigValue:
    """One series in one colour."""
    return DynamicConfigValue("color", {"mode": "fixed", "fixedColor": name})


def words(texts: dict[str, tuple[str, str]]) -> ValueMap:
    """Values as words: the value, then its text and colour."""
    return ValueMap(
        {value: ValueMappingResult(text, name, index=at) for at, (value, (text, name)) in enumerate(texts.items())}
    )


def ledger_words() -> dict[str, Any]:
    """The categories as words, as an override of a column takes it."""
    options = {category: {"text": name, "index": at} for at, (category, name, _) in enumerate(LEDGER)}
    return {"type": "value", "options": options}
