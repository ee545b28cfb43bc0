"""Writes the dashboards into `dashboards/`: `python grafana/build.py`.

The files are never edited by hand; a test compares them with the output of this script. It needs the dependency group
`dashboards`, whose version is pinned because it determines the bytes of the files.
"""

from __future__ import annotations

import sys
from pathlib import Path

from gpumem_dashboards.exporter import exporter
from gpumem_dashboards.fleet import fleet
from gpumem_dashboards.frame import encoded
from gpumem_dashboards.node import node
from gpumem_dashboards.oom import oom
from gpumem_dashboards.usage import usage
from gpumem_dashboards.workload import workload

TARGET = Path(__file__).with_name("dashboards")


def dashboards() -> dict[str, str]:
    """Return the text of each dashboard by file name."""
    made = {"fleet": fleet, "node": node, "workload": workload, "oom": oom, "usage": usage, "exporter": exporter}
    return {f"{name}.json": encoded(build()) for name, build in made.items()}


if __name__ == "__main__":
    target = Path(sys.argv[1]) if len(sys.argv) > 1 else TARGET
    for name, text in dashboards().items():
        (target / name).write_text(text, encoding="utf-8")
