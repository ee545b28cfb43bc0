"""The nodes of a fleet, as each exporter describes its own."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from gpumem_client.wire.errors import ExporterError
from gpumem_client.wire.http import shown_url
from gpumem_exporter.cli.node_view import Node, node_document, read_live
from gpumem_exporter.features.fleet.fleet_options import FleetOptions
from gpumem_exporter.features.fleet.node_selection import exporters_of
from gpumem_exporter.features.fleet.prometheus import Prometheus


class FleetSource:
    """Reads the exporters that a query selects. Not thread-safe."""

    def __init__(self, prometheus: Prometheus, query: str, options: FleetOptions) -> None:
        self._prometheus, self._query, self._options = prometheus, query, options
        self._last: list[Node] = []
        self.warnings: tuple[str, ...] = ()
        """The warnings of the last query."""

    def read(self) -> list[Node]:
        """Query Prometheus for exporters, and each exporter for its node. One that is silent keeps its values."""
        found = self._prometheus.query(self._query)
        exporters = exporters_of(found.series, self._options.instance_url)
        self.warnings = found.warnings
        before = {node.name: node for node in self._last}
        answers = self._options.ask(exporters, read_live)
        self._last = [
            Node(answer, exporter.url, exporter.instance)
            if not isinstance(answer, ExporterError)
            else replace(before.get(exporter.instance, Node(None, exporter.url, exporter.instance)), error=str(answer))
            for exporter, answer in answers.items()
        ]
        return self._last


def overview_document(source: FleetSource, nodes: list[Node]) -> dict[str, Any]:
    """Return the JSON document of nodes."""
    exporters = []
    for node in nodes:
        address: dict[str, Any] = {"instance": node.name, "url": shown_url(node.url), "error": node.error or None}
        described = node_document(node.live) if node.live is not None else {"devices": [], "jobs": [], "findings": []}
        exporters.append({**address, **{name: value for name, value in described.items() if name != "processes"}})
    return {"exporters": exporters, "warnings": list(source.warnings)}
