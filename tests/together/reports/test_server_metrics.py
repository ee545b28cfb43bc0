"""`GET /metrics`: formats, compression, and a driver that hangs or is absent."""

from __future__ import annotations

import gzip
import json

from tests.support.builders import report, sample
from tests.support.running_exporter import RunningExporter, ScriptedProvider, problem, running_exporter
from tests.support.waiting import eventually, patient

OPENMETRICS = "application/openmetrics-text;version=1.0.0,text/plain;version=0.0.4;q=0.5"


def test_the_page_has_the_format_that_the_scraper_accepts(exporter: RunningExporter) -> None:
    plain = exporter.get("/metrics")
    assert plain.headers["content-type"] == "text/plain; version=0.0.4; charset=utf-8"
    assert not plain.body.endswith(b"# EOF\n")
    openmetrics = exporter.get("/metrics", Accept=OPENMETRICS)
    assert openmetrics.headers["content-type"] == "application/openmetrics-text; version=1.0.0; charset=utf-8"
    assert openmetrics.body.endswith(b"# EOF\n")


def test_a_page_is_compressed_if_the_scraper_accepts_it(exporter: RunningExporter) -> None:
    small = exporter.get("/metrics", Accept_Encoding="gzip")
    assert b"gpumem_exporter_build_info" in gzip.decompress(small.body)
    assert small.headers["vary"] == "Accept, Accept-Encoding"
    assert small.headers["content-encoding"] == "gzip"
    assert "content-encoding" not in exporter.get("/metrics", Accept_Encoding="identity").headers


def test_a_head_request_returns_headers_without_a_body(exporter: RunningExporter) -> None:
    for path in ("/metrics", "/health", "/"):
        answer = exporter.request("HEAD", path)
        assert (answer.status, answer.body) == (200, b"")
        assert int(answer.headers["content-length"]) > 0


def test_only_get_and_head_are_allowed(exporter: RunningExporter) -> None:
    answer = exporter.request("POST", "/metrics", {})
    problem(answer, 405)
    assert answer.headers["allow"] == "GET, HEAD"


def test_the_path_of_the_page_is_a_setting() -> None:
    with running_exporter(web_telemetry_path="/gpu/metrics") as exporter:
        assert b"gpumem_nvml_up 1" in exporter.get("/gpu/metrics").body
        problem(exporter.get("/metrics"), 404)
        assert "/gpu/metrics" in exporter.document("/openapi.json")["paths"]
        assert b'href="gpu/metrics"' in exporter.get("/").body


def test_neither_the_page_nor_health_waits_for_a_hung_driver() -> None:
    provider = ScriptedProvider()
    with running_exporter(provider=provider) as exporter:
        assert exporter.report(report(1, devices=(sample(allocated=5),))).status == 200
        provider.hanging.set()
        assert provider.stuck.wait(patient(30))
        assert exporter.get("/metrics").status == 200
        assert exporter.get("/health").status == 200
        assert exporter.document("/api/v1/devices")["devices"]
        assert not provider.released.is_set()
        failing = eventually(lambda: exporter.get("/health"), lambda answer: answer.status == 503)
        assert json.loads(failing.body)["status"] == "failing"
        assert json.loads(failing.body)["checks"]["poller"]["status"] == "failing"
        assert exporter.sample("gpumem_nvml_up") == 0
        assert exporter.sample("gpumem_device_memory_total_bytes", gpu="0") is None
        assert exporter.report(report(1, devices=(sample(allocated=6),), sequence=2)).status == 200
        assert exporter.sample("gpumem_torch_allocated_bytes", pid="1") == 6
        provider.hanging.clear()
        provider.released.set()
        eventually(lambda: exporter.get("/health").status, lambda status: status == 200)
        eventually(lambda: exporter.sample("gpumem_device_memory_total_bytes", gpu="0"))


def test_the_exporter_is_healthy_but_not_ready_if_the_driver_hangs_at_the_start() -> None:
    provider = ScriptedProvider()
    provider.hanging.set()
    with running_exporter(provider=provider, ready=False) as exporter:
        assert provider.stuck.wait(patient(30))
        assert exporter.get("/-/ready").status == 503
        assert exporter.get("/-/healthy").status == 200
        assert exporter.get("/metrics").status == 200


def test_without_a_driver_health_is_degraded_with_the_reason() -> None:
    provider = ScriptedProvider()
    provider.error = "no driver here"
    with running_exporter(provider=provider) as exporter:
        answer = exporter.get("/health")
        document = json.loads(answer.body)
        assert (answer.status, document["status"]) == (200, "degraded")
        assert document["nvml"] == {"up": False, "error": "no driver here", "released": False}
        assert exporter.sample("gpumem_nvml_up") == 0
        assert exporter.document("/api/v1/devices")["nvml"]["error"] == "no driver here"
        provider.error = ""
        eventually(lambda: exporter.document("/health")["status"], lambda status: status == "ok")
        assert exporter.sample("gpumem_nvml_up") == 1
