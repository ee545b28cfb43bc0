"""The documented policies on the demo's workloads for four simulated minutes: real store, dispatcher and engine."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest
import yaml

from gpumem_client.reporter.delivery import Outcome
from gpumem_client.wire.protocol import Reply
from gpumem_exporter.actions.policy.values import read_quantity
from gpumem_exporter.actions.request import DEFAULT_ACTIONS
from gpumem_exporter.collectors.instruments import Instruments
from gpumem_exporter.core.store import Store
from gpumem_exporter.demo import DemoNode
from gpumem_exporter.demo.process import SimulatedProcess
from gpumem_exporter.demo.workloads import DEMO_WORKLOADS
from gpumem_exporter.nvml.reader import NodeReader
from gpumem_exporter.server.background.policy_runner import PolicyRunner
from tests.support.dispatching import build_dispatcher
from tests.support.paths import REPOSITORY
from tests.support.recorder_bench import RecordedLog

START = 1000.0
SECONDS = 250.0
"""Long enough for the clears of each rule, and for their settling."""


class DemoBench:
    """The node, its reporters, the store, the dispatcher and the policy in this file."""

    def __init__(self, policy: Path, seed: int) -> None:
        self.now = START
        self.node = DemoNode(seed=seed, clock=lambda: self.now)
        self.store = Store(report_expiry_seconds=15.0, reading_expiry_seconds=5.0, max_processes=100)
        self.dispatcher = build_dispatcher(self.store, lambda: self.now)
        self.reader = NodeReader(
            self.node.provider, self.node.host, clock=lambda: self.now, wall_clock=lambda: self.now
        )
        self.policies = PolicyRunner(
            policy,
            allowed=frozenset(DEFAULT_ACTIONS),
            dispatcher=self.dispatcher,
            snapshot=lambda: self.store.snapshot(self.now),
            stale_seconds=5.0,
            instruments=Instruments(),
            log=RecordedLog(),  # type: ignore[arg-type]
            wall_clock=lambda: self.now,
        )
        self.reporters: dict[int, SimulatedProcess] = {}

    async def pass_time(self, seconds: float) -> None:
        """Advance the node, its reporters and the policy, second by second."""
        end = self.now + seconds
        while self.now < end:
            for _ in range(2):
                self.now += 0.5
                self.node.simulation.advance(self.now)
            self.store.put_reading(self.reader.read())
            await self._report()
            self.dispatcher.expire()
            self.policies.tick()

    async def _report(self) -> None:
        alive = {process.pid: process for process in self.node.simulation.processes() if process.reports}
        for pid in self.reporters.keys() - alive.keys():
            gone = self.reporters.pop(pid).identity
            for known in self.store.snapshot(self.now).processes:
                if known.report.process.session == gone.session:
                    self.store.forget(known.key)
                    self.dispatcher.process_gone(known.key, "it has ended")
        for pid, process in alive.items():
            self.reporters[pid] = process
            sent = process.loop.next_report()
            known = self.store.put_report(sent, host_pid=pid, now_seconds=self.now, now_unix_seconds=self.now)
            self.dispatcher.take_results(known)
            commands = self.dispatcher.commands(known)
            process.loop.answered(sent, Outcome.ACCEPTED, Reply(commands=tuple(commands)))


(HOARDER,) = {workload.name for workload in DEMO_WORKLOADS if workload.program.__name__ == "notebook"}


DOCUMENTED = REPOSITORY / "docs" / "policies-and-alerts.md"


def example_rules(path: Path) -> list[dict[str, Any]]:
    """Return the rules of a policy file, or of the first block of YAML in a document."""
    text = path.read_text()
    if path.suffix == ".md":
        text = text.partition("```yaml\n")[2].partition("```")[0]
    return list(yaml.safe_load(text)["rules"])


@pytest.mark.parametrize("path", [REPOSITORY / "deploy" / "policy.example.yml", DOCUMENTED], ids=lambda path: path.name)
def test_what_the_clears_of_an_example_must_free_is_still_free_after_its_settling_time(
    tmp_path: Path, path: Path
) -> None:
    rules = example_rules(path)
    for rule in rules:
        rule |= {"workloads": ["*"], "dry_run": False}
        # Whether a device is full decides when a rule acts, not what its clear releases.
        rule["when"] = {field: bounds for field, bounds in rule["when"].items() if not field.startswith("device_")}
    policy = tmp_path / "policy.yml"
    policy.write_text(yaml.safe_dump({"rules": rules}))
    bench = DemoBench(policy, seed=1)
    asyncio.run(bench.pass_time(SECONDS))
    least_bytes = {
        f"policy:{rule['name']}": read_quantity(rule["when"]["idle_cache_bytes"]["over"], "bytes")
        for rule in rules
        if rule["do"]["action"] == "empty_cache"
    }
    settled = [action for action in bench.dispatcher.recent() if action.state == "done" and not action.settling]
    assert HOARDER in {action.results[0].workload for action in settled}
    kept = [(action.requested_by, action.results[0].workload, action.still_free_bytes) for action in settled]
    assert [one for one in kept if one[2] is None or one[2] < least_bytes[one[0]]] == []
