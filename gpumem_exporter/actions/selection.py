"""Selects the processes of a request at one time."""

from __future__ import annotations

from collections.abc import Hashable, Iterator
from dataclasses import dataclass

from gpumem_exporter.actions.caller import Caller, Rights
from gpumem_exporter.actions.group import group_of, group_step
from gpumem_exporter.actions.mismatch import known_names, mismatch, unknown_names
from gpumem_exporter.actions.permission import may_act_on, permitted_processes
from gpumem_exporter.actions.request import ActionRequest
from gpumem_exporter.actions.targets import ListedProcess, SelectedProcess, listed_pids, select_listed, select_reporting
from gpumem_exporter.core.naming import Names
from gpumem_exporter.core.samples import Snapshot
from gpumem_exporter.errors import ActionForbiddenError, TargetNotFoundError
from gpumem_exporter.units import counted

__all__ = ["Selection", "select"]


@dataclass(frozen=True, slots=True)
class Selection:
    """The processes of a request."""

    snapshot: Snapshot
    reporting: tuple[SelectedProcess, ...]
    listed: tuple[ListedProcess, ...]
    """Processes that only the driver lists. Only `terminate` reaches them."""
    at_step: int | None
    """The step after which a group acts."""

    def limit_keys(self) -> Iterator[tuple[Hashable, str]]:
        """Yield the key and the name of each process for the rate limits."""
        yield from ((one.process.key, str(one)) for one in self.reporting)
        yield from ((listed.pid, f"pid {listed.pid}") for listed in self.listed)

    def identities(self) -> Iterator[tuple[int | str, str, str]]:
        """Yield name, workload and rank of each process."""
        for one in self.reporting:
            identity = one.process.report.process
            yield one.pid, identity.workload, identity.rank
        yield from ((listed.pid, "", "") for listed in self.listed)


def select(request: ActionRequest, caller: Caller, snapshot: Snapshot, now_seconds: float) -> Selection:
    """Select the processes of a request that its caller may act on; a group has all ranks of their workload.

    Raises:
        TargetNotFoundError: no process or device has one of the target's names, or nothing matches the target.
        ActionForbiddenError: only processes match that the caller may not act on.
        GroupIncompleteError: a rank of the group cannot take part.
    """
    _require_known(request, caller, snapshot)
    matching = tuple(select_reporting(request.target, snapshot))
    listed = tuple(select_listed(request.target, snapshot)) if request.action == "terminate" else ()
    if not matching and not listed:
        raise TargetNotFoundError(mismatch(request.target, snapshot))
    reporting = _permitted(matching, caller)
    if not reporting and not listed:
        raise ActionForbiddenError(
            f"{request.target.describe()} matches only processes of others; "
            f"{caller} may act on its own processes, "
            f"of which {counted(permitted_processes(caller, snapshot), 'reports', 'report')}"
        )
    if not request.group:
        return Selection(snapshot, reporting, listed, None)
    ranks = _permitted(group_of(reporting, request.target, caller, snapshot), caller)
    return Selection(snapshot, ranks, (), group_step(request, ranks, now_seconds))


def _require_known(request: ActionRequest, caller: Caller, snapshot: Snapshot) -> None:
    """Check that each name of the target exists. An action on only some of the names would hide a typing error."""
    reporting = Names.of(snapshot).reporting
    permitted = [(name, process) for name, process in reporting if may_act_on(caller, process)]
    known = known_names(snapshot, permitted, with_listed=request.action == "terminate")
    unreported = {*map(str, listed_pids(snapshot)), *(name for name, _ in Names.of(snapshot).silent)} - {*known["pid"]}
    if unknown := unknown_names(request.target, known, unreported):
        raise TargetNotFoundError(unknown)


def _permitted(processes: tuple[SelectedProcess, ...], caller: Caller) -> tuple[SelectedProcess, ...]:
    if caller.rights is Rights.ALL:
        return processes
    return tuple(one for one in processes if may_act_on(caller, one.process))
