"""Decides whether the pids in the driver's lists are those of the exporter's PID namespace.

In the host's PID namespace they are. In another one, such as a sidecar's, they may not be: older drivers list the
host's pids there, and newer ones list only the processes that the namespace can see, often none. Such lists would show
the memory of the pod's own reporters as memory of other processes, or no process at all.
"""

from __future__ import annotations

import logging
from dataclasses import replace

from gpumem_client.wire.procfs import INITIAL_PID_NAMESPACE, pid_namespace
from gpumem_exporter.core.samples import NodeReading

__all__ = ["DriverPids"]

_log = logging.getLogger(__name__)


class DriverPids:
    """The driver's pids, as an exporter outside of the host's PID namespace sees them.

    They count as unmatched until one reading lists only processes that exist in the exporter's /proc. From then on they
    count as matched, because neither the driver nor the namespace changes while the exporter runs. Only the poller's
    thread calls `check`; any thread may read `matched`.
    """

    def __init__(self) -> None:
        self.matched = False
        self._logged = False

    @classmethod
    def of_this_exporter(cls) -> DriverPids | None:
        """Return None in the host's PID namespace, and if the namespace cannot be read."""
        return cls() if pid_namespace() not in (0, INITIAL_PID_NAMESPACE) else None

    def check(self, reading: NodeReading) -> NodeReading:
        """Return the reading; while the pids are unmatched, without the lists of processes, as if they were unknown."""
        if self.matched or not reading.up:
            return reading
        listed = {process.pid for device in reading.devices for process in device.processes or ()}
        if listed and listed <= reading.facts.keys():
            self.matched = True
            return reading
        if not self._logged:
            self._logged = True
            _log.warning(
                "not in the host's PID namespace: other processes and non-torch memory are unknown until the driver "
                "lists a process of this namespace"
            )
        devices = tuple([replace(device, processes=None) for device in reading.devices])
        return replace(reading, devices=devices, facts={})
