"""`/openapi.json`: FastAPI describes its own routes; the two hot ones and the shared schemas are added here."""

from __future__ import annotations

from typing import Any

from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi
from pydantic.json_schema import GenerateJsonSchema, models_json_schema

from gpumem_exporter.server.api.action_schema import ActionBody
from gpumem_exporter.server.api.alert_schema import AlertsBody
from gpumem_exporter.server.api.nvml_schema import NvmlBody
from gpumem_exporter.server.api.report_schema import report_core_schema
from gpumem_exporter.wire.protocol import REPORTS_PATH

__all__ = ["describe"]

_REF = "#/components/schemas/{model}"

_PROBLEM = {
    "type": "object",
    "description": "RFC 9457 problem details",
    "required": ["type", "title", "status", "detail"],
    "properties": {
        "type": {"type": "string"},
        "title": {"type": "string"},
        "status": {"type": "integer"},
        "detail": {"type": "string"},
        "errors": {
            "type": "array",
            "description": "the fields of the body that are wrong",
            "items": {
                "type": "object",
                "required": ["field", "message"],
                "properties": {"field": {"type": "string"}, "message": {"type": "string"}},
            },
        },
    },
}

_REPLY = {
    "type": "object",
    "properties": {
        "protocol": {"type": "integer"},
        "report_interval_seconds": {"type": "number"},
        "commands": {
            "type": "array",
            "items": {
                "type": "object",
                "required": ["id", "action", "deadline_seconds"],
                "properties": {
                    "id": {"type": "string"},
                    "action": {"type": "string"},
                    "deadline_seconds": {"type": "number"},
                    "uuids": {"type": "array", "items": {"type": "string"}},
                    "collect_garbage": {"type": "boolean"},
                },
            },
        },
    },
}


def describe(app: FastAPI, *, telemetry_path: str) -> dict[str, Any]:
    """The whole API as an OpenAPI document."""
    document = get_openapi(title=app.title, version=app.version, description=app.description, routes=app.routes)
    schemas = document.setdefault("components", {}).setdefault("schemas", {})
    _, actions = models_json_schema(
        [(ActionBody, "validation"), (AlertsBody, "validation"), (NvmlBody, "validation")], ref_template=_REF
    )
    schemas.update(actions.get("$defs", {}))
    report = GenerateJsonSchema(ref_template=_REF).generate(report_core_schema())
    schemas.update(report.pop("$defs", {}))
    schemas.update({"Report": report, "Reply": _REPLY, "Problem": _PROBLEM})
    document["paths"][telemetry_path] = {"get": _metrics_operation()}
    document["paths"][REPORTS_PATH] = {"post": _report_operation()}
    return document


def _metrics_operation() -> dict[str, Any]:
    text = {"schema": {"type": "string"}}
    return {
        "tags": ["metrics"],
        "summary": "Metrics",
        "description": "Prometheus text 0.0.4 or OpenMetrics 1.0, by `Accept`; gzip by `Accept-Encoding`.",
        "operationId": "metrics",
        "responses": {
            "200": {
                "description": "the page",
                "content": {"text/plain; version=0.0.4": text, "application/openmetrics-text; version=1.0.0": text},
            }
        },
    }


def _report_operation() -> dict[str, Any]:
    problem = {"application/problem+json": {"schema": {"$ref": _REF.format(model="Problem")}}}
    refusals = {
        "401": "no token, or a wrong one",
        "403": "not from here",
        "409": "a newer reporter speaks for the same process",
        "413": "the body is too long",
        "415": "the body is not JSON",
        "422": "the report is not right; nothing of it was taken",
        "503": "too many processes report; `Retry-After` says when to try again",
    }
    return {
        "tags": ["reports"],
        "summary": "Report",
        "description": "A reporter's sample comes in, its commands go out. The answer may be held back for "
        "`hold_seconds`, and for the report interval at most, until there is a command.",
        "operationId": "report",
        "requestBody": {
            "required": True,
            "content": {"application/json": {"schema": {"$ref": _REF.format(model="Report")}}},
        },
        "responses": {
            "200": {
                "description": "taken",
                "content": {"application/json": {"schema": {"$ref": _REF.format(model="Reply")}}},
            },
            **{status: {"description": text, "content": problem} for status, text in refusals.items()},
        },
    }
