from __future__ import annotations

import gzip
import json
import re
import urllib.request
from base64 import b64encode
from pathlib import Path
from typing import Any

import bcrypt
import jsonschema
import pytest

from gpumem_exporter import __version__
from tests.support.builders.builders import UUIDS, report, sample
from tests.support.builders.profile_documents import Reporter
from tests.support.servers.running_exporter import RunningExporter, ScriptedProvider, problem, running_exporter
from tests.support.waiting import eventually, patient

LIVE = "/api/v1/live"


def test_all_links_of_the_page_work(exporter: RunningExporter) -> None:
    answer = exporter.get("/")
    assert answer.headers["content-type"].startswith("text/html")
    links = re.findall(r'<a [^>]*?href="([^"#?]+)', answer.body.decode())
    assert {"metrics", "health", "api/v1/events", "docs"} <= set(links)
    paths = [f"/{link.lstrip('/')}" for link in links]
    assert {path: exporter.get(path).status for path in paths} == dict.fromkeys(paths, 200)
    assert __version__.encode() in answer.body


def test_an_unchanged_page_is_not_sent_again(exporter: RunningExporter) -> None:
    first = exporter.get("/")
    again = exporter.get("/", If_None_Match=first.headers["etag"])
    assert (again.status, again.body) == (304, b"")
    assert again.headers["content-security-policy"] == first.headers["content-security-policy"]
    with urllib.request.urlopen(urllib.request.Request(exporter.url, headers={"Accept-Encoding": "gzip"})) as packed:
        assert gzip.decompress(packed.read()) == first.body


def test_only_a_demo_is_labeled_as_a_demo(exporter: RunningExporter) -> None:
    assert "demo" not in exporter.get("/").body.decode().lower()
    provider = ScriptedProvider()
    provider.source = "demo"
    with running_exporter(provider=provider) as demo:
        assert "Demo<" in demo.get("/").body.decode()
        assert demo.document("/health")["source"] == "demo"
        assert demo.sample("gpumem_exporter_build_info", source="demo") == 1


def test_an_unchanged_document_is_not_sent_again() -> None:
    with running_exporter() as exporter:
        first = eventually(lambda: exporter.get(LIVE), lambda reply: b'"devices":[{' in reply.body)
        etag, taken = first.headers["etag"], json.loads(first.body)["node"]["taken_unix_seconds"]
        eventually(lambda: exporter.document(LIVE)["node"]["taken_unix_seconds"], lambda later: later > taken)
        again = exporter.get(LIVE, If_None_Match=etag)
        assert (again.status, again.body) == (304, b"")
        exporter.report(report(4711))
        changed = eventually(lambda: exporter.get(LIVE, If_None_Match=etag), lambda reply: reply.status == 200)
        assert changed.headers["etag"] != etag


def test_only_the_requested_job_has_details(exporter: RunningExporter) -> None:
    for pid in (1, 2):
        exporter.report(report(pid, devices=(sample(UUIDS[0]),), workload=f"job {pid}"))
    jobs = {job["name"]: job for job in exporter.document(f"{LIVE}?details=all")["jobs"]}
    first, second = jobs["job 1"], jobs["job 2"]
    whole = set(first["processes"][0])
    shown = {job["id"]: job["processes"][0] for job in exporter.document(f"{LIVE}?details={first['id']}")["jobs"]}
    assert set(shown[first["id"]]) == whole
    assert set(shown[second["id"]]) < whole
    assert set(shown[second["id"]]["devices"][0]) < set(shown[first["id"]]["devices"][0])


@pytest.mark.parametrize(
    "path",
    [
        "/health",
        "/api/v1/devices",
        "/api/v1/processes",
        "/api/v1/events",
        "/api/v1/history",
        "/api/v1/live",
        "/api/v1/caller",
        "/api/v1/actions",
        "/api/v1/actions/{action_id}",
        "/api/v1/profiles",
    ],
)
def test_each_reply_has_the_described_keys_and_types(exporter: RunningExporter, path: str) -> None:
    exporter.report(report(4711, devices=(sample(UUIDS[0]),), step=3))
    action = json.loads(exporter.act(action="empty_cache", target={"pid": 4711}, dry_run=True).body)
    if path == "/api/v1/profiles":
        reporter = Reporter(exporter, 4712)
        assert reporter.send(reporter.error_profile(1)).status == 201
    description = exporter.document("/openapi.json")
    answer = description["paths"][path]["get"]["responses"]["200"]["content"]["application/json"]["schema"]
    schema = closed({**answer, "components": description["components"]})
    reply = exporter.document(path.replace("{action_id}", action["id"]))
    jsonschema.Draft202012Validator(schema).validate(reply)


def test_errors_have_the_described_keys_and_types(exporter: RunningExporter) -> None:
    components = exporter.document("/openapi.json")["components"]
    schema = closed({"$ref": "#/components/schemas/Problem", "components": components})
    for path, status in (("/nothing", 404), ("/api/v1/events?limit=0", 422)):
        jsonschema.Draft202012Validator(schema).validate(problem(exporter.get(path), status))


def closed(schema: Any) -> Any:
    """The schema, but an object with described properties may have no others."""
    if isinstance(schema, dict):
        made = {key: closed(value) for key, value in schema.items()}
        return {**made, "additionalProperties": False} if isinstance(schema.get("properties"), dict) else made
    return [closed(part) for part in schema] if isinstance(schema, list) else schema


