"""Processes that end while no exporter runs, or while it is paused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from gpumem_client.wire.protocol import ProcessIdentity
from tests.support.builders.builders import UUIDS, report, sample
from tests.support.builders.recorder_bench import oom
from tests.support.servers.running_exporter import RunningExporter, ScriptedHost, running_exporter
from tests.support.waiting import wait_until_equal


def test_an_end_while_no_exporter_ran_is_recorded_once(tmp_path: Path) -> None:
    settings: dict[str, Any] = {"storage_path": str(tmp_path), "report_interval": 0.05, "report_expiry": 0.2}
    host = ScriptedHost()

    def ends(exporter: RunningExporter, *pids: int) -> None:
        def events(type_: str) -> list[int]:
            found: list[dict[str, Any]] = exporter.document(f"/api/v1/events?after=0&type={type_}")["events"]
            return [event["pid"] for event in found]

        wait_until_equal(lambda: events("process_ended"), list(pids), "the ends")
        assert sorted(events("process_started")) == [7, 8, 9]

    with running_exporter(host=host, **settings) as exporter:
        for pid in (7, 8, 9):
            exporter.report(report(pid, session=str(pid), devices=(sample(UUIDS[0], 1),)))
    host.dead.add(7)
    with running_exporter(host=host, **settings) as exporter:
        exporter.report(report(9, session="9", sequence=2))
        ends(exporter, 7)
        # This process never reports to this exporter.
        host.dead.add(8)
        ends(exporter, 7, 8)
    host.dead.add(9)
    with running_exporter(host=host, **settings) as exporter:
        ends(exporter, 7, 8, 9)
        (last,) = exporter.document("/api/v1/events?after=0&type=process_ended&pid=9")["events"]
        assert last["text"].endswith("exited while no exporter ran")


class ForgettingHost(ScriptedHost):
    """A host whose dead processes are not in /proc."""

    def host_pid(self, identity: ProcessIdentity, peer_pid: int | None) -> int | None:
        return None if identity.pid in self.dead else super().host_pid(identity, peer_pid)


def test_a_report_that_is_read_after_the_end_of_its_process_is_no_other_process() -> None:
    host = ForgettingHost()
    with running_exporter(host=host, report_interval=0.05) as exporter:

        def types() -> list[tuple[str, Any]]:
            return [(event["type"], event["pid"]) for event in exporter.document("/api/v1/events?after=0")["events"]]

        exporter.report(report(7, devices=(sample(UUIDS[0], 1),)))
        host.dead.add(7)
        events = [("process_started", 7), ("process_ended", 7)]
        wait_until_equal(types, events, "the end")
        assert exporter.report(report(7, sequence=2, final=True, ooms=(oom(),))).status == 200
        wait_until_equal(types, [*events, ("oom", 7)], "the error")
        assert exporter.document("/api/v1/processes")["processes"] == []
