"""The demo's node on a manual clock, with the real store, dispatcher and policy engine.

Everything runs in `pass_time`: there are no threads, sockets or sleeps.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass

from gpumem_exporter.actions.caller import Caller
from gpumem_exporter.actions.dispatcher import Dispatcher
from gpumem_exporter.actions.model import Action
from gpumem_exporter.actions.policy.engine import Engine
from gpumem_exporter.actions.policy.model import Rule
from gpumem_exporter.actions.policy.outcomes import Stop
from gpumem_exporter.actions.policy.rule_state import Decision
from gpumem_exporter.actions.request import DEFAULT_ACTIONS
from gpumem_exporter.actions.terminate import Terminator
from gpumem_exporter.core.samples import DeviceReading, NodeReading
from gpumem_exporter.core.store import Store
from gpumem_exporter.demo import DemoNode
from gpumem_exporter.demo.process import SimulatedProcess
from gpumem_exporter.wire.protocol import CommandResult, Reply
from tests.support.builders import UNLIMITED, NobodyHost

START = 1000.0


@dataclass
class Reporter:
    """The reporter of one process."""

    process: SimulatedProcess
    sequence: int = 0
    results: tuple[CommandResult, ...] = ()


class DemoBench:
    """The node, its reporters, the store, the dispatcher and the policy engine."""

    def __init__(self, rules: Sequence[Rule], seed: int = 1) -> None:
        self.now = START
        self.node = DemoNode(seed=seed, clock=lambda: self.now)
        self.store = Store(report_expiry_seconds=15.0, reading_expiry_seconds=5.0, max_processes=100)
        self.finished: list[Action] = []
        self.stops: list[Stop] = []
        self.dispatcher = Dispatcher(
            self.store,
            allowed=frozenset(DEFAULT_ACTIONS),
            clock=lambda: self.now,
            wall_clock=lambda: 1e9 + self.now,
            on_finished=self.finished.append,
            terminator=Terminator(NobodyHost()),
            limits=UNLIMITED,
        )
        self.engine = Engine(rules, stale_seconds=5.0)
        self.pending: dict[str, Decision] = {}
        self.decided: list[tuple[float, Decision]] = []
        self.reporters: dict[int, Reporter] = {}

    def pass_time(self, seconds: float) -> None:
        """Advance the node, its reporters and the policy, second by second."""
        asyncio.run(self._pass_time(seconds))

    async def _pass_time(self, seconds: float) -> None:
        end = self.now + seconds
        while self.now < end:
            for _ in range(2):
                self.now += 0.5
                self.node.simulation.advance(self.now)
            self.store.put_reading(self._reading())
            await self._report()
            self.dispatcher.expire()
            self._follow_the_policy()

    def _reading(self) -> NodeReading:
        provider = self.node.provider
        devices = tuple(
            DeviceReading(
                identity.gpu,
                identity.uuid,
                memory=provider.read_memory(identity.uuid),
                processes=provider.read_processes(identity.uuid),
                utilization_ratio=provider.read_utilization_ratio(identity.uuid),
            )
            for identity in provider.devices()
        )
        return NodeReading(self.now, self.now, 0.0, up=True, devices=devices)

    async def _report(self) -> None:
        alive = {process.pid: process for process in self.node.simulation.processes() if process.reports}
        for pid in self.reporters.keys() - alive.keys():
            gone = self.reporters.pop(pid).process.identity
            for known in self.store.snapshot(self.now).processes:
                if known.report.process.session == gone.session:
                    self.store.forget(known.key)
                    self.dispatcher.process_gone(known.key, "it has ended")
        for pid, process in alive.items():
            reporter = self.reporters.setdefault(pid, Reporter(process))
            reporter.sequence += 1
            sent = process.report(reporter.sequence, reporter.results)
            known = self.store.put_report(sent, host_pid=pid, now_seconds=self.now, now_unix_seconds=self.now)
            self.dispatcher.take_results(known)
            commands = await self.dispatcher.commands(known, 0)
            reporter.results = process.run_commands(Reply(commands=tuple(commands)))

    def _follow_the_policy(self) -> None:
        for action_id in list(self.pending):
            action = self.dispatcher.get(action_id)
            if action is not None and action.finished:
                self._take(self.pending.pop(action_id), action)
        found = self.engine.evaluate(self.store.snapshot(self.now), self.dispatcher.under_way)
        self.stops += found.stops
        for decision in found.decisions:
            self.decided.append((self.now, decision))
            action = self.dispatcher.submit(decision.request, requested_by=Caller.policy(decision.rule.name))
            if action.finished:
                self._take(decision, action)
            else:
                self.pending[action.id] = decision

    def _take(self, decision: Decision, action: Action) -> None:
        stop = self.engine.finished(decision, action, self.now)
        if stop is not None:
            self.stops.append(stop)
