"""Decides what a caller may do: which actions, and on which processes. Pure.

A caller with `Rights.ALL` may request every action of `--action.allow` on every process. A caller with `Rights.OWN` may
request actions that only affect its own processes. The owner of a process is the uid and the place that the kernel
names.
"""

from __future__ import annotations

from collections.abc import Iterable

from gpumem_exporter.actions.caller import Caller, Rights
from gpumem_exporter.actions.model import Action
from gpumem_exporter.actions.request import ActionRequest
from gpumem_exporter.core.samples import ReportingProcess, Snapshot
from gpumem_exporter.errors import ActionForbiddenError

__all__ = ["may_act_on", "may_see", "permitted_actions", "permitted_processes", "require_permission"]

_ONLY_ALL = frozenset({"terminate"})
"""The actions that need `Rights.ALL`."""
_FORCED_FOR_OWN = frozenset({"empty_cache"})
"""The actions that need no more rights with `force`. `engine_starts` decides whose engines a clear may disturb."""


def permitted_actions(caller: Caller, allowed: Iterable[str]) -> tuple[str, ...]:
    """Return the actions, of those that `--action.allow` has, which the caller may request."""
    if caller.rights is Rights.NONE:
        return ()
    return tuple(action for action in allowed if caller.rights is Rights.ALL or action not in _ONLY_ALL)


def permitted_processes(caller: Caller, snapshot: Snapshot) -> int:
    """Return the number of reporting processes that the caller may act on."""
    return sum(may_act_on(caller, process) for _, process in snapshot.names.reporting)


def require_permission(caller: Caller, request: ActionRequest) -> None:
    """Check that a caller may request an action.

    Raises:
        ActionForbiddenError: the action needs the rights to act on every process.
    """
    if caller.rights is Rights.ALL:
        return
    forces_all = request.force and request.action not in _FORCED_FOR_OWN
    if request.action in _ONLY_ALL or forces_all or caller.rights is Rights.NONE:
        what = f"{request.action} with force" if request.force else request.action
        raise ActionForbiddenError(
            f"{what} needs root or the exporter's user, outside of containers, or the token of --action.token-file; "
            f"{caller} has the rights {caller.rights.value!r}"
        )


def may_act_on(caller: Caller, process: ReportingProcess) -> bool:
    """Return whether a process is a possible target of a caller.

    Outside of containers, a user owns its processes wherever they run, as with kill(2). In a container, a user owns its
    processes in the same container, and root owns all processes there.
    """
    if caller.rights is not Rights.OWN:
        return caller.rights is Rights.ALL
    if caller.uid is None or not process.attested or not caller.place.reaches(process.key.place):
        return False
    return process.owner_uid == caller.uid or (caller.uid == 0 and not caller.place.here)


def may_see(caller: Caller, action: Action) -> bool:
    """Return whether the audit log shows an action to a caller."""
    return caller.rights is Rights.ALL or (caller.rights is Rights.OWN and action.caller == caller.key)
