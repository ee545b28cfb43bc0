"""Runs the webhook: an HTTPS server for Kubernetes' API server."""

from __future__ import annotations

import asyncio
import json
import logging
import posixpath
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from fastapi import FastAPI, Request, Response

from gpumem_client.wire.errors import ConfigurationError
from gpumem_exporter import __version__
from gpumem_exporter.edge.connections import Limits
from gpumem_exporter.edge.listeners import bind, parse_listen_address
from gpumem_exporter.edge.problems import ProblemCode, ProblemError, install_problem_handlers
from gpumem_exporter.edge.request_guard import read_body
from gpumem_exporter.edge.uvicorn_server import LimitedServer
from gpumem_exporter.edge.watched_files import WatchedFiles, refreshing
from gpumem_exporter.edge.web_config import Tls
from gpumem_exporter.features.webhook.review import FORBIDDEN, NotAReviewError, answer
from gpumem_exporter.logs import configure_logging

PODS = "/pods"
"""The route of reviews."""
PODS_WITHOUT_HOST_PATH = "/pods/without-host-path"
"""The route of reviews of pods that may not mount a folder of the host: their answer only has the reason."""

MAX_BODY_BYTES = 4 << 20
"""The API server accepts objects of at most 3 MiB; a review adds little to its pod."""
MAX_OBJECTS = 250_000
"""The maximum number of objects and lists in a review, also within strings: tens of times what the largest pods have.
Each takes up to 200 bytes, and the webhook has 192 MiB: above, the kernel would end it, and pods would be created
without the client."""
_LONG_BYTES = 256 << 10
"""A longer body waits for other long bodies. The pods of a cluster are far below."""
# One client, the API server, sends nearly all requests, and waits for a few seconds.
_LIMITS = Limits(max_connections=512, request_seconds=5.0, idle_seconds=120.0)
# The time for running requests when the webhook stops.
_STOP_SECONDS = 5

_log = logging.getLogger(__name__)


def run(
    address: str, certificate_file: Path, key_file: Path, *, host_path: str, log_level: str, log_format: str
) -> int:
    """Run the webhook until SIGTERM or SIGINT. Return 0 after a signal, 1 if it cannot start.

    `host_path` is the exporter's folder on the nodes. Configures the logging and the signals of the process: call it
    from the main thread.

    Raises:
        ConfigurationError: the address, the folder or the certificate is invalid.
        BindError: the address cannot be used.
    """
    try:
        parse_listen_address(address)
    except ValueError as error:
        raise ConfigurationError(f"invalid --web.listen-address {address!r}: {error}") from None
    if not host_path.startswith("/") or posixpath.normpath(host_path) != host_path:
        raise ConfigurationError(f"invalid --socket.host-path {host_path!r}: expected an absolute path")
    configure_logging(log_level, log_format)
    tls = Tls.model_construct(cert_file=certificate_file, key_file=key_file)
    certificate = WatchedFiles("the webhook's certificate", tls.files.values(), tls.context)
    with bind([address]) as listeners, refreshing([certificate.refresh]):
        fields = {"addresses": ",".join(listeners.names(tls=True)), "version": __version__}
        server = LimitedServer(
            create_app(host_path),
            limits=_LIMITS,
            tls=lambda: certificate.value,
            on_started=lambda: _log.info("listening", extra={"fields": fields}),
            timeout_graceful_shutdown=_STOP_SECONDS,
        )
        return server.run_until_signal(listeners.sockets)


def create_app(host_path: str) -> FastAPI:
    """Return the application; `host_path` is the exporter's folder on the nodes."""
    app = FastAPI(openapi_url=None)
    reviews = _Reviews(host_path)
    install_problem_handlers(app, (PODS, PODS_WITHOUT_HOST_PATH, "/health"))

    @app.post(PODS)
    async def pods(request: Request) -> Response:
        return await reviews.answer(request)

    @app.post(PODS_WITHOUT_HOST_PATH)
    async def pods_without_host_path(request: Request) -> Response:
        return await reviews.answer(request, FORBIDDEN)

    @app.get("/health")
    def health() -> dict[str, Any]:
        return {"status": "ok", "version": __version__}

    return app


class _Reviews:
    """Answers reviews in two threads, one of them for long bodies: a short one never waits for many long ones."""

    def __init__(self, host_path: str) -> None:
        self._host_path = host_path
        self._short, self._long = (ThreadPoolExecutor(1, "gpumem-reviews") for _ in range(2))

    async def answer(self, request: Request, forbidden: str = "") -> Response:
        """Return the reply to a request with an AdmissionReview."""
        try:
            body = await read_body(request.scope, request.receive, MAX_BODY_BYTES)
            if body is None:
                return Response(status_code=400)  # for no reader
            thread = self._long if len(body) > _LONG_BYTES else self._short
            reply = await asyncio.get_running_loop().run_in_executor(thread, self._review, body, forbidden)
            return Response(reply, media_type="application/json")
        except NotAReviewError as error:
            raise ProblemError(ProblemCode.NOT_A_REVIEW, str(error)) from None
        except (ValueError, RecursionError):
            detail = "the body is not JSON; expected an AdmissionReview"
            raise ProblemError(ProblemCode.NOT_A_REVIEW, detail) from None

    def _review(self, body: bytes, forbidden: str) -> bytes:
        if body.count(b"{") + body.count(b"[") > MAX_OBJECTS:
            raise ProblemError(ProblemCode.TOO_LARGE, f"the body has more than {MAX_OBJECTS} objects and lists")
        return json.dumps(answer(json.loads(body), host_path=self._host_path, forbidden=forbidden)).encode()
