from __future__ import annotations

import json
import os
import queue
import re
import socket
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

from gpumem_exporter.demo import DemoNode
from gpumem_exporter.demo.reporter import SimulatedReporter
from gpumem_exporter.demo.simulation import Simulation
from tests.support.exporter_process import ExporterProcess
from tests.support.ports import free_port
from tests.support.waiting import eventually, patient


class Exporter:
    """A real exporter process that serves the demo."""

    def __init__(self, process: ExporterProcess) -> None:
        self.process = process

    def get(self, path: str) -> bytes:
        answer = self.process.request("GET", path)
        assert answer.status == 200, answer
        return answer.body

    def document(self, path: str) -> Any:
        return json.loads(self.get(path))

    def act(self, action: str, **request: Any) -> Any:
        return self.process.act(action, **request)

    def series(self) -> dict[str, dict[tuple[tuple[str, str], ...], float]]:
        """Every series of a scrape: name, then labels in order."""
        out: dict[str, dict[tuple[tuple[str, str], ...], float]] = {}
        for family in text_string_to_metric_families(self.get("/metrics").decode()):
            for sample in family.samples:
                out.setdefault(sample.name, {})[tuple(sorted(sample.labels.items()))] = sample.value
        return out


@contextmanager
def demo(folder: Path, *flags: str) -> Iterator[Exporter]:
    environment = {name: value for name, value in os.environ.items() if not name.startswith("GPUMEM_")}
    process = ExporterProcess(folder, "--demo", *flags, environment=environment)
    try:
        yield Exporter(process)
    finally:
        process.close()


@pytest.fixture(scope="module")
def exporter(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Exporter]:
    """One demo for all that only look."""
    with demo(tmp_path_factory.mktemp("demo")) as running:
        eventually(lambda: reporting(running), lambda known: len(known) >= 14)
        yield running


@pytest.fixture
def own_exporter(tmp_path: Path) -> Iterator[Exporter]:
    """A demo of its own for a test that changes it."""
    with demo(tmp_path) as running:
        eventually(lambda: reporting(running), lambda known: len(known) >= 14)
        eventually(lambda: running.document("/health"), lambda health: health["status"] == "ok")
        yield running


def reporting(exporter: Exporter) -> list[Mapping[str, Any]]:
    return [process for process in exporter.document("/api/v1/processes")["processes"] if process["reporting"]]


def total(series: Mapping[tuple[tuple[str, str], ...], float], **labels: str) -> float:
    return sum(value for named, value in series.items() if labels.items() <= dict(named).items())


def test_five_seconds_after_the_start_every_process_reports_and_has_a_past(tmp_path: Path) -> None:
    with demo(tmp_path) as fresh:
        series = eventually(fresh.series, lambda series: len(series.get("gpumem_torch_reserved_bytes", {})) >= 15)
        events = fresh.document("/api/v1/events?type=process_started&limit=100")["events"]
    (started,) = series["process_start_time_seconds"].values()
    assert len(events) >= 14
    assert sorted(event["unix_seconds"] - started for event in events)[13] < patient(5), "by the exporter's clock"
    assert len(series["gpumem_device_memory_used_bytes"]) == 8
    assert total(series["gpumem_torch_alloc_retries_total"]) > 0
    assert total(series["gpumem_torch_ooms_total"]) > 0
    assert max(series["gpumem_torch_fragmentation_ratio"].values()) > 0.05


def test_it_says_everywhere_that_it_is_a_demo(exporter: Exporter) -> None:
    (built,) = exporter.series()["gpumem_exporter_build_info"]
    assert dict(built)["source"] == "demo"
    assert exporter.document("/health")["source"] == "demo"
    assert exporter.document("/api/v1/devices")["source"] == "demo"
    assert "demo" in exporter.get("/").decode().lower()
    assert all(process["workload"].startswith("demo-") for process in reporting(exporter))


def test_phases_components_and_steps_of_its_trainings_are_shown(exporter: Exporter) -> None:
    series = exporter.series()
    phases = {dict(labels)["phase"] for labels in series["gpumem_torch_phase_peak_bytes"]}
    assert phases == {"forward", "backward", "optimizer"}
    allocated = series["gpumem_torch_allocated_bytes"]
    components = series["gpumem_torch_component_bytes"]
    assert {dict(labels)["component"] for labels in components} == {
        "parameters",
        "gradients",
        "optimizer_state",
        "other",
    }
    for rank in "0123":
        labels = {"workload": "demo-llm-pretrain", "rank": rank}
        assert total(components, **labels) == total(allocated, **labels) > 40 << 30


