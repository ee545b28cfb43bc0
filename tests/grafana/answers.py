"""Writes the results of every panel of every dashboard on a real Prometheus that scrapes the demo.

    python -m tests.grafana.answers FILE

FILE is a list of `{"dashboard", "panel", "answers": [{"target", "series", "names"}], "table"}`; `table` has the
headings and rows that `tests.support.truth.panel_frames` computes.
"""

from __future__ import annotations

import contextlib
import json
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tests.support.paths import REPOSITORY
from tests.support.ports import free_port
from tests.support.servers.exporter_process import ExporterProcess
from tests.support.servers.running_prometheus import RunningPrometheus
from tests.support.waiting import wait_for

sys.path.insert(0, str(REPOSITORY / "grafana"))

from tests.support.truth.panel_frames import merged, named, table_of, transformed
from tests.support.truth.panel_queries import Prometheus, Query, Scope, all_panels, resolve

SECONDS = 120
"""The scraped and displayed node."""
WORKLOAD = "demo-llm-pretrain"
"""A workload with several ranks."""


def main() -> int:
    """Run the command."""
    _, target = sys.argv
    with tempfile.TemporaryDirectory() as folder, contextlib.ExitStack() as running:
        address = f"127.0.0.1:{free_port()}"
        exporter = ExporterProcess(Path(folder), "--demo", "--web.listen-address", address)
        running.callback(exporter.close)
        server = running.enter_context(RunningPrometheus(Path(folder) / "prometheus", {"demo": address}))
        prometheus = Prometheus(server.url)
        scraped = f"count_over_time(gpumem_nvml_up[{SECONDS}s]) >= {SECONDS - 5}"
        wait_for(lambda: prometheus.instant(scraped, time.time()), "scrapes", SECONDS * 3.0)
        Path(target).write_text(json.dumps(list(_shown(prometheus))))
    return 0


def _shown(prometheus: Prometheus) -> Iterator[dict[str, Any]]:
    for path in sorted((REPOSITORY / "grafana" / "dashboards").glob("*.json")):
        dashboard = json.loads(path.read_text(encoding="utf-8"))
        chosen = {"workload": WORKLOAD} if path.stem == "workload" else {}
        bare = Scope(time.time(), SECONDS, 1.0, SECONDS, chosen)
        scope = Scope(bare.end, SECONDS, 1.0, SECONDS, resolve(dashboard, prometheus, bare))
        for panel in all_panels(dashboard):
            answers = []
            for target in panel["targets"]:
                query = Query("", target["expr"], bool(target.get("instant")))
                series = prometheus.ask(query, scope)
                names = [named(one, target.get("legendFormat", ""), target["expr"]) for one in series]
                answers.append({"target": target, "series": series, "names": names})
            table = _table(panel, answers) if panel["type"] == "table" else None
            yield {"dashboard": path.stem, "panel": panel, "answers": answers, "table": table}


def _table(panel: dict[str, Any], answers: list[dict[str, Any]]) -> dict[str, Any]:
    several = len(answers) > 1
    frames = [
        table_of(answer["series"], f"Value #{answer['target']['refId']}" if several else "Value") for answer in answers
    ]
    columns, rows = transformed(merged(frames), panel.get("transformations", ()))
    return {
        "headings": [heading for _, heading in columns],
        "rows": [[row.get(name) for name, _ in columns] for row in rows],
    }


if __name__ == "__main__":
    sys.exit(main())
