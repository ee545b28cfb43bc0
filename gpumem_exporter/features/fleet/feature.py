"""`fleet`: commands on many nodes, which Prometheus selects."""

from __future__ import annotations

from gpumem_exporter.features.feature import Feature

FEATURE = Feature(commands={"fleet": "fleet_command"})
