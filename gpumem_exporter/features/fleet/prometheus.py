"""An instant query to the HTTP API of Prometheus, Thanos, Mimir and Cortex."""

from __future__ import annotations

import base64
import http.client
import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any
from urllib.parse import SplitResult, unquote, urlencode, urlsplit

from gpumem_client.wire.errors import ConfigurationError, GpumemError
from gpumem_exporter.cli.program import one_line

_ANSWER_BYTES_MAX = 64 << 20
_TIMEOUT_SECONDS = 30.0


class PrometheusError(GpumemError):
    """Prometheus cannot be reached, or its answer to a query has no series; the message says why."""


@dataclass(frozen=True, slots=True)
class QueryResult:
    """The series of a query."""

    series: tuple[Mapping[str, str], ...]
    """The labels of each series."""
    warnings: tuple[str, ...] = ()
    """Warnings of the API, such as that a store did not take part."""


class Prometheus:
    """A query API. HTTPS_PROXY and SSL_CERT_FILE in the environment apply.

    `url` is the URL before `/api/v1`, in which `user:password@` is basic auth. `token` is a bearer token.
    """

    def __init__(self, url: str, *, token: str = "", headers: Mapping[str, str] | None = None) -> None:
        parts = _checked(url)
        self.url = f"{parts.scheme}://{parts.netloc.rpartition('@')[2]}{parts.path.rstrip('/')}"
        """Without the password."""
        self._headers = {"Accept": "application/json", "User-Agent": "gpumem-exporter-cli"}
        if parts.username is not None and token:
            raise ConfigurationError("--prometheus has a user, and there is also a token file; give only one of them")
        if parts.username is not None:
            pair = f"{unquote(parts.username)}:{unquote(parts.password or '')}"
            self._headers["Authorization"] = "Basic " + base64.b64encode(pair.encode()).decode()
        elif token:
            self._headers["Authorization"] = f"Bearer {token}"
        self._headers.update(headers or {})

    def query(self, expression: str) -> QueryResult:
        """Evaluate an expression at the current time.

        Raises ConfigurationError if the expression is invalid, or its result is not an instant vector, and
        PrometheusError if the API does not answer in time, or answers with an error.
        """
        status, where, body = self._get(expression)
        try:
            document = json.loads(body)
        except ValueError:
            document = None
        known = document if isinstance(document, dict) else {}
        if status == http.client.OK and known.get("status") == "success":
            return query_result(known, expression)
        reason = known.get("error") or f"the status is {status} {http.client.responses.get(status, '')}".rstrip()
        if known.get("errorType") == "bad_data":
            raise ConfigurationError(f"--query: {reason}")
        if 300 <= status < 400:
            reason = f"redirects to {where}; give that address"
        elif status in (http.client.UNAUTHORIZED, http.client.FORBIDDEN):
            reason += "; see --prometheus-token-file and --prometheus-header"
        elif not known:
            reason += "; this is not a Prometheus API"
        raise PrometheusError(f"{self.url}: {reason}")

    def _get(self, expression: str) -> tuple[int, str, bytes]:
        """Return the status, the Location and the body of the answer."""
        from urllib.request import HTTPErrorProcessor, Request, build_opener

        class AnyStatus(HTTPErrorProcessor):
            """Follows no redirect."""

            # No other host may receive the token.
            def http_response(self, _request: Any, response: Any) -> Any:
                return response

            https_response = http_response  # type: ignore[assignment]  # the stub names other parameters

        parameters = urlencode({"query": expression, "timeout": f"{_TIMEOUT_SECONDS:g}s"})
        request = Request(f"{self.url}/api/v1/query?{parameters}", headers=self._headers)  # noqa: S310 - http(s) alone
        try:
            with build_opener(AnyStatus).open(request, timeout=_TIMEOUT_SECONDS) as answer:
                body = answer.read(_ANSWER_BYTES_MAX + 1)
                if len(body) > _ANSWER_BYTES_MAX:
                    raise PrometheusError(f"the answer of {self.url} is larger than {_ANSWER_BYTES_MAX} bytes")
                return answer.status, answer.headers.get("Location", "elsewhere"), body
        except (OSError, http.client.HTTPException, ValueError) as error:  # URLError is an OSError
            cause = getattr(error, "reason", None) or error
            reason = getattr(cause, "strerror", None) or str(cause) or type(cause).__name__
            raise PrometheusError(f"Prometheus does not answer at {self.url}: {reason}") from error


def print_warnings(warnings: Sequence[str]) -> None:
    """Print the warnings of Prometheus on standard error."""
    for warning in warnings:
        print(f"warning: Prometheus: {one_line(warning)}", file=sys.stderr)


def query_result(document: Mapping[str, Any], expression: str) -> QueryResult:
    """Return the series in a successful answer."""
    try:
        kind = document["data"]["resultType"]
        if kind != "vector":
            raise ConfigurationError(f"--query {expression}: the result is a {kind}; it must be an instant vector")
        series = tuple(dict(result["metric"]) for result in document["data"]["result"])
    except (KeyError, TypeError, ValueError):
        raise PrometheusError("the answer has no series; check that --prometheus is a Prometheus API") from None
    return QueryResult(series, tuple(map(str, document.get("warnings") or ())))


def _checked(url: str) -> SplitResult:
    wrong = ConfigurationError("--prometheus: expected http://host:port or https://host, with any path")
    try:
        parts = urlsplit(url)
        port = parts.port
    except ValueError:
        raise wrong from None
    if parts.scheme not in ("http", "https") or not parts.hostname or port == 0 or parts.query or parts.fragment:
        raise wrong
    return parts
