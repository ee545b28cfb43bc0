"""Decides what a caller may do: which actions, and on which processes. Pure.

A caller with `Rights.ALL` may request every action of `--action.allow` on every process. A caller with `Rights.OWN` may
request those that only affect its own processes. The owner of a process is the uid that the kernel names.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import cache

from gpumem_exporter.actions.caller import Caller, Rights
from gpumem_exporter.actions.model import Action
from gpumem_exporter.actions.request import ActionRequest
from gpumem_exporter.core.naming import Names
from gpumem_exporter.core.samples import ReportingProcess, Snapshot
from gpumem_exporter.errors import ActionForbiddenError
from gpumem_exporter.procfs import pid_namespace

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
    return sum(may_act_on(caller, process, snapshot) for _, process in Names.of(snapshot).reporting)


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


def may_act_on(caller: Caller, process: ReportingProcess, snapshot: Snapshot) -> bool:
    """Return whether a process is a possible target of a caller.

    Root of a container owns the processes of root in the same container, and none of the exporter's PID namespace.
    """
    if caller.rights is not Rights.OWN:
        return caller.rights is Rights.ALL
    if caller.uid is None or process.owner_uid != caller.uid:
        return False
    if caller.container is None:
        return True
    if process.key.pid_namespace in (0, _own_pid_namespace()):
        return False
    facts = snapshot.node.facts.get(process.host_pid) if snapshot.node and process.host_pid is not None else None
    by_cgroup = facts.container_id if facts is not None else ""
    return bool(caller.container) and caller.container in (by_cgroup, f"pid:[{process.key.pid_namespace}]")


def may_see(caller: Caller, action: Action) -> bool:
    """Return whether the audit log shows an action to a caller."""
    return caller.rights is Rights.ALL or (caller.rights is Rights.OWN and action.caller == caller.key)


@cache
def _own_pid_namespace() -> int:
    return pid_namespace("/proc/self")
