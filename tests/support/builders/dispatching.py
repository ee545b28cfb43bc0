"""A dispatcher with reporting processes and a manual clock."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Hashable
from typing import Any

from gpumem_client.wire.protocol import MODES, CommandResult, DeviceResult
from gpumem_exporter.actions.action import Action
from gpumem_exporter.actions.action_options import DEFAULT_ACTIONS, ActionRequest, Target
from gpumem_exporter.actions.dispatcher import Dispatcher
from gpumem_exporter.actions.terminate import Terminator
from gpumem_exporter.core.caller import Caller
from gpumem_exporter.core.container import HERE
from gpumem_exporter.core.samples import ReportingProcess
from gpumem_exporter.core.store import Store
from gpumem_exporter.features.engines.engine_memory import EngineMemory
from tests.support.builders.builders import MIB, UNLIMITED, UUIDS, NobodyHost, device, node, report, sample

EVERYBODY = Target(all=True)


def build_dispatcher(
    store: Store, clock: Callable[[], float], finished: list[Action] | None = None, **changes: Any
) -> Dispatcher:
    """Return a dispatcher without limits that appends the finished actions to a list.

    It knows engines: `engines` finds them, and `poll_soon` lets the driver be read.
    """
    finder, poll_soon = changes.pop("engines", None), changes.pop("poll_soon", lambda: None)
    hide_identities = changes.pop("hide_identities", False)
    wall_clock = changes.pop("wall_clock", lambda: 1e9 + clock())
    dispatcher = Dispatcher(
        **{
            "store": store,
            "allowed": frozenset(DEFAULT_ACTIONS),
            "clock": clock,
            "wall_clock": wall_clock,
            "on_finished": [].append if finished is None else finished.append,
            "limits": UNLIMITED,
            "terminator": Terminator(NobodyHost()),
            **changes,
        },
    )
    dispatcher.engines = EngineMemory(
        store,
        dispatcher.actions,
        finder,
        clock=clock,
        wall_clock=wall_clock,
        poll_soon=poll_soon,
        spawn=dispatcher.spawn,
        hide_identities=hide_identities,
    )
    return dispatcher


class Bench:
    """A dispatcher with two processes, rank 0 on devices 0 and 1 and rank 1 on device 1, and a manual clock."""

    def __init__(self) -> None:
        self.now = 100.0
        self.finished: list[Action] = []
        self.woken: list[Hashable] = []
        self.store = Store(report_expiry_seconds=15.0, reading_expiry_seconds=5.0, max_processes=10)
        self.store.put_reading(node(device(UUIDS[0], gpu="0"), device(UUIDS[1], gpu="1"), taken=100.0))
        self.dispatcher = self.build()
        self.sequence = 0
        self.first = self.put(
            1, rank="0", devices=(sample(UUIDS[0], 8 * MIB, 4 * MIB), sample(UUIDS[1], 2 * MIB, MIB, MIB))
        )
        self.second = self.put(2, rank="1", devices=(sample(UUIDS[1], 0, 16 * MIB),))

    def build(self, **changes: Any) -> Dispatcher:
        return build_dispatcher(self.store, lambda: self.now, self.finished, wake=self.woken.append, **changes)

    def put(self, pid: int, **changes: Any) -> ReportingProcess:
        self.sequence += 1
        owner_uid = changes.pop("owner_uid", 0)
        place = changes.pop("place", HERE)
        sent = report(pid, sequence=self.sequence, **changes)
        return self.store.put_report(
            sent, host_pid=pid, owner_uid=owner_uid, place=place, now_seconds=self.now, now_unix_seconds=self.now
        )

    def ask(self, action: str = "empty_cache", target: Target = EVERYBODY, **changes: Any) -> Action:
        key = changes.pop("idempotency_key", None)
        caller = changes.pop("caller", None) or Caller.policy("test")
        request = ActionRequest(action=action, target=target, **changes)
        return self.dispatcher.submit(request, requested_by=caller, idempotency_key=key)

    def current(self, action: Action) -> Action:
        """Return the action as it is now."""
        found = self.dispatcher.get(action.id)
        assert found is not None
        return found

    def answer(self, process: ReportingProcess, action: Action, outcome: str = "done", freed: int = 0) -> None:
        devices = tuple(DeviceResult(s.uuid, freed_bytes=freed) for s in process.report.devices)
        result = CommandResult(action.id, outcome, devices=devices if outcome == "done" else ())
        self.dispatcher.take_results(
            dataclasses.replace(process, report=dataclasses.replace(process.report, results=(result,)))
        )


class Ranks(Bench):
    """Two ranks with one step per 0.1 s, after 50 and 48 steps."""

    def __init__(self) -> None:
        super().__init__()
        self.first = self.rank(1, "0", 50)
        self.second = self.rank(2, "1", 48)

    def rank(self, pid: int, rank: str, step: int | None, **changes: Any) -> ReportingProcess:
        known = {"modes": MODES, "step": step, "step_seconds": 0.1, "devices": (sample(UUIDS[0], 0, MIB),)}
        return self.put(pid, rank=rank, **{**known, **changes})

    def ask_group(self, **changes: Any) -> Action:
        return self.ask(**{"target": Target(rank="0"), "mode": "step", **changes})

    def says(self, process: ReportingProcess, *waiting: str) -> ReportingProcess:
        """Let the process report again with these waiting commands."""
        reported = dataclasses.replace(process, report=dataclasses.replace(process.report, waiting=waiting))
        self.dispatcher.take_results(reported)
        return reported