@pytest.mark.parametrize("users", [False, True], ids=["without users", "with users"])
@pytest.mark.parametrize("tokens", [False, True], ids=["without tokens", "with tokens"])
def test_the_described_credentials_are_those_that_open_each_route(tmp_path: Path, tokens: bool, users: bool) -> None:
    opening = {"password": f"Basic {b64encode(b'ada:x').decode()}"} if users else {}
    flags: dict[str, Any] = {}
    for name in ("action", "report") if tokens else ():
        opening[f"{name}Token"] = f"Bearer {name}"
        (tmp_path / name).touch(0o600)
        (tmp_path / name).write_text(name)
        flags[f"{name}_token_file"] = str(tmp_path / name)
    if users:
        config = {"basic_auth_users": {"ada": bcrypt.hashpw(b"x", bcrypt.gensalt(4)).decode()}}
        (tmp_path / "web.yml").write_text(json.dumps(config))
        flags["web_config_file"] = str(tmp_path / "web.yml")
    with running_exporter(ready=False, **flags) as exporter:
        description = json.loads(exporter.get("/openapi.json", Authorization=opening.get("password", "")).body)
        schemes = description["components"]["securitySchemes"]
        assert {name: schemes[name]["scheme"] for name in schemes} == {
            "actionToken": "bearer",
            "reportToken": "bearer",
            "password": "basic",
        }
        for path, operations in description["paths"].items():
            for method, operation in operations.items():
                (nothing,), *described = (list(alternative) or [""] for alternative in operation["security"])
                assert nothing == ""
                # A token stands for the password, too; with a token file, the password stands for no token.
                (wanted,) = [name for (name,) in described if name in opening][:1] or [""]
                for credential in ("", *opening):
                    headers: Any = {"Authorization": opening[credential]} if credential else {}
                    body: Any = [] if method == "post" else None
                    answer = exporter.request(method.upper(), re.sub(r"{\w+}", "x", path), body, **headers)
                    admitted = wanted in ("", credential) or (wanted, credential) == ("password", "actionToken")
                    assert (answer.status != 401) is admitted, (method, path, credential, described, answer.status)


@pytest.mark.parametrize(
    ("method", "path", "allowed"),
    [
        ("DELETE", "/health", "GET, HEAD"),
        ("GET", "/api/v1/reports", "POST"),
        ("OPTIONS", "/api/v1/actions", "GET, HEAD, POST"),
        ("PUT", "/api/v1/actions/0", "DELETE, GET, HEAD"),
    ],
)
def test_a_wrong_method_is_a_405_problem_with_every_method_of_the_path(
    exporter: RunningExporter, method: str, path: str, allowed: str
) -> None:
    answer = exporter.request(method, path)
    assert allowed in problem(answer, 405)["detail"]
    assert answer.headers["allow"] == allowed


def test_a_scrape_names_its_collectors_as_with_node_exporter(exporter: RunningExporter) -> None:
    page = exporter.get("/metrics?collect[]=devices&collect%5B%5D=poll").body.decode()
    assert "gpumem_device_memory_used_bytes{" in page
    assert "gpumem_nvml_up " in page
    assert "gpumem_reports_total" not in page
    for query in ("collect[]=device", "collect[]=devices&collect[]="):
        assert "devices, ledger" in problem(exporter.get(f"/metrics?{query}"), 400)["detail"]
    assert "gpumem_reports_total{" in exporter.get("/metrics?other=x").body.decode()


def test_a_scrape_has_the_format_and_the_encoding_that_the_scraper_accepts(exporter: RunningExporter) -> None:
    assert exporter.get("/metrics").headers["content-type"] == "text/plain; version=0.0.4; charset=utf-8"
    packed = exporter.get("/metrics", Accept="application/openmetrics-text;version=1.0.0", Accept_Encoding="gzip")
    assert packed.headers["content-type"] == "application/openmetrics-text; version=1.0.0; charset=utf-8"
    assert packed.headers["vary"] == "Accept, Accept-Encoding"
    assert gzip.decompress(packed.body).endswith(b"# EOF\n")


def test_a_head_request_returns_headers_without_a_body(exporter: RunningExporter) -> None:
    for path in ("/metrics", "/health", "/"):
        answer = exporter.request("HEAD", path)
        assert (answer.status, answer.body) == (200, b"")
        assert int(answer.headers["content-length"]) > 0


def test_the_path_of_the_metrics_is_a_setting() -> None:
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
        statuses = {path: exporter.get(path).status for path in ("/-/ready", "/-/healthy", "/metrics")}
        assert statuses == {"/-/ready": 503, "/-/healthy": 200, "/metrics": 200}


@pytest.mark.parametrize("path", ["/", "/metrics", "/health", "/api/v1/devices", "/nope"])
def test_every_reply_has_security_headers(exporter: RunningExporter, path: str) -> None:
    headers = exporter.get(path, Origin="http://evil.example").headers
    assert headers["x-content-type-options"] == "nosniff"
    assert headers["cross-origin-resource-policy"] == "same-origin"
    assert headers["x-frame-options"] == "DENY"
    assert "access-control-allow-origin" not in headers
    assert "server" not in headers


def test_an_internal_error_shows_no_details(
    exporter: RunningExporter, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def broken(now_seconds: float) -> None:
        raise RuntimeError("s3cret inside")

    monkeypatch.setattr(exporter.runtime.store, "snapshot", broken)
    document = problem(exporter.get("/api/v1/devices"), 500)
    assert "s3cret" not in json.dumps(document)
    eventually(lambda: "s3cret inside" in caplog.text)
