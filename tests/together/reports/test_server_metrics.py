"""`GET /metrics`: formats, compression, and a driver that hangs or is absent."""

from __future__ import annotations

import gzip

from tests.support.running_exporter import RunningExporter, ScriptedProvider, problem, running_exporter
from tests.support.waiting import patient

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


def test_only_get_and_head_are_allowed(exporter: RunningExporter) -> None:
    answer = exporter.request("POST", "/metrics", {})
    problem(answer, 405)
    assert answer.headers["allow"] == "GET, HEAD"


def test_a_head_request_returns_headers_without_a_body(exporter: RunningExporter) -> None:
    for path in ("/metrics", "/health", "/"):
        answer = exporter.request("HEAD", path)
        assert (answer.status, answer.body) == (200, b"")
        assert int(answer.headers["content-length"]) > 0


def test_the_path_of_the_page_is_a_setting() -> None:
    with running_exporter(web_telemetry_path="/gpu/metrics") as exporter:
        assert b"gpumem_nvml_up 1" in exporter.get("/gpu/metrics").body
        problem(exporter.get("/metrics"), 404)
        assert "/gpu/metrics" in exporter.document("/openapi.json")["paths"]
        assert b'href="gpu/metrics"' in exporter.get("/").body


def test_the_exporter_is_healthy_but_not_ready_if_the_driver_hangs_at_the_start() -> None:
    provider = ScriptedProvider()
    provider.hanging.set()
    with running_exporter(provider=provider, ready=False) as exporter:
        assert provider.stuck.wait(patient(30))
        assert exporter.get("/-/ready").status == 503
        assert exporter.get("/-/healthy").status == 200
        assert exporter.get("/metrics").status == 200
