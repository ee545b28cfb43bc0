"""Sizes for people: the formatters of `gpumem_exporter.units` under the name that the client uses."""

from __future__ import annotations

from gpumem_exporter.units import UNKNOWN, human_bytes, human_growth

__all__ = ["UNKNOWN", "human_bytes", "human_growth"]
