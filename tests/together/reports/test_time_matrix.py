"""Samples, readings and actions at different times: exported values belong together, or the residual shows it."""

from __future__ import annotations

from typing import Any

from tests.conftest import StartExporter
from tests.emulation.fixtures import StartTorch
from tests.emulation.node import EmulatedNode
from tests.support.truth.device_truth import scrape, wait_until_right
from tests.support.waiting import wait_for


def test_after_an_action_the_driver_is_read_immediately(
    node: EmulatedNode, start_exporter: StartExporter, start_torch: StartTorch
) -> None:
    exporter = start_exporter(node, "--report.interval", "0.2", "--collect.interval", "600")
    process = start_torch(node, GPUMEM_EXPORTER_URL=exporter.url)
    process.call("start_client")
    process.call("random_heap", seed=5, blocks=60)
    exporter.wait_for_processes(process.pid)
    uuid, pid = node.uuid(0), process.pid
    # The only poll may have been before the start of the process; the first action causes another.
    exporter.act("empty_cache", target={"pid": pid})
    wait_until_right(exporter, node, (0,), {0: [process]})
    context_bytes = node.books()[0].processes[pid] - process.call("stats")["reserved_bytes.all.current"]

    process.call("free")
    reserved = process.call("stats")["reserved_bytes.all.current"]
    wait_for(
        lambda: scrape(exporter).ledgers()[uuid]["torch_reclaimable"] == reserved > 0, "a report of the free cache"
    )
    assert exporter.act("empty_cache", target={"pid": pid})["freed_bytes"] == reserved
    seen: list[Any] = []
    while not seen or seen[-1] != (0, reserved):
        metrics = scrape(exporter)
        ledger = metrics.ledgers()[uuid]
        used = int(metrics.value("gpumem_process_memory_used_bytes", pid=str(pid), uuid=uuid))
        reported = ledger["torch_allocated"] + ledger["torch_reclaimable"] + ledger["torch_fragmented"]
        # The context alone, if report and reading have the same time; otherwise the difference between them too.
        assert ledger["non_torch"] - context_bytes == (used - context_bytes) - reported
        seen.append((reported, context_bytes + reserved - used))
        assert set(seen[-1]) <= {0, reserved}, seen
    wait_until_right(exporter, node, (0,), {0: [process]})
