"""Reads the driver directly, into the exporter's documents. Values that only reporters know are null."""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping
from typing import Any

from gpumem_exporter.core.samples import Snapshot
from gpumem_exporter.errors import NvmlUnavailableError
from gpumem_exporter.host import Host
from gpumem_exporter.nvml.provider import Provider
from gpumem_exporter.nvml.reader import NodeReader
from gpumem_exporter.server.api.documents import devices_document, processes_document

__all__ = ["DriverReader", "open_driver"]


class DriverReader:
    """Reads the node without an exporter. Not thread-safe; blocks while the driver blocks."""

    def __init__(self, provider: Provider, host: Host) -> None:
        self._provider = provider
        self._reader = NodeReader(provider, host, clock=time.monotonic, wall_clock=time.time)

    def read(self) -> tuple[Mapping[str, Any], Mapping[str, Any]]:
        """Return the documents of devices and processes, without ledgers and process states.

        Raises:
            NvmlUnavailableError: there is no driver, or it does not answer.
        """
        node = self._reader.read()
        if not node.up:
            raise NvmlUnavailableError(node.error)
        snapshot = Snapshot(taken_seconds=node.taken_seconds, node=node)
        devices = devices_document(snapshot, self._provider.source)
        processes = processes_document(snapshot, self._provider.source)
        for device in devices["devices"]:
            device["ledger"] = None
        for process in processes["processes"]:
            process["reporting"] = process["state"] = None  # unknown without reports
        return devices, processes

    def release(self) -> None:
        """Release NVML and unload its library."""
        self._reader.close()
        self._provider.release()


def open_driver() -> DriverReader:
    """Return a reader of this node's driver."""
    # The screen shows the error. A line in the log would overwrite the screen.
    logging.getLogger("gpumem_exporter").addHandler(logging.NullHandler())
    from gpumem_exporter.host.linux import LinuxHost
    from gpumem_exporter.nvml.pynvml_provider import PynvmlProvider

    return DriverReader(PynvmlProvider(), LinuxHost())
