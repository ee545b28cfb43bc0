"""`fleet`: commands on many nodes, which Prometheus selects."""

from __future__ import annotations

from gpumem_exporter.cli.program import NODES, Listed
from gpumem_exporter.features.feature import Feature

FEATURE = Feature(commands={"fleet": Listed(NODES, "Show many nodes, and act on them by a query.", "fleet_command")})
