"""Errors as RFC 9457 problem documents: `application/problem+json` with type, title, status and detail."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from http import HTTPStatus
from typing import Any

from fastapi import FastAPI, Request, Response
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException

from gpumem_exporter.wire.protocol import MAX_LABEL_LENGTH

__all__ = ["FieldError", "ProblemError", "field_errors", "install_problem_handlers", "problem_response"]

MEDIA_TYPE = "application/problem+json"
MAX_FIELD_ERRORS = 20


@dataclass(frozen=True, slots=True)
class FieldError:
    """One field of a request's body that is wrong, by its dotted path."""

    field: str
    message: str


@dataclass(slots=True)
class ProblemError(Exception):
    """A request that is answered with a problem document.

    Attributes:
        status: the HTTP status.
        detail: what is wrong with this request, and the mend where there is one.
        headers: headers of the answer.
        errors: the fields that are wrong.
    """

    status: int
    detail: str
    headers: Mapping[str, str] = field(default_factory=dict)
    errors: tuple[FieldError, ...] = ()

    @classmethod
    def invalid(cls, errors: Sequence[FieldError]) -> ProblemError:
        """A body that is JSON but not what the route takes."""
        first = f"{errors[0].field}: {errors[0].message}" if errors[0].field else errors[0].message
        more = f" (and {len(errors) - 1} more)" if len(errors) > 1 else ""
        return cls(422, first + more, errors=tuple(errors[:MAX_FIELD_ERRORS]))

    def response(self) -> Response:
        """The answer."""
        return problem_response(self.status, self.detail, headers=self.headers, errors=self.errors)


def problem_response(
    status: int, detail: str, *, headers: Mapping[str, str] | None = None, errors: Iterable[FieldError] = ()
) -> Response:
    """Build a problem document. `type` is `about:blank`: the status says all that a type would."""
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


def field_errors(errors: Iterable[Any], *, skip: int = 0) -> list[FieldError]:
    """Turn pydantic's errors into ours.

    Args:
        errors: what `ValidationError.errors()` gives.
        skip: how many leading parts of the location are not the body's.
    """
    found = []
    for error in errors:
        message = str(error["msg"]).removeprefix("Value error, ").replace("Input should be", "must be")
        if error["type"] == "json_invalid":
            found.append(FieldError("", f"the body is not JSON: {error.get('ctx', {}).get('error', message)}"))
            continue
        found.append(FieldError(".".join(str(part)[:MAX_LABEL_LENGTH] for part in error["loc"][skip:]), message))
    return found


def install_problem_handlers(app: FastAPI) -> None:
    """Make every error that the application's routes end in a problem document."""

    async def problem(_: Request, error: Exception) -> Response:
        assert isinstance(error, ProblemError)  # noqa: S101 - the type that it is registered for
        return error.response()

    async def http_error(request: Request, error: Exception) -> Response:
        assert isinstance(error, HTTPException)  # noqa: S101
        detail = str(error.detail)
        if error.status_code == 404 and detail == "Not Found":
            detail = f"there is nothing at {request.url.path}; / lists what there is"
        elif error.status_code == 405:
            allowed = (error.headers or {}).get("Allow", "")
            detail = f"{request.url.path} does not take {request.method}" + (f", only {allowed}" if allowed else "")
        return problem_response(error.status_code, detail, headers=error.headers)

    async def validation_error(_: Request, error: Exception) -> Response:
        assert isinstance(error, RequestValidationError)  # noqa: S101
        return ProblemError.invalid(field_errors(error.errors(), skip=1)).response()

    async def server_error(*_: object) -> Response:
        return problem_response(500, "the exporter failed to answer; its log says why")

    app.add_exception_handler(ProblemError, problem)
    app.add_exception_handler(HTTPException, http_error)
    app.add_exception_handler(RequestValidationError, validation_error)
    app.add_exception_handler(Exception, server_error)
