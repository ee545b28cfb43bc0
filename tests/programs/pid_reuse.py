"""Reuses a pid while an exporter runs; runs as pid 1 of a PID namespace. Prints `done`, or fails."""

from __future__ import annotations

import itertools
import json
import os
import signal
import tempfile
import time
from dataclasses import replace
from pathlib import Path

from gpumem_client.wire.http import Connection
from gpumem_client.wire.procfs import pid_namespace, start_time_ticks
from gpumem_client.wire.protocol import REPORTS_PATH, DeviceSample, ProcessIdentity, Report, to_wire
from tests.emulation.node import MIB, EmulatedNode
from tests.emulation.programs import Program
from tests.support.exporter_process import ExporterProcess
from tests.support.waiting import patient, wait_for

PID = 4321
HOLD = "say(malloc(%d << 20)[0]); wait()"


def choose_next_pid(pid: int) -> None:
    """Give the next process this pid."""
    Path("/proc/sys/kernel/ns_last_pid").write_text(str(pid - 1))


def start(node: EmulatedNode, mebibytes: int) -> Program:
    """Start a program with this memory on the first device, under the chosen pid."""
    choose_next_pid(PID)
    program = Program(node, HOLD % mebibytes)
    assert program.pid == PID, f"{program.pid}: another process was faster"
    assert program.heard() == 0
    return program


def identity(session: str) -> ProcessIdentity:
    return ProcessIdentity(
        pid=PID,
        start_time_ticks=start_time_ticks(f"/proc/{PID}"),
        pid_namespace=pid_namespace(),
        session=session,
        session_started_seconds=time.monotonic(),
        workload=session,
    )


def send(exporter: ExporterProcess, connection: Connection, report: Report) -> list[dict[str, object]]:
    """Send a report and return the commands of the reply."""
    headers = {"Content-Type": "application/json"}
    answer = connection.request("POST", REPORTS_PATH, json.dumps(to_wire(report)).encode(), headers)
    assert answer.status == 200, answer
    return list(json.loads(answer.body).get("commands", []))


def main() -> None:
    """Run two programs under one pid: the first reports, the second reports only later."""
    with tempfile.TemporaryDirectory() as folder, EmulatedNode(Path(folder) / "node") as node:
        exporter = ExporterProcess(
            Path(folder),
            *("--collect.interval", "0.2", "--report.interval", "0.2", "--report.expiry", "600"),
            environment=node.environment(),
        )
        connection = Connection(exporter.url, timeout_seconds=patient(30.0))
        try:
            check(node, exporter, connection)
        finally:
            connection.close()
            print(exporter.log())
            exporter.close()
    print("done")


def report_until_paired(exporter: ExporterProcess, connection: Connection, report: Report, non_torch: int) -> None:
    """Report the same sample again until a reading of the driver belongs to it."""
    sequence = itertools.count(report.sequence + 1)

    def paired() -> bool:
        send(exporter, connection, replace(report, sequence=next(sequence)))
        return exporter.metrics().values("gpumem_torch_non_torch_bytes", pid=str(PID)) == [non_torch]

    wait_for(paired, "the non-torch memory")


def check(node: EmulatedNode, exporter: ExporterProcess, connection: Connection) -> None:
    uuid, labels = node.uuid(0), {"gpu": "0", "pid": str(PID)}
    sample = DeviceSample(uuid, allocated_bytes=30 * MIB, reserved_bytes=40 * MIB, reclaimable_bytes=10 * MIB)
    with start(node, 64) as first:
        before = identity("first")
        used = node.books()[0].processes[PID]
        report = Report(before, 0, devices=(sample,), actions=("empty_cache",))
        report_until_paired(exporter, connection, report, used - 40 * MIB)
        action = exporter.act("empty_cache", target={"pid": PID}, deadline_seconds=600, wait_seconds=0, expect=202)
        os.kill(exporter.pid, signal.SIGSTOP)  # the exporter must not notice the time without a process of this pid
        first.kill()
    with start(node, 128) as second:
        os.kill(exporter.pid, signal.SIGCONT)
        assert start_time_ticks(f"/proc/{PID}") != before.start_time_ticks
        used = node.books()[0].processes[PID]
        wait_for(
            lambda: exporter.metrics().values("gpumem_process_memory_used_bytes", **labels) == [used],
            "a poll of the second",
        )
        # the first scrape with the bytes of the second program has no reporter for them
        metrics = exporter.metrics()
        metrics.assert_ledgers_add_up()
        assert metrics.ledgers()[uuid]["other_processes"] == used
        assert metrics.ledgers()[uuid]["torch_allocated"] == 0
        assert not [name for name in metrics.samples if name.startswith("gpumem_torch_")]
        (info,) = [dict(found) for found in metrics.samples["gpumem_process_info"]]
        assert (info["pid"], info["workload"], info["reporting"]) == (str(PID), "", "false"), info
        missed = exporter.request("POST", "/api/v1/actions", {"action": "empty_cache", "target": {"pid": PID}})
        assert missed.status == 404, missed

        after = identity("second")
        commands = send(exporter, connection, Report(after, 1, devices=(sample,), actions=("empty_cache",)))
        assert commands == [], "what the first was asked does not reach the second"
        ended = exporter.get(f"/api/v1/actions/{action['id']}")
        assert [row["outcome"] for row in ended["results"]] == ["gone"], ended
        metrics = exporter.metrics()
        metrics.assert_ledgers_add_up()
        assert metrics.value("gpumem_torch_allocated_bytes", workload="second", **labels) == 30 * MIB
        report_until_paired(exporter, connection, Report(after, 1, devices=(sample,)), used - 40 * MIB)
        second.kill()
    wait_for(lambda: f'pid="{PID}"' not in exporter.metrics().text, "no series of either")
    exporter.metrics().assert_ledgers_add_up()


if __name__ == "__main__":
    main()
