"""What `info` and `top` print is of one time, also if the node changes between any two requests."""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator
from typing import Any

import pytest

from gpumem_exporter.core.samples import ProcessMemory, Snapshot
from tests.support.builders import MIB, UUIDS, report, sample
from tests.support.running_command import run_command
from tests.support.running_exporter import RunningExporter, ScriptedProvider, running_exporter
from tests.support.waiting import eventually


@pytest.fixture
def changing() -> Iterator[RunningExporter]:
    """An exporter whose only process reports another value before each snapshot."""
    provider = ScriptedProvider()
    provider.processes[UUIDS[0]] = (ProcessMemory(4711, 350 * MIB),)
    with running_exporter(provider=provider) as exporter:
        store, numbers = exporter.runtime.store, itertools.count(1)
        take = store.snapshot

        def snapshot(now_seconds: float, **inputs: Any) -> Snapshot:
            number = next(numbers)
            allocated = (number % 200 + 1) * MIB
            changed = report(4711, sequence=number, devices=(sample(UUIDS[0], allocated, 300 * MIB - allocated),))
            store.put_report(changed, host_pid=4711, now_seconds=now_seconds, now_unix_seconds=1e9, owner_uid=0)
            return take(now_seconds, **inputs)

        store.snapshot = snapshot  # type: ignore[method-assign]
        eventually(lambda: exporter.document("/api/v1/devices")["devices"][0]["ledger"]["torch_allocated"])
        yield exporter


@pytest.mark.parametrize("arguments", [("info", "--json"), ("top", "--once", "--json")])
def test_the_ledger_has_the_bytes_of_the_processes_beside_it(
    changing: RunningExporter, arguments: tuple[str, ...]
) -> None:
    ended = run_command(*arguments, "--url", changing.url)
    assert ended.returncode == 0, ended.stderr
    document: dict[str, Any] = json.loads(ended.stdout)
    rows = document.get("rows") or [row for process in document["processes"] for row in process["devices"]]
    (ledger,) = [device["ledger"] for device in document["devices"] if device["uuid"] == UUIDS[0]]
    allocated = [row["allocated_bytes"] for row in rows]
    assert len(allocated) == 1
    assert ledger["torch_allocated"] == sum(allocated) > 0
