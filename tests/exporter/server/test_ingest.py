"""The steps of a report, with the parts of an exporter that was built but not started."""

from __future__ import annotations

import asyncio
import json
import os
from typing import Any

import pytest
from prometheus_client import CollectorRegistry

from gpumem_client.wire.protocol import CommandResult, DeviceResult, Report, to_wire
from gpumem_exporter.actions.caller import Caller
from gpumem_exporter.actions.model import ActionRequest, Target
from gpumem_exporter.core.place import HERE
from gpumem_exporter.core.samples import Snapshot
from gpumem_exporter.server.http.peer import Peer
from gpumem_exporter.server.runtime import Runtime, build_runtime
from gpumem_exporter.server.settings import load_settings
from tests.support.builders import UUIDS, device, node, report, sample
from tests.support.running_exporter import ScriptedHost, ScriptedProvider

OWN = Peer(uid=os.geteuid(), pid=os.getpid(), place=HERE)


@pytest.fixture
def host() -> ScriptedHost:
    return ScriptedHost()


@pytest.fixture
def runtime(host: ScriptedHost) -> Runtime:
    runtime = build_runtime(
        load_settings({}, {}),
        provider=ScriptedProvider(),
        host=host,
        clock=lambda: 100.0,
        wall_clock=lambda: 1e9,
        registry=CollectorRegistry(),
    )
    runtime.store.put_reading(node(device(), taken=100.0))
    return runtime


async def take(runtime: Runtime, sent: Report, peer: Peer | None = None) -> dict[str, Any]:
    async def receive() -> dict[str, Any]:
        raise AssertionError("nothing is held")

    scope = {"client": None, "state": {"peer": peer or Peer()}}
    reply = await runtime.ingest.take(scope, json.dumps(to_wire(sent)).encode(), receive)
    assert reply is not None
    document: dict[str, Any] = json.loads(reply)
    return document


def test_a_report_goes_through_all_steps_with_at_most_one_snapshot(
    runtime: Runtime, host: ScriptedHost, monkeypatch: pytest.MonkeyPatch
) -> None:
    snapshots: list[float] = []
    take_snapshot = runtime.store.snapshot

    def counted(now_seconds: float) -> Snapshot:
        snapshots.append(now_seconds)
        return take_snapshot(now_seconds)

    async def steps() -> None:
        first = report(7, devices=(sample(allocated=5, reclaimable=7),), actions=("empty_cache",))
        assert "commands" not in await take(runtime, first, OWN)
        assert host.lookups == [(7, os.getpid())]
        action = runtime.dispatcher.submit(
            ActionRequest("empty_cache", Target(all=True)), requested_by=Caller.policy("t")
        )
        await asyncio.sleep(0)  # the request is recorded before a process gets its command
        monkeypatch.setattr(runtime.store, "snapshot", counted)
        again = report(7, devices=(sample(allocated=5, reclaimable=7),), sequence=2, actions=("empty_cache",))
        (command,) = (await take(runtime, again, OWN))["commands"]
        result = CommandResult(command["id"], "done", devices=(DeviceResult(UUIDS[0], 12, 5, freed_bytes=7),))
        await take(runtime, report(7, devices=(sample(allocated=5),), sequence=3, results=(result,)), OWN)
        finished = runtime.dispatcher.get(action.id)
        assert finished is not None
        assert [(row.gpu, row.outcome, row.freed_bytes) for row in finished.results] == [("0", "done", 7)]
        await take(runtime, report(7, sequence=4, final=True), OWN)

    asyncio.run(steps())

    assert snapshots == [], "these reports need no name of a process without a host pid"
    monkeypatch.undo()
    assert runtime.snapshot().processes == ()


def test_a_repeated_final_report_removes_the_process(runtime: Runtime) -> None:
    async def steps() -> None:
        await take(runtime, report(7))
        await take(runtime, report(7, final=True))

    asyncio.run(steps())

    assert runtime.snapshot().processes == ()
