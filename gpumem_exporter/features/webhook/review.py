"""Answers an AdmissionReview of Kubernetes. No answer ever denies a pod."""

from __future__ import annotations

import base64
import json
import logging
from collections.abc import Mapping
from typing import Any

from gpumem_exporter.features.webhook.admitted_pods import MOUNT, Injection, inject

FORBIDDEN = "the namespace enforces a Pod Security Standard that forbids hostPath"
"""The reason for pods of a namespace that enforces `baseline` or `restricted`. The API server would refuse the pod."""

_VERSION = "admission.k8s.io/v1"
# The longest name of a pod.
_NAME_CHARACTERS = 253
# The API server cuts a warning after 256 bytes.
_WARNING_CHARACTERS = 250

_log = logging.getLogger(__name__)


class NotAReviewError(ValueError):
    """The document is not an AdmissionReview with a request; the message is for people."""


def answer(document: object, *, host_path: str = MOUNT, forbidden: str = "") -> dict[str, Any]:
    """Return the AdmissionReview with the answer; for the arguments see `inject`.

    An error leaves the pod as it is, with a warning and a line in the log.

    Raises:
        NotAReviewError: `document` is not an AdmissionReview with a request.
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
    if not isinstance(document, dict) or document.get("kind") != "AdmissionReview":
        raise NotAReviewError("expected an AdmissionReview")
    if document.get("apiVersion") != _VERSION:
        raise NotAReviewError(
            f"expected an AdmissionReview of {_VERSION}, not {str(document.get('apiVersion'))[:64]!r}"
        )
    request = document.get("request")
    if not isinstance(request, dict) or not isinstance(request.get("uid"), str):
        raise NotAReviewError("the AdmissionReview has no request with a uid")
    return request


def _inject(request: Mapping[str, Any], host_path: str, forbidden: str) -> Injection:
    kind, operation = request["kind"]["kind"], request["operation"]
    if (kind, operation) != ("Pod", "CREATE"):
        return Injection(reasons=[f"not injected: expected the creation of a Pod, not {operation} of {kind}"])
    injection = inject(request["object"], host_path=host_path, forbidden=forbidden)
    if text := injection.describe():
        metadata = request["object"]["metadata"]
        fields = {
            "namespace": request.get("namespace"),
            "pod": (metadata.get("name") or metadata.get("generateName") or "")[:_NAME_CHARACTERS],
            "result": text,
        }
        _log.info("pod reviewed", extra={"fields": fields})
    return injection
