"""Names of processes on the metrics page, in JSON documents and in the targets of actions.

A name always identifies one process. Prometheus rejects a page with a duplicate series, and an action must reach the
process that the caller saw. The rules:

- The name of a reporter with a known host pid is that pid. If two reporters have the same host pid, the pid was reused
  and the first reporter has not expired yet. The one that reported last gets the name, and the other is left out. A
  reporter is also left out if the host shows that its pid belongs to a process that started later.
- The pid of a reporter without a known host pid is only its claim, in a PID namespace that it claims too. Its name is
  `pid@namespace:uid`, or `pid@namespace` if only a token vouches for it. In a container that the exporter sees, the
  container follows: `pid@namespace:uid:container`. The name depends on no other process, so no report of another user
  changes it, hides the process or continues its series.

A name is text on the metrics page. In JSON it is a number if possible: 4711, or "1@4026532007".
"""

from __future__ import annotations

from dataclasses import dataclass
from operator import attrgetter

from gpumem_exporter.core.samples import ReportingProcess, SilentReporter, Snapshot

__all__ = ["Names", "command_of", "json_pid", "pid_order", "reporter_name"]

_RAY = "ray::"
"""The start of the titles of Ray's workers."""


@dataclass(frozen=True, slots=True)
class Names:
    """The names of the reporters of a snapshot, in the order of `pid_order`; each name and each process once."""

    reporting: tuple[tuple[str, ReportingProcess], ...]
    silent: tuple[tuple[str, SilentReporter], ...]

    @classmethod
    def of(cls, snapshot: Snapshot) -> Names:
        """Name the reporters of a snapshot; all calls for the same snapshot return the same object."""
        known: Names | None = snapshot.derived.get(cls)
        if known is None:
            known = snapshot.derived[cls] = cls._of(snapshot)
        return known

    @classmethod
    def _of(cls, snapshot: Snapshot) -> Names:
        processes, silents = _represented(snapshot)
        # Of several reporters with one name, the one that reported last gets it; an attested one before others.
        processes.sort(key=attrgetter("attested", "received_seconds"))
        silents.sort(key=attrgetter("last_report_unix_seconds"))
        reporting = {reporter_name(process): process for process in processes}
        silent = {reporter_name(reporter): reporter for reporter in silents}
        return cls(
            tuple((name, reporting[name]) for name in sorted(reporting, key=pid_order)),
            tuple((name, silent[name]) for name in sorted(silent.keys() - reporting, key=pid_order)),
        )


def reporter_name(reporter: ReportingProcess | SilentReporter) -> str:
    """Return the name of a reporter."""
    if reporter.host_pid is not None:
        return str(reporter.host_pid)
    namespace, pid, owner_uid, place = reporter.key
    if owner_uid is None:
        return f"{pid}@{namespace}"
    return f"{pid}@{namespace}:{owner_uid}" + (f":{place}" if place.container else "")


def command_of(host_command: str, reported_command: str) -> str:
    """Return the command of a process, from the host's description and the reported one: the host's, if there is one.

    Ray sets the title of an actor's process to its class and method. Only the reporter knows which actor it is.
    """
    if reported_command.startswith(_RAY) and host_command.startswith(_RAY):
        return reported_command
    return host_command or reported_command


def pid_order(pid: str) -> tuple[int, int, int, str]:
    """Return a sort key for a name: by pid, then a plain pid before `pid@namespace`, then by user and container."""
    number, at, rest = pid.partition("@")
    if not at:
        return int(number), -1, -1, ""
    namespace, _, owner = rest.partition(":")
    owner_uid, _, container = owner.partition(":")
    return int(number), int(namespace), int(owner_uid or -1), container


def json_pid(pid: str) -> int | str:
    """Return a name as a JSON value: a number if possible."""
    return int(pid) if pid.isdecimal() else pid


def _represented(snapshot: Snapshot) -> tuple[list[ReportingProcess], list[SilentReporter]]:
    """Return the reporters without those whose pid the host shows to belong to a process that started later."""
    facts_by_pid = snapshot.node.facts if snapshot.node is not None and snapshot.node.up else {}

    def replaced(reporter: ReportingProcess | SilentReporter) -> bool:
        facts = facts_by_pid.get(reporter.host_pid) if reporter.host_pid is not None else None
        return facts is not None and facts.start_time_ticks > reporter.start_time_ticks > 0

    processes = [process for process in snapshot.processes if not replaced(process)]
    return processes, [reporter for reporter in snapshot.silent if not replaced(reporter)]
