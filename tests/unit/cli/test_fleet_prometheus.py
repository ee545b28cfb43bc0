from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from gpumem_exporter.cli.fleet.options import ActOptions, LookOptions
from gpumem_exporter.cli.fleet.prometheus import Found, Prometheus, found
from gpumem_exporter.errors import ConfigurationError, PrometheusError


def answer(kind: str, result: Any, **more: Any) -> dict[str, Any]:
    return {"status": "success", "data": {"resultType": kind, "result": result}, **more}


def test_the_labels_of_each_series_are_what_a_query_gives_and_what_the_api_says_of_it() -> None:
    result = [
        {"metric": {"instance": "a", "pid": "1"}, "value": [0, "1"]},
        {"metric": {"instance": "b"}, "histogram": [0, {}]},
    ]
    assert found(answer("vector", result, warnings=["store b is down"]), "x") == Found(
        ({"instance": "a", "pid": "1"}, {"instance": "b"}), ("store b is down",)
    )
    assert found(answer("vector", []), "x") == Found(())


@pytest.mark.parametrize("kind", ["scalar", "string", "matrix"])
def test_what_is_no_instant_vector_is_a_wrong_query(kind: str) -> None:
    with pytest.raises(ConfigurationError, match=f"--query 1: .*{kind}.*vector"):
        found(answer(kind, []), "1")


@pytest.mark.parametrize(
    "document",
    [
        {"status": "success"},
        answer("streams", []),
        answer("vector", {}),
        answer("vector", [{"value": [0, "1"]}]),
        answer("vector", [{"metric": {"pid": 1}}]),
    ],
)
def test_what_is_no_prometheus_is_said_to_be_none(document: Any) -> None:
    with pytest.raises(PrometheusError):
        found(document, "x")


@pytest.mark.parametrize(
    ("url", "shown"),
    [
        ("http://prometheus:9090", "http://prometheus:9090"),
        ("http://prometheus:9090/", "http://prometheus:9090"),
        ("https://mimir.example/prometheus/", "https://mimir.example/prometheus"),
        ("https://ada:s3cret@[::1]:9090/p", "https://[::1]:9090/p"),
    ],
)
def test_the_path_is_kept_and_the_password_is_not_shown(url: str, shown: str) -> None:
    assert Prometheus(url).url == shown


@pytest.mark.parametrize("url", ["prometheus:9090", "ftp://p", "http://", "http://p:x", "http://p?a=b", "unix:///p"])
def test_what_is_no_address_is_wrong_usage(url: str) -> None:
    with pytest.raises(ConfigurationError, match=r"--prometheus: .*http://host:port"):
        Prometheus(url)


def test_two_ways_in_are_one_too_many(tmp_path: Path) -> None:
    token = tmp_path / "token"
    token.write_text("t")
    with pytest.raises(ConfigurationError, match=r"--prometheus\b.*\btoken\b"):
        LookOptions(prometheus="http://ada:pw@p", prometheus_token_file=str(token)).connect({})


def test_an_address_is_an_options_or_the_environments() -> None:
    environ = {"GPUMEM_PROMETHEUS_URL": "http://of-variable:1"}
    assert LookOptions(prometheus="http://of-option:1").connect(environ).url == "http://of-option:1"
    assert ActOptions(query="up").connect(environ).url == "http://of-variable:1"
    with pytest.raises(ConfigurationError, match=r"--prometheus URL.*GPUMEM_PROMETHEUS_URL"):
        LookOptions().connect({})
    with pytest.raises(ConfigurationError, match="/nonexistent"):
        LookOptions().connect({**environ, "GPUMEM_PROMETHEUS_TOKEN_FILE": "/nonexistent"})


@pytest.mark.parametrize("header", ["X-Scope-OrgID", ": gpu", "X Scope: gpu", "X-Scope: a\r\nB: c", "Ü: x"])
def test_what_is_no_header_is_wrong_usage(header: str) -> None:
    with pytest.raises(ConfigurationError, match=r"--prometheus-header .* 'NAME: VALUE'"):
        LookOptions(prometheus="http://p", prometheus_headers=[header]).connect({})
