"""Writes prometheusrule.yaml from deploy/prometheus/rules: run it after a change there, and commit both.

The `spec` of a PrometheusRule is a rule file, so each file becomes one object, with its comments. Uses the standard
library only.
"""

from __future__ import annotations

import textwrap
from pathlib import Path

HERE = Path(__file__).resolve().parent
RULES = HERE.parents[1] / "prometheus" / "rules"
OBJECT = """apiVersion: monitoring.coreos.com/v1
kind: PrometheusRule
metadata:
  name: gpumem-{name}
  namespace: gpumem
  labels:
    app.kubernetes.io/name: gpumem-exporter
spec:
{spec}"""


def prometheus_rules() -> str:
    """Return the text of prometheusrule.yaml: all rule files as PrometheusRule objects."""
    objects = [
        OBJECT.format(name=path.stem, spec=textwrap.indent(path.read_text(encoding="utf-8"), "  "))
        for path in sorted(RULES.glob("*.yml"))
    ]
    return "# Made by build.py from deploy/prometheus/rules.\n" + "---\n".join(objects)


if __name__ == "__main__":
    (HERE / "prometheusrule.yaml").write_text(prometheus_rules(), encoding="utf-8")
