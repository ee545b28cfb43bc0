"""Samples, readings and actions at different times: exported values belong together, or the residual shows it."""

from __future__ import annotations

import signal
import time
from typing import Any

from tests.conftest import StartExporter
from tests.emulation.fixtures import StartTorch
from tests.emulation.node import MIB, EmulatedNode
from tests.support.device_truth import scrape, series_of, shown, truth, wait_until_right
from tests.support.exporter_process import QUICK
from tests.support.waiting import wait_for

EXPIRY_SECONDS = 3.0


def test_a_stopped_process_expires_and_its_bytes_move_in_the_same_scrape(
    node: EmulatedNode, start_exporter: StartExporter, start_torch: StartTorch
) -> None:
    exporter = start_exporter(node, *QUICK, "--report.expiry", str(EXPIRY_SECONDS))
    process, sibling = [start_torch(node, GPUMEM_EXPORTER_URL=exporter.url) for _ in range(2)]
    for number, one in enumerate((process, sibling)):
        one.call("start_client", workload=f"job-{number}")
        one.call("random_heap", seed=number, blocks=40, largest_bytes=16 * MIB)
    exporter.wait_for_processes(process.pid, sibling.pid)
    wait_until_right(exporter, node, (0, 1), {0: [process, sibling]})
    stats = {one.pid: one.call("stats") for one in (process, sibling)}
    uuid, pid = node.uuid(0), str(process.pid)
    believed, given_up = (truth(node.books()[0], known) for known in (stats, {sibling.pid: stats[sibling.pid]}))
    assert given_up["ledger"]["other_processes"] == node.books()[0].processes[process.pid]

    process.signal(signal.SIGSTOP)
    try:
        silent = False
        while not silent:
            started = time.time()
            metrics = scrape(exporter)
            last_report = metrics.value("gpumem_reporter_last_report_timestamp_seconds", pid=pid)
            silent = metrics.value("gpumem_reporter_up", pid=pid) == 0
            # There is nothing in between: a process has all its series or none.
            assert shown(metrics, uuid) == (given_up if silent else believed)
            assert silent or started <= last_report + EXPIRY_SECONDS
            time.sleep(0.02)
        torch_series = [name for name in series_of(metrics, pid=pid) if name.startswith("gpumem_torch_")]
        assert torch_series == []
        assert series_of(metrics, pid=pid, uuid=uuid) == ["gpumem_process_memory_used_bytes"]
        assert metrics.values("gpumem_reporter_sample_timestamp_seconds", pid=pid) == []
        (entry,) = [e for e in exporter.get("/api/v1/processes")["processes"] if e["pid"] == process.pid]
        assert (entry["reporting"], entry["state"]) == (False, "silent")
    finally:
        process.signal(signal.SIGCONT)
    metrics = wait_until_right(exporter, node, (0, 1), {0: [process, sibling]})
    assert metrics.value("gpumem_reporter_up", pid=pid) == 1


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
