"""`webhook`: the admission webhook of Kubernetes."""

from __future__ import annotations

from gpumem_exporter.features.feature import Feature

FEATURE = Feature(commands={"webhook": "webhook_command"})
