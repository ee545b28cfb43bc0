"""JSON replies, and the content negotiation of `Accept` and `Accept-Encoding` (RFC 9110, section 12)."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any

from fastapi import Response

REPLY_MODELS: dict[str, type] = {}
"""The models of the replies of all routes, by name."""

_OPENMETRICS = "application/openmetrics-text"
_TEXT_RANGES = ("text/plain", "text/*", "*/*")
"""From the most specific range to the least."""


def json_response(document: Mapping[str, object], status: int = 200) -> Response:
    """Return a JSON reply that caches do not store."""
    return Response(
        json.dumps(document, ensure_ascii=False, allow_nan=False).encode("utf-8", "replace"),
        status_code=status,
        headers={"Cache-Control": "no-store"},
        media_type="application/json",
    )


def json_reply(model: type, description: str = "Successful Response") -> dict[str, Any]:
    """Return the OpenAPI description of a JSON reply; `server.openapi` adds the schema of the model."""
    # FastAPI's `response_model` would build a validator of each model when the exporter starts.
    REPLY_MODELS[model.__name__] = model
    schema = {"$ref": f"#/components/schemas/{model.__name__}"}
    return {"description": description, "content": {"application/json": {"schema": schema}}}


def prefers_openmetrics(accept: str) -> bool:
    """Return whether the client ranks OpenMetrics 1.0.0 at least as high as plain text, which is the default."""
    openmetrics = 0.0
    text: dict[str, float] = {}
    for name, parameters, quality in _choices(accept):
        version = parameters.get("version", "")
        if name == _OPENMETRICS and version in ("", "1.0.0"):
            openmetrics = max(openmetrics, quality)
        elif name in _TEXT_RANGES and version in ("", "0.0.4"):
            text[name] = max(text.get(name, 0.0), quality)
    plain = next((text[name] for name in _TEXT_RANGES if name in text), 0.0)
    return openmetrics > 0 and openmetrics >= plain


def accepts_gzip(accept_encoding: str) -> bool:
    """Return whether the body may be compressed with gzip."""
    qualities = {name: quality for name, _, quality in _choices(accept_encoding)}
    return qualities.get("gzip", qualities.get("x-gzip", qualities.get("*", 0.0))) > 0


def _choices(header: str) -> Iterator[tuple[str, dict[str, str], float]]:
    """Yield name, parameters and quality of each element; skip elements with an invalid quality."""
    for element in header.split(","):
        name, *rest = (part.strip() for part in element.split(";"))
        if not name:
            continue
        parameters = {}
        for part in rest:
            key, _, value = part.partition("=")
            parameters[key.strip().lower()] = value.strip().strip('"')
        try:
            quality = float(parameters.pop("q", "1"))
        except ValueError:
            continue
        if 0 <= quality <= 1:
            yield name.lower(), parameters, quality
