"""Runs the webhook: an HTTPS server that answers the reviews of Kubernetes' API server. No answer ever denies a pod."""

from __future__ import annotations

import asyncio
import base64
import json
import logging
import posixpath
from collections.abc import Mapping
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
from gpumem_exporter.features.webhook.admitted_pods import MOUNT, Injection, inject
from gpumem_exporter.logs import configure_logging

PODS = "/pods"
"""The route of reviews."""
PODS_WITHOUT_HOST_PATH = "/pods/without-host-path"
"""The route of reviews of pods that may not mount a folder of the host: their answer only has the reason."""
FORBIDDEN = "the namespace enforces a Pod Security Standard that forbids hostPath"
"""The reason for pods of a namespace that enforces `baseline` or `restricted`. The API server would refuse the pod."""

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
_VERSION = "admission.k8s.io/v1"
# The longest name of a pod.
_NAME_CHARACTERS = 253
# The API server cuts a warning after 256 bytes.
_WARNING_CHARACTERS = 250

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
    host_path = host_path.rstrip("/")
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
    # One thread is for long bodies: a short one never waits for many long ones.
    short, long = (ThreadPoolExecutor(1, "gpumem-reviews") for _ in range(2))
    install_problem_handlers(app, (PODS, PODS_WITHOUT_HOST_PATH, "/health"))

    async def reply(request: Request, forbidden: str = "") -> Response:
        body = await read_body(request.scope, request.receive, MAX_BODY_BYTES)
        if body is None:
            return Response(status_code=400)  # for no reader
        thread = long if len(body) > _LONG_BYTES else short
        answered = await asyncio.get_running_loop().run_in_executor(thread, _reply, body, host_path, forbidden)
        return Response(answered, media_type="application/json")

    @app.post(PODS)
    async def pods(request: Request) -> Response:
        return await reply(request)

    @app.post(PODS_WITHOUT_HOST_PATH)
    async def pods_without_host_path(request: Request) -> Response:
        return await reply(request, FORBIDDEN)

    @app.get("/health")
    def health() -> dict[str, Any]:
        return {"status": "ok", "version": __version__}

    return app


def _reply(body: bytes, host_path: str, forbidden: str) -> bytes:
    if body.count(b"{") + body.count(b"[") > MAX_OBJECTS:
        raise ProblemError(ProblemCode.TOO_LARGE, f"the body has more than {MAX_OBJECTS} objects and lists")
    try:
        document = json.loads(body)
    except (ValueError, RecursionError):
        raise _not_a_review("the body is not JSON; expected an AdmissionReview") from None
    return json.dumps(answer(document, host_path=host_path, forbidden=forbidden)).encode()


def answer(document: object, *, host_path: str = MOUNT, forbidden: str = "") -> dict[str, Any]:
    """Return the AdmissionReview with the answer; for the arguments see `inject`.

    An error leaves the pod as it is, with a warning and a line in the log. Raises ProblemError if the document is not
    an AdmissionReview with a request.
    """
    request = _request(document)
    response: dict[str, Any] = {"uid": request["uid"], "allowed": True}
    try:
        injection = _inject(request, host_path, forbidden)
    except Exception as error:  # noqa: BLE001 - the pod must be created whatever is wrong here
        # Without a traceback: its last lines could show a value of the pod.
        where = {"namespace": request.get("namespace"), "error": type(error).__name__}
        _log.error("review failed, the pod stays as it is", extra={"fields": where})
        injection = Injection(reasons=[f"not injected: the webhook failed with {type(error).__name__}"])
    if injection.operations:
        patch = json.dumps(injection.operations).encode()
        response |= {"patchType": "JSONPatch", "patch": base64.b64encode(patch).decode()}
    if injection.reasons:
        response["warnings"] = [f"gpumem: {reason}"[:_WARNING_CHARACTERS] for reason in injection.shown_reasons]
    return {"apiVersion": _VERSION, "kind": "AdmissionReview", "response": response}


def _request(document: object) -> Mapping[str, Any]:
    known = {"kind": "AdmissionReview", "apiVersion": _VERSION}
    if not isinstance(document, dict) or not known.items() <= document.items():
        raise _not_a_review(f"expected an AdmissionReview of {_VERSION}")
    request = document.get("request")
    if not isinstance(request, dict) or not isinstance(request.get("uid"), str):
        raise _not_a_review("the AdmissionReview has no request with a uid")
    return request


def _not_a_review(detail: str) -> ProblemError:
    return ProblemError(ProblemCode.NOT_A_REVIEW, detail)


def _inject(request: Mapping[str, Any], host_path: str, forbidden: str) -> Injection:
    kind, operation = request["kind"]["kind"], request["operation"]
    if (kind, operation) != ("Pod", "CREATE"):
        return Injection(reasons=[f"not injected: expected the creation of a Pod, not {operation} of {kind}"])
    injection = inject(request["object"], host_path=host_path, forbidden=forbidden)
    if text := injection.describe():
        metadata = request["object"]["metadata"]
        name = (metadata.get("name") or metadata.get("generateName") or "")[:_NAME_CHARACTERS]
        fields = {"namespace": request.get("namespace"), "pod": name, "result": text}
        _log.info("pod reviewed", extra={"fields": fields})
    return injection
