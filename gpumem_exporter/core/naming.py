"""Names of processes on the metrics page, in JSON documents and in the targets of actions.

A name always identifies one process. Prometheus rejects a page with a duplicate series, and an action must reach the
process that the caller saw. The rules:

- The name of a reporter with a known host pid is that pid. If two reporters have the same host pid, the pid was reused
  and the first reporter has not expired yet. The one that reported last gets the name, and the other is left out. A
  reporter is also left out if the host shows that its pid belongs to a process that started later.
- The name of a reporter without a known host pid is its own pid. That pid may also belong to a process of the driver's
  list or to a reporter in another PID namespace (in a container, the first process has pid 1). Then the name of each
  such reporter is `pid@namespace`, so no reporter is lost and none continues the series of another.

A name is text on the metrics page. In JSON it is a number if possible: 4711, or "1@4026532007".
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from gpumem_exporter.core.samples import NodeReading, ProcessKey, ReportingProcess, SilentReporter, Snapshot

__all__ = ["Names", "json_pid", "pid_order"]


@dataclass(frozen=True, slots=True)
class Names:
    """The names of the reporters of a snapshot, in the order of `pid_order`; each name and each process once."""

    reporting: tuple[tuple[str, ReportingProcess], ...]
    silent: tuple[tuple[str, SilentReporter], ...]

    @classmethod
    def of(cls, snapshot: Snapshot) -> Names:
        """Name the reporters of a snapshot."""
        node = snapshot.node if snapshot.node is not None and snapshot.node.up else None
        processes = [process for process in snapshot.processes if not _replaced(process, node)]
        silents = [reporter for reporter in snapshot.silent if not _replaced(reporter, node)]
        ambiguous = _ambiguous_pids((*processes, *silents), node)
        reporting: dict[str, ReportingProcess] = {}
        for process in processes:
            name = _name(process, ambiguous)
            other = reporting.get(name)
            if other is None or process.received_seconds >= other.received_seconds:
                reporting[name] = process
        silent: dict[str, SilentReporter] = {}
        for reporter in silents:
            name = _name(reporter, ambiguous)
            last = silent.get(name)
            if name not in reporting and (
                last is None or reporter.last_report_unix_seconds >= last.last_report_unix_seconds
            ):
                silent[name] = reporter
        return cls(
            tuple(sorted(reporting.items(), key=lambda item: pid_order(item[0]))),
            tuple(sorted(silent.items(), key=lambda item: pid_order(item[0]))),
        )

    def name_of(self, key: ProcessKey) -> str | None:
        """Return the name of a reporting process; None if it is left out or unknown."""
        return next((name for name, process in self.reporting if process.key == key), None)


def pid_order(pid: str) -> tuple[int, int]:
    """Return a sort key for a name: by pid, then a plain pid before `pid@namespace`."""
    number, _, namespace = pid.partition("@")
    return int(number), int(namespace or -1)


def json_pid(pid: str) -> int | str:
    """Return a name as a JSON value: a number if possible."""
    return int(pid) if pid.isdecimal() else pid


def _replaced(reporter: ReportingProcess | SilentReporter, node: NodeReading | None) -> bool:
    """Return whether the host shows a process that started later under the reporter's pid."""
    if node is None or reporter.host_pid is None:
        return False
    facts = node.facts.get(reporter.host_pid)
    return facts is not None and facts.start_time_ticks > reporter.start_time_ticks > 0


def _ambiguous_pids(reporters: Iterable[ReportingProcess | SilentReporter], node: NodeReading | None) -> frozenset[int]:
    """Return the pids that need a namespace in the name of a reporter without a known host pid."""
    namespaces: dict[int, set[int]] = {}
    hosts: set[int] = set()
    for reporter in reporters:
        if reporter.host_pid is None:
            namespaces.setdefault(reporter.key.pid, set()).add(reporter.key.pid_namespace)
        else:
            hosts.add(reporter.host_pid)
    if not namespaces:
        return frozenset()
    for device in node.devices if node is not None else ():
        hosts.update(listed.pid for listed in device.processes or ())
    return frozenset(pid for pid, seen in namespaces.items() if len(seen) > 1 or pid in hosts)


def _name(reporter: ReportingProcess | SilentReporter, ambiguous: frozenset[int]) -> str:
    if reporter.host_pid is None and reporter.key.pid in ambiguous:
        return f"{reporter.key.pid}@{reporter.key.pid_namespace}"
    return reporter.label_pid
