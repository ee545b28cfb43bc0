"""Fixtures that any test may ask for."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, settings

from tests.emulation.fixtures import emulation, make_node, node, start_torch
from tests.emulation.node import EmulatedNode
from tests.support.exporter_process import ExporterProcess

__all__ = ["emulation", "make_node", "node", "start_exporter", "start_torch"]

# A slow machine is no failure.
settings.register_profile("any machine", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("any machine")

StartExporter = Callable[..., ExporterProcess]


@pytest.fixture
def start_exporter(tmp_path: Path) -> Iterator[StartExporter]:
    """Starts exporters, on an emulated node where one is given: `start_exporter(node, "--report.interval", "0.2")`."""
    exporters: list[ExporterProcess] = []

    def start(on: EmulatedNode | None = None, *flags: str, **options: Any) -> ExporterProcess:
        folder = tmp_path / f"exporter{len(exporters)}"
        folder.mkdir()
        if on is not None:
            options["environment"] = {**on.environment(), **options.get("environment", {})}
        exporters.append(ExporterProcess(folder, *flags, **options))
        return exporters[-1]

    yield start
    for exporter in exporters:
        print(exporter.log())  # pytest shows it where the test failed
        exporter.close()
