"""Colors and thresholds of all dashboards, and the ledger's categories in their order."""

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

from gpumem_dashboards.promql import ABOVE, FULL

LEDGER = (
    ("torch_allocated", "allocated", "dark-blue"),
    ("torch_reclaimable", "reclaimable", "green"),
    ("torch_fragmented", "fragmented", "orange"),
    ("non_torch", "non-torch", "purple"),
    ("other_processes", "other processes", "yellow"),
    ("driver_reserved", "driver reserved", "dark-red"),
    ("unattributed", "unattributed", "super-light-red"),
    ("free", "free", "#80808030"),
)
"""Each category with its name on graphs and its color, from the bottom of the stack to its top."""

# Red is what the alert rules call critical: a lost device, a driver or an exporter that does not answer. A full device
# is no fault, and one device of many does not make a fleet's value red.
PRESSURE = ((None, "green"), (0.75, "yellow"), (ABOVE, "orange"), (FULL, "dark-orange"))
UP = ((None, "red"), (1, "green"))


def steps(*limits: tuple[float | None, str]) -> Any:
    """Build thresholds from (lowest value, color); the first has no value."""
    made = [Threshold(value=value, color=name) for value, name in limits]
    return dashboard.ThresholdsConfig().mode(ThresholdsMode.ABSOLUTE).steps(made)


def none_is_good(name: str = "orange") -> tuple[tuple[float | None, str], ...]:
    """Green at zero, otherwise the color; the limit is 0.5 because an increase of a counter is not an integer."""
    return ((None, "green"), (0.5, name))


def shares(warning: float, bad: float) -> tuple[tuple[float | None, str], ...]:
    """Green, then yellow from `warning`, then orange from `bad`."""
    return ((None, "green"), (warning, "yellow"), (bad, "orange"))


def color(name: str) -> DynamicConfigValue:
    """Build an override that gives a series one color."""
    return DynamicConfigValue("color", {"mode": "fixed", "fixedColor": name})


def words(texts: dict[str, tuple[str, str]]) -> ValueMap:
    """Build a value mapping from value to (text, color)."""
    return ValueMap(
        {value: ValueMappingResult(text, name, index=at) for at, (value, (text, name)) in enumerate(texts.items())}
    )


def ledger_words() -> dict[str, Any]:
    """Build the value mapping of the categories for a column."""
    options = {category: {"text": name, "index": at} for at, (category, name, _) in enumerate(LEDGER)}
    return {"type": "value", "options": options}
