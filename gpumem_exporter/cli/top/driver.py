"""Reads the driver directly, into the exporter's document. Values that only an exporter knows are null."""

from __future__ import annotations

import logging
import socket
import time

from gpumem_client.wire.errors import ExporterUnreachableError
from gpumem_exporter.cli.api_client import Document
from gpumem_exporter.core.samples import Snapshot
from gpumem_exporter.node.linux import LinuxHost
from gpumem_exporter.node.pynvml_provider import PynvmlProvider
from gpumem_exporter.node.reader import NodeReader
from gpumem_exporter.page.live import ALL_DETAILS, NodeView


class DriverReader:
    """Reads the node without an exporter; a finding has the `reason`. Blocks while the driver blocks."""

    def __init__(self, reason: str) -> None:
        self._reason = reason
        # The screen shows the error. A line in the log would overwrite the screen.
        logging.getLogger("gpumem_exporter").addHandler(logging.NullHandler())
        self._provider = PynvmlProvider()
        self._reader = NodeReader(self._provider, LinuxHost(), clock=time.monotonic, wall_clock=time.time)
        self._view = NodeView(clock=time.monotonic, wall_clock=time.time, minima_of=lambda _: ())

    def read(self) -> tuple[Document, str]:
        """Return the document, and no address. Raises ExporterUnreachableError if the driver does not answer."""
        node = self._reader.read()
        if not node.up:
            raise ExporterUnreachableError(f"{self._reason}. The driver alone cannot be read either: {node.error}")
        facts = {
            "host": socket.gethostname(),
            "source": self._provider.source,
            "driver": {"up": True, "error": "", "version": node.driver_version},
            "failed_checks": [{"part": "NVML ALONE", "status": "degraded", "detail": self._reason}],
        }
        snapshot = Snapshot(taken_seconds=node.taken_seconds, node=node)
        live = self._view.document(snapshot, facts, time.time(), details=ALL_DETAILS)
        live["time"] = {"unix_seconds": time.time(), "clock_seconds": node.taken_seconds}
        for device in live["devices"]:
            device.update(dict.fromkeys(("ledger", "idle_cache_bytes", "allocatable_bytes", "pressure_ratio")))
        unknown = ("idle_cache_bytes", "allocatable_bytes", "reported_bytes", "coverage_ratio")
        live["node"]["totals"].update(dict.fromkeys(unknown))
        for job in live["jobs"]:  # unknown without reports
            job["state"] = None
            for process in job["processes"]:
                process["reporting"] = process["state"] = None
        return live, ""
