"""`GET /api/v1/history`: what devices and jobs used, for charts."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Annotated, Any, Literal

from fastapi import APIRouter, Request, Response
from fastapi import Query as QueryParameters
from pydantic import Field
from typing_extensions import TypedDict

from gpumem_exporter.actions.action_routes import KnownFields
from gpumem_exporter.core.caller import Rights
from gpumem_exporter.core.history_series import Subject
from gpumem_exporter.edge.problems import FieldError, ProblemError, problems
from gpumem_exporter.edge.replies import Renderer, encoded, json_reply, json_response
from gpumem_exporter.edge.request_guard import HISTORY_PATH, Callers
from gpumem_exporter.features.history.history import History
from gpumem_exporter.features.history.points import VALUES

# The maximum number of points of all series together: then a document has about 4 MB.
_MAX_DOCUMENT_POINTS = 64_000
# A second without a row is a gap only if the next row is this late.
_LATE_SECONDS = 3.0

_Values = dict[Literal["min", "max"], list[int | None]]
# Until the end of the year 9999.
_UnixSeconds = Annotated[float, Field(ge=0, le=253_402_300_799.0, allow_inf_nan=False)]


class HistoryParameters(KnownFields):
    """The parameters of a query for the history."""

    start: _UnixSeconds | None = Field(
        None, alias="from", description="the start in Unix seconds; ten minutes before `to` by default"
    )
    to: _UnixSeconds | None = Field(None, description="the end in Unix seconds; now by default")
    device: tuple[str, ...] = Field(
        (), max_length=128, description="the UUIDs of devices; without `device` and `job`, every device"
    )
    job: tuple[str, ...] = Field((), max_length=64, description="the ids of jobs, as in /api/v1/live")
    points: int = Field(
        600, ge=1, le=2000, description="the maximum number of steps; the finest steps that fit are sent"
    )


class SeriesDocument(TypedDict):
    """The values of a device or a job in bytes; null is unknown. Steps of one second and peaks have no `min`."""

    device: str | None
    job: str | None
    name: str
    gpu: str | None
    used: _Values
    allocated: _Values
    idle_cache: _Values
    other_cache: _Values
    in_use_peak: _Values


class HistoryDocument(TypedDict):
    """The values of devices and jobs at the ends of equal steps. A step without values is a gap."""

    from_unix_seconds: float
    to_unix_seconds: float
    step_seconds: int
    unix_seconds: list[int]
    series: list[SeriesDocument]


def history_router(history: History, renderer: Renderer, hide_identities_from: Callers | None) -> APIRouter:
    """Return the route of the history. `hide_identities_from` identifies the viewers from whom commands are hidden."""
    router = APIRouter(tags=["state"])

    @router.get(HISTORY_PATH, responses={200: json_reply(HistoryDocument), **problems(403, 422)})
    async def of(request: Request, parameters: Annotated[HistoryParameters, QueryParameters()]) -> Response:
        """What devices and jobs used: used and allocated memory, idle and other cache, and the peak of the allocated.

        Steps have one second in the last ten minutes, ten seconds in the last two hours, then a minute. They have
        several minutes if more than `points` minutes are requested. Longer steps have minimum and maximum. Devices and
        jobs of which nothing is known have no series.

        With `--web.hide-identities`, a job without a workload is named by its pid for a caller without all rights.
        """
        viewer = await hide_identities_from.of(request.scope) if hide_identities_from is not None else None
        end = history.wall_clock() if parameters.to is None else parameters.to
        start = max(0.0, end - 600.0) if parameters.start is None else parameters.start
        if start >= end:
            raise ProblemError.invalid([FieldError("from", f"{start:.0f} must be before `to`, {end:.0f}")])

        def build() -> bytes:
            chosen = [*parameters.device, *parameters.job] or history.uuids()
            with_commands = viewer is None or viewer.rights is Rights.ALL
            document = history_document(history, chosen, (start, end), parameters.points, with_commands=with_commands)
            return encoded(document, separators=(",", ":"))

        return json_response(await renderer.render(build))

    return router


def history_document(
    history: History,
    keys: Iterable[str],
    span: tuple[float, float],
    points: int,
    *,
    with_commands: bool = True,
) -> dict[str, Any]:
    """Return devices and jobs, by uuid and id, as JSON. A device or a job without a row has no series.

    The steps are the shortest ones that reach back to the start of the time and are at most `points`.
    """
    keys = dict.fromkeys(keys)
    points = max(1, min(points, _MAX_DOCUMENT_POINTS // max(1, len(keys))))
    now_seconds, recorded_seconds = history.wall_clock(), history.recorded_seconds
    # The present second is not a gap.
    newest_seconds = recorded_seconds if 0 < now_seconds - recorded_seconds < _LATE_SECONDS else now_seconds
    from_seconds = max(span[0], now_seconds - max(history.kept.values()))
    to_seconds = max(from_seconds, min(span[1], newest_seconds))
    # A step is in the range if its end is.
    for step, kept in history.kept.items():
        start, end = (int(seconds // step) * step for seconds in (from_seconds, to_seconds))
        if end - start <= points * step and from_seconds >= now_seconds - kept:
            break
    # If even minutes are too many, a step of the document has several. It starts at a multiple of its length, so that
    # the same minutes are together in the next document. The last step may be shorter.
    width = max(1, -(-(end - start) // (points * step))) * step
    steps = range(start + -start % width, end, width)
    found = [series for key in keys if (series := history.series(key, step, steps)) is not None]
    return {
        "from_unix_seconds": round(from_seconds, 3),
        "to_unix_seconds": round(to_seconds, 3),
        "step_seconds": width,
        "unix_seconds": [min(at + width, end) for at in steps],
        "series": [_series(*series, with_commands=with_commands, is_range=width > 1) for series in found],
    }


def _series(
    subject: Subject, columns: Sequence[Sequence[int | None]], *, with_commands: bool, is_range: bool
) -> dict[str, Any]:
    shown = subject.name or (subject.command if with_commands else "")
    highs, lows = columns[: len(VALUES)], columns[len(VALUES) :] if is_range else []
    return {
        "device": subject.uuid or None,
        "job": subject.job or None,
        "name": shown or f"pid {subject.job.rpartition('~')[2]}",
        "gpu": subject.gpu or None,
        **{name: {"max": high} for name, high in zip(VALUES, highs, strict=True)},
        **{name: {"min": low, "max": high} for name, low, high in zip(VALUES, lows, highs, strict=False)},
    }