def test_an_out_of_memory_error_of_its_past_is_an_event_and_stands_on_the_page(exporter: Exporter) -> None:
    def known() -> list[Mapping[str, Any]]:
        events: list[Mapping[str, Any]] = exporter.document("/api/v1/events?type=oom")["events"]
        return events

    event = eventually(known, bool)[0]
    assert event["workload"] == "demo-asr-varlen"
    assert event["detail"]["number"] == 1
    assert event["detail"]["requested_bytes"] == 4 << 30
    assert event["detail"]["allocator"]["reserved_bytes"] + (4 << 30) > event["detail"]["limit_bytes"]
    assert 110 < time.time() - event["unix_seconds"] < 1200
    last = exporter.series()["gpumem_last_oom_timestamp_seconds"]
    assert [dict(labels)["workload"] for labels in last] == ["demo-asr-varlen"]


def test_it_is_well(exporter: Exporter) -> None:
    health = exporter.document("/health")
    assert (health["status"], health["devices"]) == ("ok", 8)


def test_the_ledger_adds_up_to_the_total_in_every_scrape_of_a_moving_node(exporter: Exporter) -> None:
    for _ in range(50):
        series = exporter.series()
        totals = series["gpumem_device_memory_total_bytes"]
        assert len(totals) == 8
        for labels, total_bytes in totals.items():
            assert total(series["gpumem_ledger_bytes"], **dict(labels)) == total_bytes


def test_a_clear_lowers_what_the_process_reserved_and_what_the_driver_says_it_uses(own_exporter: Exporter) -> None:
    (notebook,) = [process for process in reporting(own_exporter) if process["workload"] == "demo-notebook"]
    (before,) = notebook["devices"]
    assert before["reclaimable_bytes"] > 10 << 30
    action = own_exporter.act(action="empty_cache", target={"workload": "demo-notebook"}, wait_seconds=25)
    (result,) = action["results"]
    assert (action["state"], result["outcome"]) == ("done", "done")
    assert action["freed_bytes"] == result["freed_bytes"] == before["reclaimable_bytes"]
    assert result["reserved_before_bytes"] - result["reserved_after_bytes"] == result["freed_bytes"]
    assert result["device_free_after_bytes"] - result["device_free_before_bytes"] == result["freed_bytes"]

    def seen() -> tuple[float, float]:
        series, pid = own_exporter.series(), str(notebook["pid"])
        return (
            total(series["gpumem_torch_reserved_bytes"], pid=pid),
            total(series["gpumem_process_memory_used_bytes"], pid=pid),
        )

    expected = (result["reserved_after_bytes"], before["used_bytes"] - result["freed_bytes"])
    eventually(seen, lambda now: now == expected)


def test_a_clear_of_everything_reaches_every_reporting_process(own_exporter: Exporter) -> None:
    known = {process["pid"] for process in reporting(own_exporter)}
    action = own_exporter.act(action="empty_cache", target={"all": True}, wait_seconds=25)
    assert action["state"] == "done"
    assert known - {result["pid"] for result in action["results"]} == set()
    assert {result["outcome"] for result in action["results"]} == {"done"}
    assert action["freed_bytes"] > 10 << 30


def test_its_processes_bear_the_report_token_that_the_exporter_wants(tmp_path: Path) -> None:
    token = tmp_path / "token"
    token.write_text("a-secret-that-is-long-enough-to-be-one\n")
    token.chmod(0o600)
    with demo(tmp_path, "--report.token-file", str(token)) as guarded:
        series = eventually(guarded.series, lambda series: len(series.get("gpumem_torch_reserved_bytes", {})) >= 15)
        assert total(series["gpumem_reports_total"]) == total(series["gpumem_reports_total"], outcome="accepted")


def test_asked_to_stop_it_ends_in_time_and_without_complaint(tmp_path: Path) -> None:
    with demo(tmp_path) as stopping:
        eventually(lambda: reporting(stopping), lambda known: len(known) >= 14)
        assert stopping.process.stop() == 0
        log = stopping.process.log()
    # Some of its workloads run out of memory, and the exporter warns of that.
    log = "\n".join(line for line in log.splitlines() if " workload=demo-" not in line)
    assert re.search(r"Traceback|level=(warning|error)", log) is None, log


