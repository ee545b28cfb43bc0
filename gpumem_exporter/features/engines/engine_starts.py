"""The inference engines whose start an action must not spoil. Pure.

Memory that another process releases while an engine starts makes the start fail: see `core.starting_engines`.
"""

from __future__ import annotations

from collections.abc import Set as AbstractSet

from gpumem_exporter.actions.action import EngineWait
from gpumem_exporter.actions.action_options import ActionRequest
from gpumem_exporter.actions.selection import SelectedProcess, processes_of
from gpumem_exporter.core.caller import Caller
from gpumem_exporter.core.container import HERE
from gpumem_exporter.core.naming import json_pid
from gpumem_exporter.core.samples import Snapshot, StartingEngine

# The actions that release memory to the driver or take memory from it. A garbage collection leaves the memory in the
# allocator's cache, and a fraction releases nothing, with or without force.
_DISTURBING = frozenset({"empty_cache", "terminate", "release_memory", "resume_memory"})


def engines_to_wait_for(
    request: ActionRequest,
    caller: Caller,
    one: SelectedProcess,
    outside: AbstractSet[int | None],
    snapshot: Snapshot,
    *,
    unix_offset_seconds: float = 0.0,
    hide_identities: bool = False,
) -> tuple[EngineWait, ...]:
    """Return the engines that start on the devices of a process, each once for each device: see `Engines.waits_for`.

    `unix_offset_seconds` is the time of the Unix epoch at zero of the snapshot's clock. With `hide_identities`, the
    titles of other users' processes are empty.
    """
    if request.action not in _DISTURBING or not snapshot.starting:
        return ()
    addressed = outside if one.host_pid in outside else {one.host_pid}
    # The process may use another device since the request.
    uuids = {*one.uuids, *processes_of(snapshot).get(one.key, one).uuids}
    found: dict[tuple[int | str, str], EngineWait] = {}
    # An engine may be known by its title and by its report: the entry that counts for longer is shown.
    for engine in sorted(snapshot.starting, key=lambda each: each.until_seconds):
        # The own start of a process that is terminated, or whose engine is addressed, does not matter.
        ends = engine.host_pid is not None and engine.host_pid in addressed and request.action != "empty_cache"
        place = engine.reporter.key.place if engine.reporter is not None else HERE
        own = caller.may_act_for(engine.owner_uid, place)
        # With `force`, the caller accepts that the start of an engine fails.
        if engine.uuid in uuids and not ends and not (request.force and own):
            until_unix_seconds = unix_offset_seconds + engine.until_seconds
            wait = _wait(engine, snapshot, until_unix_seconds, hidden=hide_identities and not own)
            found[wait.pid, wait.uuid] = wait
    return tuple(found.values())


def _wait(engine: StartingEngine, snapshot: Snapshot, until_unix_seconds: float, *, hidden: bool) -> EngineWait:
    reporter, host_pid = engine.reporter, engine.host_pid
    facts = snapshot.node.facts.get(host_pid) if host_pid is not None and snapshot.node is not None else None
    title = (facts.command if facts is not None else "") or engine.title
    pid = json_pid(reporter.name) if reporter is not None else host_pid or 0
    return EngineWait(pid, "" if hidden else title, engine.gpu, engine.uuid, until_unix_seconds)
