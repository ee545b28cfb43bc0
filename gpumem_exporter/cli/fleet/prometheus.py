"""One instant query to the HTTP API that Prometheus, Thanos, Mimir and Cortex share."""

from __future__ import annotations

import base64
import http.client
import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import IO, TYPE_CHECKING, Any
from urllib.parse import SplitResult, unquote, urlencode, urlsplit

from gpumem_exporter.errors import ConfigurationError, PrometheusError

if TYPE_CHECKING:
    from email.message import Message
    from urllib.request import OpenerDirector, Request

__all__ = ["Found", "Prometheus", "found"]

_ANSWER_BYTES_MAX = 64 << 20


@dataclass(frozen=True, slots=True)
class Found:
    """What a query gave."""

    series: tuple[Mapping[str, str], ...]
    """The labels of each."""
    warnings: tuple[str, ...] = ()
    """What the API says of its answer, such as that a store did not take part."""


class Prometheus:
    """An API that answers queries. Proxies and certificates are the environment's to say (HTTPS_PROXY, SSL_CERT_FILE).

    Args:
        url: up to what stands before `/api/v1`, any path of its own included; `user:password@` is basic auth.
        token: a bearer token; empty for none.
        headers: what every request carries beside.
        timeout_seconds: for connecting, and for each wait for the next bytes.

    Raises:
        ConfigurationError: the URL is none, or says another way in than the token.
    """

    def __init__(
        self, url: str, *, token: str = "", headers: Mapping[str, str] | None = None, timeout_seconds: float = 30.0
    ) -> None:
        parts = _checked(url)
        host = parts.netloc.rpartition("@")[2]
        self.url = f"{parts.scheme}://{host}{parts.path.rstrip('/')}"
        """Without the password."""
        self._headers = {"Accept": "application/json", "User-Agent": "gpumem-exporter-cli"}
        if parts.username is not None:
            if token:
                raise ConfigurationError("--prometheus has a user and a token file is given: which of them lets in?")
            pair = f"{unquote(parts.username)}:{unquote(parts.password or '')}"
            self._headers["Authorization"] = "Basic " + base64.b64encode(pair.encode()).decode()
        elif token:
            self._headers["Authorization"] = f"Bearer {token}"
        self._headers.update(headers or {})
        self._timeout_seconds = timeout_seconds
        self._opener = _opener()

    def query(self, expression: str) -> Found:
        """Evaluate an expression now.

        Raises:
            ConfigurationError: the expression is wrong, or gives no series.
            PrometheusError: nobody answers, not in time, or with an error.
        """
        from urllib.request import Request

        parameters = urlencode({"query": expression, "timeout": f"{self._timeout_seconds:g}s"})
        request = Request(f"{self.url}/api/v1/query?{parameters}", headers=self._headers)  # noqa: S310 - http(s) alone
        status, body = self._get(request)
        try:
            document = json.loads(body)
        except ValueError:
            document = None
        if status != http.client.OK or not isinstance(document, dict) or document.get("status") != "success":
            raise self._refused(status, document)
        return found(document, expression)

    def _get(self, request: Request) -> tuple[int, bytes]:
        from urllib.error import HTTPError

        try:
            with self._opener.open(request, timeout=self._timeout_seconds) as answer:
                return answer.status, _read(answer)
        except HTTPError as error:
            with error:
                if 300 <= error.code < 400:
                    where = error.headers.get("Location", "elsewhere")
                    raise PrometheusError(f"{self.url} sends on to {where}: name that address") from None
                try:
                    return error.code, _read(error)
                except (OSError, http.client.HTTPException):
                    return error.code, b""
        except (OSError, http.client.HTTPException, ValueError) as error:  # URLError is an OSError
            reason = getattr(error, "reason", None) or error
            raise PrometheusError(f"no Prometheus answers at {self.url}: {reason or type(error).__name__}") from error

    def _refused(self, status: int, document: Any) -> Exception:
        if isinstance(document, dict) and isinstance(document.get("error"), str):
            if document.get("errorType") == "bad_data":
                return ConfigurationError(f"--query: {document['error']}")
            return PrometheusError(f"{self.url}: {document['error']}")
        phrase = http.client.responses.get(status, "no reason given")
        if status in (401, 403):
            phrase += "; see --prometheus-token-file and --prometheus-header"
        if status in (200, 404):
            return PrometheusError(f"what answers at {self.url}/api/v1/query is no Prometheus API (HTTP {status})")
        return PrometheusError(f"{self.url}: HTTP {status}: {phrase}")


def found(document: Mapping[str, Any], expression: str) -> Found:
    """The series in a successful answer.

    Raises:
        ConfigurationError: the expression gives something else than series.
        PrometheusError: the answer is not as the API has it.
    """
    data = document.get("data")
    kind = data.get("resultType") if isinstance(data, Mapping) else None
    results = data.get("result") if isinstance(data, Mapping) else None
    if kind in ("scalar", "string", "matrix"):
        raise ConfigurationError(f"--query {expression}: gives a {kind}; an instant vector of series is needed")
    if kind != "vector" or not isinstance(results, list):
        raise PrometheusError("an answer without series: is this a Prometheus API?")
    warnings = document.get("warnings")
    return Found(
        tuple(_labels(result) for result in results),
        tuple(str(warning) for warning in warnings) if isinstance(warnings, list) else (),
    )


def _labels(result: Any) -> Mapping[str, str]:
    metric = result.get("metric") if isinstance(result, dict) else None
    if not isinstance(metric, dict) or not all(isinstance(value, str) for value in metric.values()):
        raise PrometheusError("a series without labels in the answer: is this a Prometheus API?")
    return metric


def _checked(url: str) -> SplitResult:
    wrong = ConfigurationError("--prometheus: expected http://host:port or https://host, with its path if it has one")
    try:
        parts = urlsplit(url)
        port = parts.port
    except ValueError:
        raise wrong from None
    if parts.scheme not in ("http", "https") or not parts.hostname or port == 0 or parts.query or parts.fragment:
        raise wrong
    return parts


def _opener() -> OpenerDirector:
    """Follows redirects on the same host alone: nobody else is to have the token."""
    from urllib.request import HTTPRedirectHandler, build_opener

    class SameOrigin(HTTPRedirectHandler):
        def redirect_request(
            self, req: Request, fp: IO[bytes], code: int, msg: str, headers: Message, newurl: str
        ) -> Request | None:
            before, after = urlsplit(req.full_url), urlsplit(newurl)
            if (before.scheme, before.netloc) != (after.scheme, after.netloc):
                return None
            return super().redirect_request(req, fp, code, msg, headers, newurl)  # type: ignore[arg-type]

    return build_opener(SameOrigin)


def _read(answer: Any) -> bytes:
    body: bytes = answer.read(_ANSWER_BYTES_MAX + 1)
    if len(body) > _ANSWER_BYTES_MAX:
        raise ValueError(f"an answer of over {_ANSWER_BYTES_MAX} bytes")
    return body
