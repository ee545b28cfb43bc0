"""Pids of other PID namespaces: of reporters in containers, and of processes that the driver lists."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from dataclasses import replace

from gpumem_client.wire.procfs import INITIAL_PID_NAMESPACE, pid_namespace
from gpumem_client.wire.protocol import ProcessIdentity
from gpumem_exporter.core.readings import NodeReading
from gpumem_exporter.node.proc_entries import HiddenError, ProcEntries

_log = logging.getLogger(__name__)

# The inode of a PID namespace, a pid in it, and a start time, which together identify a process.
_Identity = tuple[int, int, int]

_MAX_CACHED = 4096
_SCAN_AGAIN_SECONDS = 1.0


class DriverPids:
    """Decides whether the pids in the driver's lists belong to the PID namespace of the exporter.

    Only the poller's thread calls `check`; any thread may read `matched`.
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
        # In the host's PID namespace they do. In another one, such as a sidecar's, they may not: older drivers list the
        # host's pids there, and newer ones list only the processes that the namespace can see, often none. Such lists
        # would show the memory of the pod's own reporters as memory of other processes, or no process at all. So one
        # reading must list only processes that exist here; after that, neither the driver nor the namespace changes.
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


class PidTranslator:
    """Finds the pid of a reporter in the PID namespace of the exporter's /proc, `own_namespace`. Thread-safe."""

    def __init__(self, entries: ProcEntries, own_namespace: int, clock: Callable[[], float] = time.monotonic) -> None:
        self._entries = entries
        self._own_namespace = own_namespace
        self._clock = clock
        # Threads use it without a lock: a lost entry costs another look-up.
        self._found: dict[_Identity, int] = {}
        self._searching = threading.Lock()
        self._scanned: dict[_Identity, int] = {}
        self._scanned_seconds = -float("inf")

    def host_pid(self, identity: ProcessIdentity, peer_pid: int | None) -> int | None:
        """Return the pid of a reporter in the driver's list; None if it cannot be known.

        The candidates, in this order, are the socket's peer pid, the reporter's own pid if it shares this PID
        namespace, and a process in /proc that has this pid in the reporter's namespace. The start time and the own pid
        of a candidate must be equal.
        """
        start_time_ticks = identity.start_time_ticks
        if start_time_ticks <= 0:
            return None
        wanted = (identity.pid_namespace, identity.pid, start_time_ticks)
        pid = self._found.get(wanted)
        if pid is not None:
            return pid
        if peer_pid is not None and peer_pid > 0 and self._is_process(peer_pid, identity):
            pid = peer_pid
        elif identity.pid_namespace and identity.pid_namespace == self._own_namespace:
            pid = identity.pid if self._start_time_ticks(identity.pid) == start_time_ticks else None
        elif identity.pid_namespace:
            pid = self._search(wanted)
        if pid is not None:
            if len(self._found) >= _MAX_CACHED:
                self._found.clear()
            self._found[wanted] = pid
        return pid

    def _is_process(self, pid: int, identity: ProcessIdentity) -> bool:
        """Return whether a process is the reporting process; a namespace that is not readable counts as equal."""
        if self._start_time_ticks(pid) != identity.start_time_ticks:
            return False
        status, namespace = self._entries.status(pid), pid_namespace(self._entries.path(pid))
        own_pid = status.pids[-1] if status is not None and status.pids else None
        return own_pid == identity.pid and namespace in (0, identity.pid_namespace)

    def _start_time_ticks(self, pid: int | str) -> int | None:
        try:
            return self._entries.start_time_ticks(pid)
        except HiddenError:
            return None

    def _search(self, wanted: _Identity) -> int | None:
        # One scan of /proc finds the processes of all other namespaces: reports with invented pids cost no scan each.
        with self._searching:
            now = self._clock()
            if now - self._scanned_seconds >= _SCAN_AGAIN_SECONDS:
                self._scanned = self._scan()
                self._scanned_seconds = now
            return self._scanned.get(wanted)

    def _scan(self) -> dict[_Identity, int]:
        """Return the host pids of the readable processes of other PID namespaces, by their own identity."""
        found = {}
        for pid in self._entries.pids():
            namespace = pid_namespace(self._entries.path(pid))
            if namespace in (0, self._own_namespace):
                continue
            start_time_ticks, status = self._start_time_ticks(pid), self._entries.status(pid)
            if start_time_ticks is not None and status is not None and status.pids:
                found[namespace, status.pids[-1], start_time_ticks] = int(pid)
        return found