@contextmanager
def stand_in(answer: Callable[[Mapping[str, Any]], tuple[int, bytes]]) -> Iterator[tuple[str, queue.SimpleQueue[Any]]]:
    """An exporter of which only the reports' route is there; yields its address, and what it was sent."""
    received: queue.SimpleQueue[Any] = queue.SimpleQueue()

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_POST(self) -> None:
            document = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            received.put(document)
            status, body = answer(document)
            self.send_response(status)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: object) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        server.daemon_threads = True
        serving = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        serving.start()
        try:
            yield f"http://127.0.0.1:{server.server_address[1]}", received
        finally:
            server.shutdown()
            serving.join(patient(30))


def test_an_exporter_that_answers_nonsense_is_asked_again_and_a_commands_result_rides_on_the_next_report() -> None:
    answers = iter(
        [
            (500, b"no"),
            (200, b"<html>"),
            (200, b'{"report_interval_seconds": -1}'),
            (200, b'{"commands": [{"id": "a1", "action": "empty_cache", "deadline_seconds": 5}]}'),
        ]
    )
    simulation = Simulation(0, 0.0)
    process = next(process for process in simulation.processes() if process.identity.workload == "demo-notebook")
    with stand_in(lambda _: next(answers, (200, b"{}"))) as (url, received):
        reporter = SimulatedReporter(simulation, process, url, headers={})
        reporter.start()
        reports = [received.get(timeout=patient(30)) for _ in range(5)]
        reporter.stop()
        assert reporter.join(patient(30))
    assert [report["sequence"] for report in reports] == [1, 2, 3, 4, 5]
    assert all("results" not in report for report in reports[:4])
    (result,) = reports[4]["results"]
    assert (result["id"], result["outcome"]) == ("a1", "done")
    (device,), (sample,) = result["devices"], reports[4]["devices"]
    assert device["freed_bytes"] == reports[3]["devices"][0]["reclaimable_bytes"] > 0
    assert device["reserved_after_bytes"] == sample["reserved_bytes"]


def test_a_process_that_ends_well_says_goodbye_and_one_that_crashes_does_not() -> None:
    for crashed in (False, True):
        simulation = Simulation(0, 0.0)
        process = next(process for process in simulation.processes() if process.identity.workload == "demo-notebook")
        with stand_in(lambda _: (200, b'{"report_interval_seconds": 0.05}')) as (url, received):
            reporter = SimulatedReporter(simulation, process, url, headers={})
            reporter.start()
            reports = [received.get(timeout=patient(30))]
            with simulation.lock:
                process.end(crashed=crashed)
            assert reporter.join(patient(30))
            while not received.empty():
                reports.append(received.get())
        assert [report.get("final", False) for report in reports].count(True) == (0 if crashed else 1)
        assert reports[-1].get("final", False) is not crashed


def test_a_node_stops_in_time_whether_its_exporter_hangs_or_is_not_there() -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        hanging = f"http://127.0.0.1:{silent.getsockname()[1]}"
        absent = f"http://127.0.0.1:{free_port()}"
        for url in (hanging, absent):
            node = DemoNode()
            node.start(url)
            with pytest.raises(RuntimeError):
                node.start(url)
            assert sum(thread.name.startswith("gpumem-demo") for thread in threading.enumerate()) >= 15
            node.stop(patient(30))
            assert not [thread for thread in threading.enumerate() if thread.name.startswith("gpumem-demo")]
            node.stop()


def test_a_group_of_its_ranks_clears_after_the_same_step(own_exporter: Exporter) -> None:
    ranks = {p["pid"]: p for p in reporting(own_exporter) if p["workload"] == "demo-moe-finetune"}
    assert len(ranks) == 2
    eventually(
        lambda: [p["step_seconds"] for p in reporting(own_exporter) if p["pid"] in ranks], lambda paces: all(paces)
    )
    taken = own_exporter.act(
        "empty_cache",
        expect=202,
        target={"workload": "demo-moe-finetune"},
        group=True,
        wait_seconds=0,
        deadline_seconds=patient(45),
    )
    action = eventually(
        lambda: own_exporter.document(f"/api/v1/actions/{taken['id']}"),
        lambda known: known["state"] not in ("queued", "running"),
    )
    assert action["state"] == "done", action
    assert {row["step"] for row in action["results"]} == {action["at_step"]}
    assert {row["pid"] for row in action["results"]} == set(ranks)
