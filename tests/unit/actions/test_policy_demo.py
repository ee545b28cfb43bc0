"""The policy on the demo's workloads for four simulated minutes: real store, dispatcher and engine, no real time."""

from __future__ import annotations

import asyncio
import itertools
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import pytest

from gpumem_exporter.actions.caller import Caller
from gpumem_exporter.actions.model import Action
from gpumem_exporter.actions.policy.engine import Engine
from gpumem_exporter.actions.policy.file import read_policy
from gpumem_exporter.actions.policy.model import Rule
from gpumem_exporter.actions.policy.outcomes import Stop
from gpumem_exporter.actions.policy.rule_state import Decision
from gpumem_exporter.actions.request import DEFAULT_ACTIONS
from gpumem_exporter.core.samples import DeviceReading, NodeReading
from gpumem_exporter.core.store import Store
from gpumem_exporter.demo import DemoNode
from gpumem_exporter.demo.process import SimulatedProcess
from gpumem_exporter.demo.workloads import DEMO_WORKLOADS
from gpumem_exporter.wire.protocol import CommandResult, Reply
from tests.support.dispatching import build_dispatcher

START = 1000.0
SECONDS = 250.0
"""Long enough for three clears of the fragmented workload, and for the stop where clearing does not help."""


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
        self.dispatcher = build_dispatcher(self.store, lambda: self.now, self.finished)
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


def running(program: str) -> str:
    """The workload that runs a program of the demo."""
    (name,) = {workload.name for workload in DEMO_WORKLOADS if workload.program.__name__ == program}
    return name


HOARDER = running("notebook")
FRAGMENTED = running("varying_length_training")
UNHELPED = running("pipeline_training")
"""Its next step needs its slack: it reserves released memory again at once."""

POLICY = f"""
rules:
  - name: hoarded
    workloads: ["*"]
    when: {{slack_bytes: {{over: 4GiB}}, idle_seconds: {{over: 60s}}}}
    do: {{action: empty_cache, mode: idle}}
    cooldown: 2m
    dry_run: false
  - name: fragmented
    workloads: ["*"]
    when: {{fragmentation_ratio: {{over: 30%}}, fragmented_bytes: {{over: 2GiB}}}}
    do: {{action: empty_cache, mode: step}}
    cooldown: 2m
    dry_run: false
  - name: slack
    workloads: [{UNHELPED}]
    when: {{slack_bytes: {{over: 2GiB}}}}
    for: 5s
    do: {{action: empty_cache, mode: step}}
    cooldown: 30s
    stop_after: {{clears: 3, freed_under: 1GiB, still_free_after: 10s}}
    dry_run: false
"""


@dataclass(frozen=True)
class Runs:
    """The same node, three times: with the policy, with the policy as a dry run, and without."""

    real: DemoBench
    dry: DemoBench
    without: DemoBench


@pytest.fixture(scope="module", params=[1, 3])
def runs(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Runs:
    """Four minutes of a node; the parameter is its seed."""
    path = tmp_path_factory.mktemp("policy") / "policy.yml"
    path.write_text(POLICY)
    rules = read_policy(path, allowed=DEFAULT_ACTIONS)
    path.write_text(POLICY.replace("dry_run: false", "dry_run: true"))
    dry = read_policy(path, allowed=DEFAULT_ACTIONS)
    benches = [DemoBench(each, seed=request.param) for each in (rules, dry, ())]
    for bench in benches:
        bench.pass_time(SECONDS)
    return Runs(*benches)


def acted(bench: DemoBench) -> Iterator[tuple[str, str]]:
    """Which rule acted on which workload, each time."""
    for _, decision in bench.decided:
        yield decision.rule.name, decision.observation.process.report.process.workload


def test_the_policy_clears_the_hoarder_and_the_fragmented_workload_only(runs: Runs) -> None:
    assert len({workload.name for workload in DEMO_WORKLOADS}) == 10
    assert set(acted(runs.real)) == {("hoarded", HOARDER), ("fragmented", FRAGMENTED), ("slack", UNHELPED)}
    freed: dict[str, int] = {}
    for action in runs.real.finished:
        assert action.state == "done"
        assert action.requested_by.startswith("policy:")
        freed[action.requested_by] = freed.get(action.requested_by, 0) + action.freed_bytes
    assert freed["policy:hoarded"] > 10 << 30
    assert freed["policy:fragmented"] > 1 << 30


def test_a_rule_stops_where_clearing_does_not_help(runs: Runs) -> None:
    (stop,) = runs.real.stops
    assert stop.rule.name == "slack"
    assert {result.workload for result in stop.action.results} == {UNHELPED}
    assert re.search(r"\b0 bytes\b.*\b10 s", stop.reason)
    assert list(acted(runs.real)).count(("slack", UNHELPED)) == 3
    assert runs.real.engine.stopped("slack") == 1


def test_each_rule_keeps_its_cooldown(runs: Runs) -> None:
    times: dict[str, list[float]] = {}
    for seconds, decision in runs.real.decided:
        times.setdefault(decision.rule.name, []).append(seconds)
    for rule in runs.real.engine.rules:
        gaps = [later - sooner for sooner, later in itertools.pairwise(times[rule.name])]
        assert all(gap >= rule.cooldown_seconds for gap in gaps), (rule.name, times[rule.name])


def test_a_dry_run_changes_nothing_and_predicts_the_same_actions(runs: Runs) -> None:
    assert set(acted(runs.dry)) == set(acted(runs.real))
    assert first_at(runs.dry, "hoarded") == first_at(runs.real, "hoarded") > START
    assert all(action.dry_run for action in runs.dry.finished)
    assert books(runs.dry) == books(runs.without) != books(runs.real)


def first_at(bench: DemoBench, rule: str) -> float:
    """When a rule acted first."""
    return next(seconds for seconds, decision in bench.decided if decision.rule.name == rule)


def books(bench: DemoBench) -> dict[str, int]:
    """The used bytes of each device, from the driver."""
    devices = bench.node.provider.devices()
    return {device.uuid: bench.node.provider.read_memory(device.uuid).used_bytes for device in devices}
