"""Reads the driver directly, into the exporter's documents. Values that only reporters know are null."""

from __future__ import annotations

import logging
import time

from gpumem_exporter.cli.node import Node
from gpumem_exporter.core.samples import Snapshot
from gpumem_exporter.errors import NvmlUnavailableError
from gpumem_exporter.host.linux import LinuxHost
from gpumem_exporter.nvml.pynvml_provider import PynvmlProvider
from gpumem_exporter.nvml.reader import NodeReader
from gpumem_exporter.view.documents import devices_document, processes_document


class DriverReader:
    """Reads the node without an exporter. Not thread-safe; blocks while the driver blocks."""

    def __init__(self) -> None:
        # The screen shows the error. A line in the log would overwrite the screen.
        logging.getLogger("gpumem_exporter").addHandler(logging.NullHandler())
        self._provider = PynvmlProvider()
        self._reader = NodeReader(self._provider, LinuxHost(), clock=time.monotonic, wall_clock=time.time)

    def read(self) -> Node:
        """Return devices without ledgers, and processes without states.

        Raises NvmlUnavailableError if there is no driver, or it does not answer.
        """
        node = self._reader.read()
        if not node.up:
            raise NvmlUnavailableError(node.error)
        snapshot = Snapshot(taken_seconds=node.taken_seconds, node=node)
        devices = devices_document(snapshot, self._provider.source)
        processes = processes_document(snapshot, self._provider.source)
        for device in devices["devices"]:
            device["ledger"] = device["allocatable_bytes"] = None
        for process in processes["processes"]:
            process["reporting"] = process["state"] = None  # unknown without reports
        return Node(devices, processes)

    def release(self) -> None:
        """Release NVML and unload its library."""
        self._reader.close()
        self._provider.release()
