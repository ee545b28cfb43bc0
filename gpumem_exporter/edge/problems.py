"""Errors as RFC 9457 problem documents: `application/problem+json` with a code for programs and a detail for people."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from http import HTTPStatus
from typing import Any

from fastapi import FastAPI, Request, Response
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.routing import Match
from typing_extensions import NotRequired, TypedDict

from gpumem_client.wire.protocol import MAX_LABEL_LENGTH
from gpumem_exporter.core.spelling import did_you_mean

MEDIA_TYPE = "application/problem+json"
MAX_FIELD_ERRORS = 20
_SEE = "/docs shows every path with its parameters and bodies"


class ProblemCode(str, Enum):
    """Why a request failed, for programs. Each code has one status; the description of the API lists them."""

    status: int
    meaning: str

    UNKNOWN_COLLECTOR = "unknown_collector", 400, "no collector has a name of `collect[]`, or it is off"
    NOT_A_REVIEW = "not_a_review", 400, "the body is not an AdmissionReview"
    TOKEN_REQUIRED = "token_required", 401, "the request has no token"
    WRONG_TOKEN = "wrong_token", 401, "the token does not open this route"
    PASSWORD_REQUIRED = "password_required", 401, "the request has no name and password"
    WRONG_PASSWORD = "wrong_password", 401, "the name or the password is wrong"
    UNKNOWN_CALLER = "unknown_caller", 403, "the exporter cannot see whose request it is, and has no token file"
    NOT_PERMITTED = "not_permitted", 403, "the caller may not do this, or not to processes of others"
    ACTION_NOT_ALLOWED = "action_not_allowed", 403, "`--action.allow` does not have the action"
    FOREIGN_PROCESS = "foreign_process", 403, "the sender may not report for this process"
    FOREIGN_HOST = "foreign_host", 403, "the header `Host` does not name this exporter"
    FOREIGN_PAGE = "foreign_page", 403, "a web page of another site sent the request"
    UNKNOWN_PATH = "unknown_path", 404, "there is no such path"
    UNKNOWN_TARGET = "unknown_target", 404, "no process or device has a name of the target, or none has all of them"
    UNKNOWN_ACTION = "unknown_action", 404, "no action that the caller sees has this id"
    UNKNOWN_EVENT = "unknown_event", 404, "no event that the caller sees has this number"
    UNKNOWN_JOB = "unknown_job", 404, "no process of this job has reported"
    UNKNOWN_PROFILE = "unknown_profile", 404, "no profile that the caller sees has this id"
    NO_POLICY = "no_policy", 404, "the exporter has no `--policy.file`"
    WRONG_METHOD = "wrong_method", 405, "the path does not have this method"
    KEY_REUSED = "key_reused", 409, "the `Idempotency-Key` was used with another request"
    SUPERSEDED = "superseded", 409, "a newer or an attested reporter represents the process"
    NOT_REPORTING = "not_reporting", 409, "the sender of a profile does not report"
    UNEXPECTED_PROFILE = "unexpected_profile", 409, "nothing explains why the profile was taken"
    REFUSED = "refused", 409, "the process refused"
    LENGTH_REQUIRED = "length_required", 411, "the body has no `Content-Length`"
    TOO_LARGE = "too_large", 413, "the body is too long"
    WRONG_MEDIA_TYPE = "wrong_media_type", 415, "`Content-Type` or `Content-Encoding` is wrong"
    NOT_JSON = "not_json", 422, "the body is not JSON"
    INVALID = "invalid", 422, "fields or parameters are invalid, and `errors` lists them; nothing has changed"
    INVALID_PROFILE = "invalid_profile", 422, "the profile is invalid, or contradicts itself"
    INVALID_POLICY = "invalid_policy", 422, "the policy file is invalid, and the earlier rules stay in force"
    TOO_MANY_REQUESTS = "too_many_requests", 429, "a limit is reached; `Retry-After` says when to try again"
    INTERNAL = "internal", 500, "the exporter failed; its log says why"
    BUSY = "busy", 503, "too many requests wait; `Retry-After` says when to try again"
    NO_ROOM = "no_room", 503, "`--report.max-processes` or a share of it is reached"
    NO_EVENTS = "no_events", 503, "the disk with the events does not answer"
    NO_PROFILE = "no_profile", 503, "the process has sent no profile in time"
    ALERT_DEFERRED = "alert_deferred", 503, "an alert is about a process that may not have reported yet; it is repeated"

    def __new__(cls, code: str, status: int, meaning: str) -> ProblemCode:
        """Return a member, whose value is the code."""
        member = str.__new__(cls, code)
        member._value_, member.status, member.meaning = code, status, meaning
        return member


@dataclass(frozen=True, slots=True)
class FieldError:
    """An invalid field of a request, by its dotted path."""

    field: str
    message: str


class Problem(TypedDict):
    """RFC 9457 problem details. Programs compare `code`; `errors` lists the invalid fields of the request."""

    type: str
    title: str
    status: int
    code: ProblemCode
    detail: str
    errors: NotRequired[list[FieldError]]


@dataclass(slots=True)
class ProblemError(Exception):
    """A request whose reply is a problem document."""

    code: ProblemCode
    detail: str
    """What is wrong with this request, with the value, and what to do."""
    headers: Mapping[str, str] = field(default_factory=dict)
    errors: tuple[FieldError, ...] = ()

    @classmethod
    def invalid(cls, errors: Sequence[FieldError]) -> ProblemError:
        """Return the problem of a request with invalid fields."""
        first = f"{errors[0].field}: {errors[0].message}" if errors[0].field else errors[0].message
        listed = tuple(errors[:MAX_FIELD_ERRORS])
        more = f" ({len(listed) - 1} more in `errors`)" if len(listed) > 1 else ""
        return cls(ProblemCode.INVALID, first + more, errors=listed)

    @classmethod
    def of_validation(cls, errors: Sequence[Any], *, skip: int = 0) -> ProblemError:
        """Return the problem of pydantic's errors, without the first `skip` parts of each location, such as `body`."""
        if errors[0]["type"] == "json_invalid":
            reason = errors[0].get("ctx", {}).get("error") or errors[0]["msg"]
            at = f" at character {errors[0]['loc'][-1]}" if skip else ""
            return cls(ProblemCode.NOT_JSON, f"the body is not JSON: {reason}{at}; {_SEE}")
        # One suggestion is enough for a message, and comparing names takes long.
        found = [_field_error(error, skip, suggests=error is errors[0]) for error in errors[:MAX_FIELD_ERRORS]]
        return cls.invalid(found)

    @classmethod
    def too_many(cls, reason: str, retry_seconds: float) -> ProblemError:
        """Return the problem of a caller that has reached a limit."""
        wait = retry_after(retry_seconds)
        return cls(ProblemCode.TOO_MANY_REQUESTS, f"{reason}; try again in {wait} s", {"Retry-After": wait})

    @property
    def status(self) -> int:
        """The HTTP status."""
        return self.code.status

    def response(self) -> Response:
        """Return the reply. Its `type` is `about:blank`: `code` is this project's own member of the document."""
        document: dict[str, Any] = {
            "type": "about:blank",
            "title": HTTPStatus(self.status).phrase,
            "status": self.status,
            "code": self.code.value,
            "detail": self.detail,
        }
        if self.errors:
            document["errors"] = [{"field": error.field, "message": error.message} for error in self.errors]
        return Response(
            json.dumps(document, ensure_ascii=False).encode("utf-8", "replace"),
            status_code=self.status,
            headers={"Cache-Control": "no-store", **self.headers},
            media_type=MEDIA_TYPE,
        )


