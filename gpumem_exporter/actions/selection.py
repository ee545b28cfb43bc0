"""Selects the processes of a request at one time."""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass

from gpumem_client.wire.units import counted
from gpumem_exporter.actions.caller import Caller, Rights
from gpumem_exporter.actions.group import group_of, group_step
from gpumem_exporter.actions.mismatch import known_names, mismatch, unknown_names
from gpumem_exporter.actions.permission import may_act_on
from gpumem_exporter.actions.request import ActionRequest
from gpumem_exporter.actions.results import TerminationTarget, listed_target, reporting_target
from gpumem_exporter.actions.targets import ListedProcess, SelectedProcess, listed_pids, select_listed, select_reporting
from gpumem_exporter.core.naming import Names
from gpumem_exporter.core.samples import ReportingProcess, Snapshot
from gpumem_exporter.errors import ActionForbiddenError, TargetNotFoundError

__all__ = ["Selection", "select"]

_Reporting = Sequence[tuple[str, ReportingProcess]]


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

    def termination_targets(self) -> list[TerminationTarget]:
        """Return the processes as `terminate` needs them."""
        reporting = [reporting_target(selected, self.snapshot) for selected in self.reporting]
        return [*reporting, *map(listed_target, self.listed)]

    def identities(self) -> Iterator[tuple[int | str, str, str]]:
        """Yield name, workload and rank of each process."""
        for one in self.reporting:
            identity = one.process.report.process
            yield one.pid, identity.workload, identity.rank
        yield from ((listed.pid, "", "") for listed in self.listed)


def select(
    request: ActionRequest, caller: Caller, snapshot: Snapshot, now_seconds: float, *, hide_identities: bool = False
) -> Selection:
    """Select the processes of a request that its caller may act on; a group has all ranks of their workload.

    Args:
        request: the request.
        caller: who requests it.
        snapshot: the state of the node.
        now_seconds: on the clock of the snapshot.
        hide_identities: name only the caller's processes in errors.

    Raises:
        TargetNotFoundError: no process or device has one of the target's names, or nothing matches the target.
        ActionForbiddenError: only processes match that the caller may not act on.
        GroupIncompleteError: a rank of the group cannot take part.
    """
    reporting = Names.of(snapshot).reporting
    permitted = [(name, process) for name, process in reporting if may_act_on(caller, process)]
    shown = permitted if hide_identities else reporting
    if request.target.given():
        _require_known(request, snapshot, permitted, shown)
    matching = tuple(select_reporting(request.target, snapshot))
    listed = tuple(select_listed(request.target, snapshot)) if request.action == "terminate" else ()
    if not matching and not listed:
        raise TargetNotFoundError(mismatch(request.target, shown))
    selected = _permitted(matching, caller)
    if not selected and not listed:
        raise ActionForbiddenError(
            f"{request.target.describe()} matches only processes of others; "
            f"{caller} may act on its own processes, "
            f"of which {counted(len(permitted), 'reports', 'report')}"
        )
    if not request.group:
        return Selection(snapshot, selected, listed, None)
    ranks = _permitted(group_of(selected, request.target, caller, snapshot), caller)
    return Selection(snapshot, ranks, (), group_step(request, ranks, now_seconds))


def _require_known(request: ActionRequest, snapshot: Snapshot, permitted: _Reporting, shown: _Reporting) -> None:
    """Check that each name of the target exists. An action on only some of the names would hide a typing error."""
    names, terminates = Names.of(snapshot), request.action == "terminate"
    known = known_names(snapshot, names.reporting, permitted, with_listed=terminates)
    unreported = {*map(str, listed_pids(snapshot)), *(name for name, _ in names.silent)} - {*known["pid"]}
    named = known_names(snapshot, shown, permitted, with_listed=terminates)
    if unknown := unknown_names(request.target, known, unreported, shown=named):
        raise TargetNotFoundError(unknown)


def _permitted(processes: tuple[SelectedProcess, ...], caller: Caller) -> tuple[SelectedProcess, ...]:
    if caller.rights is Rights.ALL:
        return processes
    return tuple(one for one in processes if may_act_on(caller, one.process))
