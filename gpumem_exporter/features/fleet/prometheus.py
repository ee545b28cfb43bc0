"""An instant query to the HTTP API of Prometheus, Thanos, Mimir and Cortex."""

from __future__ import annotations

import base64
import contextlib
import http.client
import json
import re
from collections.abc import Sequence
from typing import Any
from urllib.parse import unquote, urlencode
from urllib.request import HTTPErrorProcessor, Request, build_opener

from gpumem_client.wire.errors import ConfigurationError, GpumemError

_TIMEOUT_SECONDS = 30.0
_MOST_BYTES = 64 << 20
_URL = re.compile(r"(https?)://(?:([^/?#]*)@)?((?:[^/?#@:\[\]]+|\[[0-9a-fA-F:.]+\])(?::[0-9]{1,5})?)(/[^?#]*)?")
_HEADER = re.compile(r"\s*([!#$%&'*+.^_`|~\w-]+)\s*:\s*([ -~]*)", re.ASCII)


class PrometheusError(GpumemError):
    """Prometheus cannot be reached, or its answer to a query has no series; the message says why."""


class _AnyStatus(HTTPErrorProcessor):
    """Follows no redirect: no other host may receive the token."""

    def http_response(self, _request: Any, response: Any) -> Any:
        return response

    https_response = http_response  # type: ignore[assignment]  # the stub names other parameters


class Prometheus:
    """A query API. HTTPS_PROXY and SSL_CERT_FILE in the environment apply.

    `url` is the URL before `/api/v1`, in which `user:password@` is basic auth; the attribute lacks it. `token` is a
    bearer token, and `headers` are further headers as `NAME: VALUE`.
    """

    def __init__(self, url: str | None, *, token: str = "", headers: Sequence[str] = ()) -> None:
        if (found := _URL.fullmatch(url or "")) is None:
            raise ConfigurationError("Prometheus: give http://host:port as --prometheus URL or GPUMEM_PROMETHEUS_URL")
        scheme, user, address, path = found.groups(default="")
        self.url = f"{scheme}://{address}{path.rstrip('/')}"
        self._headers = {"Accept": "application/json", "User-Agent": "gpumem-exporter-cli"}
        if token:
            self._headers["Authorization"] = f"Bearer {token}"
        elif user:
            name, _, password = user.partition(":")
            pair = f"{unquote(name)}:{unquote(password)}"
            self._headers["Authorization"] = "Basic " + base64.b64encode(pair.encode()).decode()
        for text in headers:
            if (header := _HEADER.fullmatch(text.strip())) is None:
                name = text.partition(":")[0].strip() or text  # the value may be a secret
                raise ConfigurationError(f"--prometheus-header {name!r}: expected 'NAME: VALUE' in printable ASCII")
            self._headers[header[1]] = header[2]

    def query(self, expression: str) -> tuple[list[dict[str, str]], tuple[str, ...]]:
        """Evaluate an expression at the current time. Returns the labels of each series, and warnings of the API.

        Raises ConfigurationError if the expression is invalid, or its result is not an instant vector, and
        PrometheusError if the API does not answer in time, or answers with an error.
        """
        parameters = urlencode({"query": expression, "timeout": f"{_TIMEOUT_SECONDS:g}s"})
        request = Request(f"{self.url}/api/v1/query?{parameters}", headers=self._headers)  # noqa: S310 - http(s) alone
        try:
            with build_opener(_AnyStatus).open(request, timeout=_TIMEOUT_SECONDS) as answer:
                status, where, body = answer.status, answer.headers.get("Location"), answer.read(_MOST_BYTES)
        except (OSError, http.client.HTTPException, ValueError) as error:
            reason = getattr(getattr(error, "reason", error), "strerror", None) or error
            raise PrometheusError(f"Prometheus does not answer at {self.url}: {reason}") from error
        try:
            document = dict(json.loads(body))
        except (ValueError, TypeError):
            document = {}
        if document.get("errorType") == "bad_data":
            raise ConfigurationError(f"--query: {document.get('error')}")
        if document.get("status") == "success":
            with contextlib.suppress(KeyError, TypeError, ValueError):  # other APIs have this status, too
                return _series(document, expression), tuple(map(str, document.get("warnings") or ()))
        reason = document.get("error") or "this is not the API of Prometheus"
        if where is not None:
            reason = f"redirects to {where}; give that address"
        elif status in (http.client.UNAUTHORIZED, http.client.FORBIDDEN):
            reason = "see --prometheus-token-file and --prometheus-header"
        raise PrometheusError(f"{self.url}: the status is {status}; {reason}")


def _series(document: dict[str, Any], expression: str) -> list[dict[str, str]]:
    if (kind := document["data"]["resultType"]) != "vector":
        raise ConfigurationError(f"--query {expression}: the result is a {kind}; it must be an instant vector")
    found = [dict(each["metric"]) for each in document["data"]["result"]]
    return [{name: str(value) for name, value in labels.items()} for labels in found]