def problems(*statuses: int) -> dict[int | str, dict[str, Any]]:
    """Return the OpenAPI descriptions of a route's problem replies, with the codes of each status."""
    content = {MEDIA_TYPE: {"schema": {"$ref": "#/components/schemas/Problem"}}}
    codes = [(code.status, f"`{code.value}`: {code.meaning}") for code in ProblemCode]
    described = {status: "\n\n".join(text for of, text in codes if of == status) for status in statuses}
    return {status: {"description": text, "content": content} for status, text in described.items()}


def _field_error(error: Any, skip: int, *, suggests: bool) -> FieldError:
    given, location = error.get("input"), ".".join(str(part)[:MAX_LABEL_LENGTH] for part in error["loc"][skip:])
    message = re.sub(r"^[A-Z]\w+ should ", "must ", str(error["msg"]).removeprefix("Value error, "))
    message = message.replace("Field required", f"is missing; {_SEE}")
    if isinstance(given, (str, int, float)):
        shown = repr(given[:MAX_LABEL_LENGTH] if isinstance(given, str) else given)
        choices = re.findall(r"'(\w+)'", message) if suggests and error["type"] == "literal_error" else ()
        message = f"{message}, not {shown}; {did_you_mean(str(given), choices)}".removesuffix("; ")
    return FieldError(location, message if location else f"the body {message}")


def install_problem_handlers(app: FastAPI, paths: Collection[str]) -> None:
    """Turn every error of an application into a problem document. An unknown path is compared with `paths`."""
    app.state.paths = paths
    for error in (ProblemError, HTTPException, RequestValidationError, Exception):
        app.add_exception_handler(error, _answer)


async def _answer(request: Request, error: Exception) -> Response:
    if isinstance(error, HTTPException):
        error = _http_problem(request, error)
    elif isinstance(error, RequestValidationError):
        error = ProblemError.of_validation(error.errors(), skip=1)
    elif not isinstance(error, ProblemError):
        error = ProblemError(ProblemCode.INTERNAL, "internal error; see the exporter's log")
    return error.response()


def _http_problem(request: Request, error: HTTPException) -> ProblemError:
    path = request.url.path
    if error.status_code == 405:
        allowed = ", ".join(_accepted_methods(request))
        detail = f"{path} does not accept {request.method}; use {allowed}"
        return ProblemError(ProblemCode.WRONG_METHOD, detail, {"Allow": allowed})
    if error.status_code == 400:  # of FastAPI: the body is not text, or nested too deeply
        return ProblemError(ProblemCode.NOT_JSON, f"the body is not JSON: {error.__cause__}; {_SEE}")
    paths = request.app.state.paths
    accepted = _SEE if "/docs" in paths else f"the paths are {', '.join(paths)}"
    return ProblemError(ProblemCode.UNKNOWN_PATH, f"no such path: {path}; {did_you_mean(path, paths, accepted)}")


def _accepted_methods(request: Request) -> list[str]:
    """Return every method of a path; Starlette's error has the methods of one of its routes."""
    accepted = {
        method
        for method in ("DELETE", "GET", "PATCH", "POST", "PUT")
        for route in request.app.router.routes
        if route.matches({**request.scope, "method": method})[0] is Match.FULL
    }
    # The guard answers HEAD wherever GET is accepted.
    return sorted(accepted | {"HEAD"} if "GET" in accepted else accepted)


def retry_after(seconds: float) -> str:
    """Return the value of the header `Retry-After`: whole seconds, at least 1."""
    return str(max(1, math.ceil(seconds)))
