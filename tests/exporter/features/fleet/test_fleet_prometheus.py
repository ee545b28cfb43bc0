"""Queries to an API of Prometheus, and what the commands say of wrong ones."""

from __future__ import annotations

import base64
import json
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler
from typing import Any
from urllib.parse import parse_qs, urlsplit

import pytest

from gpumem_client.wire.errors import ConfigurationError
from gpumem_exporter.features.fleet.prometheus import Prometheus, PrometheusError
from gpumem_exporter.main import main
from tests.support.servers.http_servers import serving

SERIES = [
    {"metric": {"instance": "a", "pid": "1"}, "value": [0, "1"]},
    {"metric": {"instance": "b"}, "histogram": [0, {}]},
]
VECTOR = {"status": "success", "data": {"resultType": "vector", "result": SERIES}, "warnings": ["store b is down"]}
OTHER_DATA: tuple[Any, ...] = (
    None,
    "x",
    [],
    {},
    {"resultType": "vector"},
    {"resultType": "vector", "result": [1, {"metric": 1}]},
)
SCALAR = {"status": "success", "data": {"resultType": "scalar", "result": [0, "1"]}}


class Api(BaseHTTPRequestHandler):
    """Answers with a status and a document, and keeps the last request."""

    status = 200
    document: Any = VECTOR
    last: tuple[str, dict[str, str]]

    def do_GET(self) -> None:
        type(self).last = self.path, {name.lower(): value for name, value in self.headers.items()}
        body = json.dumps(self.document).encode()
        self.send_response(self.status)
        if self.status == 302:
            self.send_header("Location", "http://other.example/")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)


@pytest.fixture
def url(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    for name, value in (("status", 200), ("document", VECTOR)):
        monkeypatch.setattr(Api, name, value)
    with serving(Api) as server:
        yield f"http://127.0.0.1:{server.server_port}"


def test_a_query_gets_path_header_and_credentials_and_returns_labels_and_warnings(url: str) -> None:
    address = url.removeprefix("http://")
    api = Prometheus(f"http://ada:p%40ss@{address}/mimir/", headers=["X-Scope-OrgID: gpu"])
    assert api.query("up") == ([{"instance": "a", "pid": "1"}, {"instance": "b"}], ("store b is down",))
    path, headers = Api.last
    assert (urlsplit(path).path, parse_qs(urlsplit(path).query)["query"]) == ("/mimir/api/v1/query", ["up"])
    assert headers["x-scope-orgid"] == "gpu"
    assert base64.b64decode(headers["authorization"].removeprefix("Basic ")) == b"ada:p@ss"
    Prometheus(url, token="secret").query("up")
    assert Api.last[1]["authorization"] == "Bearer secret"


@pytest.mark.parametrize(
    ("status", "document", "error", "text"),
    [
        (200, SCALAR, ConfigurationError, "--query up: .*scalar.*vector"),
        (400, {"errorType": "bad_data", "error": "parse error"}, ConfigurationError, "--query: parse error"),
        (422, {"errorType": "execution", "error": "too many samples"}, PrometheusError, "too many samples"),
        (200, {"status": "success"}, PrometheusError, "not the API of Prometheus"),
        *((200, {**VECTOR, "data": data}, PrometheusError, "not the API of Prometheus") for data in OTHER_DATA),
        (302, VECTOR | {"status": "moved"}, PrometheusError, "http://other.example/"),
        (401, [], PrometheusError, "--prometheus-token-file"),
    ],
)
def test_another_answer_is_an_error_without_the_password(
    status: int, document: Any, error: type[Exception], text: str, url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Api, "status", status)
    monkeypatch.setattr(Api, "document", document)
    with pytest.raises(error, match=text) as raised:
        Prometheus(url.replace("http://", "http://ada:s3c@ret@")).query("up")
    assert "ret@" not in str(raised.value)


@pytest.mark.parametrize(
    ("option", "value", "text"),
    [
        *(
            ("", url, "--prometheus URL")
            for url in ("", "p:9090", "ftp://p", "http://p:x", "http://p:123456", "http://p?a=b")
        ),
        *(("-header", text, "'NAME: VALUE'") for text in ("X-Id", ": gpu", "X: a\r\nB: c", "Ü: x")),
        ("-token-file", "/nonexistent", "/nonexistent"),
    ],
)
def test_wrong_usage_ends_the_command(
    option: str, value: str, text: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("GPUMEM_PROMETHEUS_URL", "http://127.0.0.1:1")
    assert main(["fleet", "info", f"--prometheus{option}", value]) == 2
    assert text in capsys.readouterr().err
    assert main(["fleet", "info"]) == 1
    assert "Prometheus does not answer at http://127.0.0.1:1" in capsys.readouterr().err
