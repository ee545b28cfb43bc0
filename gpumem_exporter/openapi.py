"""`/openapi.json`: FastAPI describes its routes. This module adds the plain ASGI routes, schemas and credentials."""

from __future__ import annotations

from typing import Any

from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi
from pydantic import TypeAdapter
from pydantic.json_schema import GenerateJsonSchema

from gpumem_client.wire.protocol import REPORTS_PATH, Reply
from gpumem_exporter.edge.problems import Problem, problems
from gpumem_exporter.edge.replies import DESCRIBED_MODELS, json_reply
from gpumem_exporter.edge.request_guard import is_report, is_restricted
from gpumem_exporter.reports.report_schema import report_core_schema

_REF = "#/components/schemas/{model}"
_SCHEMES = {
    **{
        f"{of}Token": {
            "type": "http",
            "scheme": "bearer",
            "description": f"The token of `--{of}.token-file`. Without that file, the kernel identifies the caller "
            "over loopback and the unix socket, and other callers are refused.",
        }
        for of in ("action", "report")
    },
    "password": {
        "type": "http",
        "scheme": "basic",
        "description": "A user of `--web.config.file`. Clients of the unix socket and those with the token of "
        "`--action.token-file` need no password.",
    },
}


def describe(app: FastAPI, telemetry_path: str) -> dict[str, Any]:
    """Return the OpenAPI document, with the credentials that open each route, depending on the exporter's files."""
    document = get_openapi(
        title=app.title,
        version=app.version,
        description=app.description,
        routes=app.routes,
        separate_input_output_schemas=False,
    )
    document["paths"] |= _plain_routes(telemetry_path)
    for path, operations in document["paths"].items():
        for method, operation in operations.items():
            # FastAPI's summary is the name of the function.
            operation["summary"] = operation["description"].partition("\n")[0].rstrip(".")
            token = "reportToken" if is_report(method.upper(), path) else "actionToken" if is_restricted(path) else ""
            operation["security"] = [{name: []} if name else {} for name in dict.fromkeys(("", token, "password"))]
    document.setdefault("components", {})["securitySchemes"] = _SCHEMES
    schemas = document["components"].setdefault("schemas", {})
    report = GenerateJsonSchema(ref_template=_REF).generate(report_core_schema())
    _, replies = TypeAdapter.json_schemas(
        [(model, "validation", TypeAdapter(model)) for model in (Problem, *DESCRIBED_MODELS.values())],
        ref_template=_REF,
    )
    for schema in (report, replies):
        schemas.update(schema.pop("$defs", {}))
    schemas["Report"] = report
    return document


def _plain_routes(telemetry_path: str) -> dict[str, Any]:
    """Return the descriptions of the plain ASGI routes."""
    text = {"schema": {"type": "string"}}
    page = {"text/plain; version=0.0.4": text, "application/openmetrics-text; version=1.0.0": text}
    names = {"type": "array", "items": {"type": "string"}, "default": []}
    report = {"application/json": {"schema": {"$ref": _REF.format(model="Report")}}}
    scrape = {
        "tags": ["metrics"],
        "description": "Prometheus text 0.0.4 or OpenMetrics 1.0, by `Accept`; gzip by `Accept-Encoding`.\n\n"
        "With `collect[]`, only the series of these collectors.",
        "parameters": [{"name": "collect[]", "in": "query", "required": False, "schema": names}],
        "responses": {200: {"description": "Successful Response", "content": page}, **problems(400)},
    }
    send = {
        "tags": ["reports"],
        "description": "Receive the samples of a process and reply with its commands.\n\n"
        "The reply waits for a command for up to `hold_seconds`, at most for the report interval.",
        "requestBody": {"required": True, "content": report},
        "responses": {200: json_reply(Reply), **problems(401, 403, 409, 413, 415, 422, 503)},
    }
    return {telemetry_path: {"get": scrape}, REPORTS_PATH: {"post": send}}
