"""The one rule by which a process is called: on the metrics page, in the documents, and in an action's target.

Prometheus refuses a whole page for one doubled series, and an action must reach the process that its caller saw, so a
name stands for one process, always:

- The driver's own pids come first. A reporter whose host pid is known is called by it. If two are (the pid was used
  again and the first has not yet expired), the one that reported last is meant and the other left out: it can no longer
  be alive. So is a reporter whose pid belongs, by the host's word, to a process that began later.
- A reporter whose host pid cannot be known is called by its own. If that pid is also another's here, of the driver's or
  of a reporter in another PID namespace (in containers, everybody is pid 1), it is called `pid@namespace` instead, and
  so is every other reporter in that position: none of them is lost, and none inherits the series of another.

A name is a text on the page and a number in JSON wherever it is one: 4711, or "1@4026532007". Pure.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from gpumem_exporter.core.samples import NodeReading, ProcessKey, ReportingProcess, SilentReporter, Snapshot

__all__ = ["Names", "json_pid", "pid_order"]


@dataclass(frozen=True, slots=True)
class Names:
    """What each reporter of a snapshot is called, in the order of `pid_order`. Each name and each process once."""

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
        """What a reporting process is called; None for one that is left out or not there."""
        return next((name for name, process in self.reporting if process.key == key), None)


def pid_order(pid: str) -> tuple[int, int]:
    """Sorts names by number, those with a namespace after the plain one."""
    number, _, namespace = pid.partition("@")
    return int(number), int(namespace or -1)


def json_pid(pid: str) -> int | str:
    """A name as JSON has it: a number where it is one."""
    return int(pid) if pid.isdecimal() else pid


def _replaced(reporter: ReportingProcess | SilentReporter, node: NodeReading | None) -> bool:
    """The host has shown a later process under its pid."""
    if node is None or reporter.host_pid is None:
        return False
    facts = node.facts.get(reporter.host_pid)
    return facts is not None and facts.start_time_ticks > reporter.start_time_ticks > 0


def _ambiguous_pids(reporters: Iterable[ReportingProcess | SilentReporter], node: NodeReading | None) -> frozenset[int]:
    """The pids that a reporter with no known host pid cannot be called by alone."""
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
