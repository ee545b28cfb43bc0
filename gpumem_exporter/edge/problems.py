"""Errors as RFC 9457 problem documents: `application/problem+json` with type, title, status and detail."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from http import HTTPStatus
from typing import Any

from fastapi import FastAPI, Request, Response
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.routing import Match
from typing_extensions import NotRequired, TypedDict

from gpumem_client.wire.protocol import MAX_LABEL_LENGTH

MEDIA_TYPE = "application/problem+json"
MAX_FIELD_ERRORS = 20

_DESCRIPTIONS = {
    400: "a name in the query is unknown",
    401: "no token or password, or a wrong one",
    403: "the caller or the action is not allowed",
    404: "not found",
    409: "the request conflicts with the current state",
    413: "the body is too long",
    415: "the body is not JSON",
    422: "the request is invalid; nothing has changed",
    429: "too many requests; `Retry-After` says when to try again",
    503: "temporarily unavailable; `Retry-After` says when to try again",
}


@dataclass(frozen=True, slots=True)
class FieldError:
    """An invalid field of a request, by its dotted path."""

    field: str
    message: str


class Problem(TypedDict):
    """RFC 9457 problem details; `errors` lists the invalid fields of the request."""

    type: str
    title: str
    status: int
    detail: str
    errors: NotRequired[list[FieldError]]


@dataclass(slots=True)
class ProblemError(Exception):
    """A request whose reply is a problem document."""

    status: int
    detail: str
    """What is wrong with this request, and how to fix it if that is known."""
    headers: Mapping[str, str] = field(default_factory=dict)
    errors: tuple[FieldError, ...] = ()

    @classmethod
    def invalid(cls, errors: Sequence[FieldError]) -> ProblemError:
        """Return the problem of a request with invalid fields."""
        first = f"{errors[0].field}: {errors[0].message}" if errors[0].field else errors[0].message
        more = f" (and {len(errors) - 1} more)" if len(errors) > 1 else ""
        return cls(422, first + more, errors=tuple(errors[:MAX_FIELD_ERRORS]))

    def response(self) -> Response:
        """Return the reply."""
        return problem_response(self.status, self.detail, headers=self.headers, errors=self.errors)


def problem_response(
    status: int, detail: str, *, headers: Mapping[str, str] | None = None, errors: Iterable[FieldError] = ()
) -> Response:
    """Return a problem document. Its `type` is `about:blank`: the status is the only type."""
    document: dict[str, Any] = {
        "type": "about:blank",
        "title": HTTPStatus(status).phrase,
        "status": status,
        "detail": detail,
    }
    listed = [{"field": error.field, "message": error.message} for error in errors]
    if listed:
        document["errors"] = listed
    return Response(
        json.dumps(document, ensure_ascii=False).encode("utf-8", "replace"),
        status_code=status,
        headers={"Cache-Control": "no-store", **(headers or {})},
        media_type=MEDIA_TYPE,
    )


def problems(*statuses: int) -> dict[int | str, dict[str, Any]]:
    """Return the OpenAPI descriptions of a route's problem replies."""
    content = {MEDIA_TYPE: {"schema": {"$ref": "#/components/schemas/Problem"}}}
    return {status: {"description": _DESCRIPTIONS[status], "content": content} for status in statuses}


def field_errors(errors: Iterable[Any], *, skip: int = 0) -> list[FieldError]:
    """Convert pydantic's errors, without the first `skip` parts of each location, such as `body`."""
    found = []
    for error in errors:
        message = str(error["msg"]).removeprefix("Value error, ").replace("Input should be", "must be")
        message = message.replace("Extra inputs are not permitted", "is not a known field")
        if error["type"] == "json_invalid":
            found.append(FieldError("", f"the body is not JSON: {error.get('ctx', {}).get('error', message)}"))
            continue
        found.append(FieldError(".".join(str(part)[:MAX_LABEL_LENGTH] for part in error["loc"][skip:]), message))
    return found


def install_problem_handlers(app: FastAPI) -> None:
    """Turn every error of the application's routes into a problem document."""
    app.add_exception_handler(ProblemError, _problem)
    app.add_exception_handler(HTTPException, _http_error)
    app.add_exception_handler(RequestValidationError, _validation_error)
    app.add_exception_handler(Exception, _server_error)


async def _problem(_: Request, error: Any) -> Response:
    response: Response = error.response()
    return response


async def _http_error(request: Request, error: Any) -> Response:
    detail, headers = str(error.detail), dict(error.headers or {})
    if error.status_code == 404 and detail == "Not Found":
        detail = f"no such path: {request.url.path}; see / for the routes"
    elif error.status_code == 405:
        headers["Allow"] = allowed = ", ".join(_accepted_methods(request))
        detail = f"{request.url.path} does not accept {request.method}, only {allowed}"
    return problem_response(error.status_code, detail, headers=headers)


def _accepted_methods(request: Request) -> list[str]:
    """Return every method of a path; Starlette's error has the methods of one of its routes."""
    accepted = [
        method
        for method in ("DELETE", "GET", "PATCH", "POST", "PUT")
        if any(
            route.matches({**request.scope, "method": method})[0] is Match.FULL for route in request.app.router.routes
        )
    ]
    # The guard answers HEAD wherever GET is accepted.
    return sorted({*accepted, "HEAD"} if "GET" in accepted else accepted)


async def _validation_error(_: Request, error: Any) -> Response:
    return ProblemError.invalid(field_errors(error.errors(), skip=1)).response()


async def _server_error(*_: object) -> Response:
    return problem_response(500, "internal error; see the exporter's log")


def retry_after(seconds: float) -> str:
    """Return the value of the header `Retry-After`: whole seconds, at least 1."""
    return str(max(1, math.ceil(seconds)))
