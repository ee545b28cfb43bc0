"""Writes prometheusrule.yaml from deploy/prometheus/rules: run it after a change there, and commit both.

A PrometheusRule's `spec` is a rule file, so each file becomes one object, line by line: comments and the folding of
expressions stay. Standard library alone.
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
    """All rule files as PrometheusRule objects: the text of prometheusrule.yaml."""
    objects = [
        OBJECT.format(name=path.stem, spec=textwrap.indent(path.read_text(encoding="utf-8"), "  "))
        for path in sorted(RULES.glob("*.yml"))
    ]
    return "# Made by build.py from deploy/prometheus/rules.\n" + "---\n".join(objects)


if __name__ == "__main__":
    (HERE / "prometheusrule.yaml").write_text(prometheus_rules(), encoding="utf-8")
