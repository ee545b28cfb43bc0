"""Translate a pid of another PID namespace to the pid in the driver's list."""

from __future__ import annotations

import threading
import time
from collections import OrderedDict
from collections.abc import Callable
from typing import TypeVar

from gpumem_client.wire.procfs import pid_namespace
from gpumem_client.wire.protocol import ProcessIdentity
from gpumem_exporter.host.entries import HiddenError, ProcEntries

__all__ = ["PidTranslator"]

_Identity = tuple[int, int, int]
_Value = TypeVar("_Value", int, float)

_MAX_CACHED = 4096
_SCAN_AGAIN_SECONDS = 1.0
_SEARCH_AGAIN_SECONDS = 10.0


class PidTranslator:
    """Finds the pid of a reporter in the PID namespace of the exporter's /proc. Thread-safe.

    Results are cached by namespace, pid and start time, which together identify a process. One scan of /proc finds the
    processes of all other namespaces. It runs at most once a second, and a process that it did not find is searched
    again after ten seconds. A process may have started since the last scan, so it is searched in the next one.

    Args:
        entries: the proc file system.
        own_namespace: the inode of the PID namespace of `entries`.
        clock: monotonic seconds.
    """

    def __init__(self, entries: ProcEntries, own_namespace: int, clock: Callable[[], float] = time.monotonic) -> None:
        self._entries = entries
        self._own_namespace = own_namespace
        self._clock = clock
        self._lock = threading.Lock()
        self._found: OrderedDict[_Identity, int] = OrderedDict()
        self._searched_seconds: OrderedDict[_Identity, float] = OrderedDict()
        self._scanned: dict[_Identity, int] = {}
        self._scanned_seconds: float | None = None

    def host_pid(self, identity: ProcessIdentity, peer_pid: int | None) -> int | None:
        """Return the same as `Host.host_pid`; a candidate must have the reporter's start time and own pid."""
        start_time_ticks = identity.start_time_ticks
        if start_time_ticks <= 0:
            return None
        wanted = (identity.pid_namespace, identity.pid, start_time_ticks)
        with self._lock:
            pid = self._found.get(wanted)
            if pid is None:
                if peer_pid is not None and peer_pid > 0 and self._is_process(peer_pid, identity):
                    pid = peer_pid
                elif identity.pid_namespace and identity.pid_namespace == self._own_namespace:
                    pid = identity.pid if self._start_time_ticks(identity.pid) == start_time_ticks else None
                elif identity.pid_namespace:
                    pid = self._search(wanted)
            if pid is not None:
                _store(self._found, wanted, pid)
            return pid

    def _is_process(self, pid: int, identity: ProcessIdentity) -> bool:
        """Return whether a process is the one that reports; a namespace that is not readable counts as equal."""
        if self._start_time_ticks(pid) != identity.start_time_ticks:
            return False
        try:
            own_pid = _innermost_pid(self._entries.read(pid, "status") or b"")
        except HiddenError:
            return False
        namespace = pid_namespace(self._entries.path(pid, "").rstrip("/"))
        return own_pid == identity.pid and namespace in (0, identity.pid_namespace)

    def _start_time_ticks(self, pid: int) -> int | None:
        try:
            return self._entries.start_time_ticks(pid)
        except HiddenError:
            return None

    def _search(self, wanted: _Identity) -> int | None:
        now = self._clock()
        searched_seconds = self._searched_seconds.get(wanted)
        if searched_seconds is not None and now - searched_seconds < _SEARCH_AGAIN_SECONDS:
            return None
        scan = self._scanned_seconds is None or now - self._scanned_seconds >= _SCAN_AGAIN_SECONDS
        if scan:
            self._scanned = self._scan()
            self._scanned_seconds = now
        pid = self._scanned.get(wanted)
        if pid is not None:
            self._searched_seconds.pop(wanted, None)
        elif scan:  # otherwise the process may have started since
            _store(self._searched_seconds, wanted, now)
        return pid

    def _scan(self) -> dict[_Identity, int]:
        """Return the host pids of the readable processes of other PID namespaces, by their own identity."""
        found = {}
        for pid in self._entries.pids():
            namespace = pid_namespace(self._entries.path(pid, "").rstrip("/"))
            if namespace in (0, self._own_namespace):
                continue
            try:
                start_time_ticks = self._entries.start_time_ticks(pid)
                innermost = _innermost_pid(self._entries.read(pid, "status") or b"")
            except HiddenError:
                continue
            if start_time_ticks is not None and innermost is not None:
                found[namespace, innermost, start_time_ticks] = int(pid)
        return found


def _innermost_pid(status: bytes) -> int | None:
    """Return the process's own pid: the last number of the line `NSpid:` in /proc/PID/status."""
    for line in status.splitlines():
        if line.startswith(b"NSpid:"):
            return int(line.split()[-1])
    return None


def _store(cache: OrderedDict[_Identity, _Value], key: _Identity, value: _Value) -> None:
    cache[key] = value
    cache.move_to_end(key)
    while len(cache) > _MAX_CACHED:
        cache.popitem(last=False)
