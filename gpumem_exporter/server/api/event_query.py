"""What may be asked of the events, and what an event looks like as JSON."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable
from datetime import datetime, timedelta, timezone
from typing import Any

from gpumem_exporter.events import EVENT_TYPES, Event, Page, Query
from gpumem_exporter.server.http.problems import FieldError, ProblemError
from gpumem_exporter.server.logs import iso_time

__all__ = ["DEFAULT_LISTED", "MAX_LISTED", "events_document", "read_query"]

MAX_LISTED = 1000
DEFAULT_LISTED = 100
_MAX_ID = 2**63 - 1
_PID = re.compile(r"[0-9]{1,10}(@[0-9]{1,20})?")

_RFC_3339 = re.compile(
    r"(\d{4})-(\d\d)-(\d\d)[Tt ](\d\d):(\d\d):(\d\d)(\.\d+)?(?:[Zz]|([-+ ])(\d\d):(\d\d))", flags=re.ASCII
)


def read_query(parameters: Iterable[tuple[str, str]]) -> Query:
    """Read the parameters of a request.

    Raises:
        ProblemError: 422, which names each parameter that is wrong.
    """
    readers: dict[str, Callable[[str], Any]] = {
        "after": lambda value: _integer(value, 0, _MAX_ID),
        "since": _moment,
        "type": _types,
        "pid": _pid,
        "limit": lambda value: _integer(value, 1, MAX_LISTED),
    }
    values: dict[str, Any] = {}
    errors = []
    for name, value in parameters:
        if name not in readers:
            errors.append(FieldError(name[:100], f"there is no such parameter; there are {', '.join(readers)}"))
        elif name in values:
            errors.append(FieldError(name, "is given twice"))
        else:
            values[name] = None
            try:
                values[name] = readers[name](value)
            except ValueError as error:
                errors.append(FieldError(name, str(error)))
    if errors:
        raise ProblemError.invalid(errors)
    return Query(
        after=values.get("after"),
        since_unix_seconds=values.get("since"),
        types=values.get("type", ()),
        pid=values.get("pid"),
        limit=values.get("limit", DEFAULT_LISTED),
    )


def events_document(page: Page) -> dict[str, Any]:
    """A page of events as JSON; what is not known, or not of this event, is null."""
    return {
        "events": [_event(event) for event in page.events],
        "next_after": page.next_after,
        "more": page.more,
    }


def _event(event: Event) -> dict[str, Any]:
    return {
        "id": event.id,
        "type": event.type,
        "time": iso_time(event.time_unix_seconds),
        "unix_seconds": event.time_unix_seconds,
        "gpu": event.gpu,
        "uuid": event.uuid,
        "pid": event.pid,
        "workload": event.workload,
        "rank": event.rank,
        "detail": dict(event.detail),
    }


def _integer(value: str, least: int, most: int) -> int:
    if not (value.isascii() and value.isdecimal() and len(value) < 20 and least <= int(value) <= most):
        raise ValueError(f"must be a number from {least} to {most}")
    return int(value)


def _pid(value: str) -> str:
    if not _PID.fullmatch(value):
        raise ValueError("must be a number, or a text such as 1@4026532007 where the pid label is one")
    return value


def _types(value: str) -> tuple[str, ...]:
    types = tuple(dict.fromkeys(part.strip() for part in value.split(",")))
    if not set(types) <= set(EVENT_TYPES):
        raise ValueError(f"must be of {', '.join(EVENT_TYPES)}, or several with commas between them")
    return types


def _moment(value: str) -> float:
    wrong = ValueError("must be seconds of the Unix epoch, or a moment such as 2026-01-31T12:00:00Z")
    match = _RFC_3339.fullmatch(value)
    if match is None:
        try:
            seconds = float(value) if value.isascii() else math.nan
        except ValueError:
            raise wrong from None
        if not 0 <= seconds <= 1e12:
            raise wrong
        return seconds
    *whole, fraction, sign, hours, minutes = match.groups()
    offset = timedelta(hours=int(hours or 0), minutes=int(minutes or 0))
    try:
        zone = timezone(-offset if sign == "-" else offset)  # a plus that was not escaped has become a space
        moment = datetime(*(int(part) for part in whole), tzinfo=zone).timestamp()  # type: ignore[arg-type, misc]
    except (ValueError, OverflowError):
        raise wrong from None
    return moment + float(fraction or 0)
