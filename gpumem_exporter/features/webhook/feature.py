"""`webhook`: the admission webhook of Kubernetes."""

from __future__ import annotations

from gpumem_exporter.cli.program import OPERATE, Listed
from gpumem_exporter.features.feature import Feature

FEATURE = Feature(commands={"webhook": Listed(OPERATE, "Run the admission webhook of Kubernetes.", "webhook_command")})
