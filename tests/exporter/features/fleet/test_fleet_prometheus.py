from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from gpumem_client.wire.errors import ConfigurationError
from gpumem_exporter.features.fleet.fleet_options import FleetOptions
from gpumem_exporter.features.fleet.prometheus import Prometheus, PrometheusError, QueryResult, query_result


def answer(kind: str, result: Any, **more: Any) -> dict[str, Any]:
    return {"status": "success", "data": {"resultType": kind, "result": result}, **more}


def test_a_query_returns_labels_and_warnings() -> None:
    result = [
        {"metric": {"instance": "a", "pid": "1"}, "value": [0, "1"]},
        {"metric": {"instance": "b"}, "histogram": [0, {}]},
    ]
    assert query_result(answer("vector", result, warnings=["store b is down"]), "x") == QueryResult(
        ({"instance": "a", "pid": "1"}, {"instance": "b"}), ("store b is down",)
    )
    assert query_result(answer("vector", []), "x") == QueryResult(())


def test_a_result_other_than_an_instant_vector_is_wrong_usage_and_another_api_an_error() -> None:
    with pytest.raises(ConfigurationError, match=r"--query 1: .*scalar.*vector"):
        query_result(answer("scalar", []), "1")
    for other in ({"status": "success"}, answer("vector", [{"value": [0, "1"]}])):
        with pytest.raises(PrometheusError):
            query_result(other, "x")


@pytest.mark.parametrize(
    ("url", "shown"),
    [
        ("http://prometheus:9090/", "http://prometheus:9090"),
        ("https://mimir.example/prometheus/", "https://mimir.example/prometheus"),
        ("https://ada:s3cret@[::1]:9090/p", "https://[::1]:9090/p"),
    ],
)
def test_the_url_keeps_the_path_and_hides_the_password(url: str, shown: str) -> None:
    assert Prometheus(url).url == shown


@pytest.mark.parametrize("url", ["prometheus:9090", "ftp://p", "http://", "http://p:x", "http://p?a=b", "unix:///p"])
def test_an_invalid_url_is_wrong_usage(url: str) -> None:
    with pytest.raises(ConfigurationError, match=r"--prometheus: .*http://host:port"):
        Prometheus(url)


def test_a_password_and_a_token_are_wrong_usage(tmp_path: Path) -> None:
    token = tmp_path / "token"
    token.write_text("t")
    with pytest.raises(ConfigurationError, match=r"--prometheus\b.*\btoken\b"):
        FleetOptions(prometheus="http://ada:pw@p", prometheus_token_file=str(token)).connect({})


def test_the_url_comes_from_the_option_then_the_environment() -> None:
    environ = {"GPUMEM_PROMETHEUS_URL": "http://of-variable:1"}
    assert FleetOptions(prometheus="http://of-option:1").connect(environ).url == "http://of-option:1"
    assert FleetOptions().connect(environ).url == "http://of-variable:1"
    with pytest.raises(ConfigurationError, match=r"--prometheus URL.*GPUMEM_PROMETHEUS_URL"):
        FleetOptions().connect({})
    with pytest.raises(ConfigurationError, match="/nonexistent"):
        FleetOptions().connect({**environ, "GPUMEM_PROMETHEUS_TOKEN_FILE": "/nonexistent"})


@pytest.mark.parametrize("header", ["X-Scope-OrgID", ": gpu", "X Scope: gpu", "X-Scope: a\r\nB: c", "Ü: x"])
def test_an_invalid_header_is_wrong_usage(header: str) -> None:
    with pytest.raises(ConfigurationError, match=r"--prometheus-header .* 'NAME: VALUE'"):
        FleetOptions(prometheus="http://p", prometheus_headers=[header]).connect({})
