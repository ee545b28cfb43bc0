from __future__ import annotations

import pytest

from gpumem_exporter.server.http.replies import accepts_gzip, prefers_openmetrics

PROMETHEUS_2 = (
    "application/openmetrics-text;version=1.0.0,application/openmetrics-text;version=0.0.1;q=0.75,"
    "text/plain;version=0.0.4;q=0.5,*/*;q=0.1"
)
PROMETHEUS_3 = (
    "application/openmetrics-text;version=1.0.0;escaping=allow-utf-8;q=0.5,application/openmetrics-text;version=0.0.1;"
    "q=0.4,text/plain;version=1.0.0;escaping=allow-utf-8;q=0.3,text/plain;version=0.0.4;q=0.2,*/*;q=0.1"
)


@pytest.mark.parametrize(
    ("accept", "openmetrics"),
    [
        ("", False),
        (PROMETHEUS_2, True),
        (PROMETHEUS_3, True),
        ("Application/OpenMetrics-Text; Version=1.0.0; charset=utf-8", True),
        ("application/openmetrics-text;version=2.0.0", False),
        ("application/openmetrics-text;version=0.0.1,text/plain;q=0.5", False),
        ("application/openmetrics-text;q=0.4,text/plain;q=0.5", False),
        ("application/openmetrics-text;q=0.5,text/plain;q=0.5", True),
        ("application/openmetrics-text;q=0.5,text/plain;q=0.1,*/*;q=0.9", True),
        ("application/openmetrics-text;q=zero,text/plain", False),
        (",;,=;q,", False),
    ],
)
def test_the_format_is_the_one_with_the_highest_quality(accept: str, openmetrics: bool) -> None:
    assert prefers_openmetrics(accept) is openmetrics


@pytest.mark.parametrize(
    ("encodings", "gzip"),
    [
        ("", False),
        ("deflate, GZIP;q=0.5", True),
        ("gzip;q=0.0, *", False),
        ("*", True),
        ("br, *;q=0", False),
        ("x-gzip", True),
    ],
)
def test_gzip_is_used_only_if_the_client_accepts_it(encodings: str, gzip: bool) -> None:
    assert accepts_gzip(encodings) is gzip
