"""`GET /api/v1/history`: what devices and jobs used, for charts."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Annotated, Any, Literal

from fastapi import APIRouter, Request, Response
from fastapi import Query as QueryParameters
from pydantic import Field, StringConstraints
from typing_extensions import TypedDict

from gpumem_exporter.actions.action_routes import KnownFields
from gpumem_exporter.core.caller import Rights
from gpumem_exporter.core.history_series import Subject
from gpumem_exporter.core.samples import Snapshot
from gpumem_exporter.edge.problems import FieldError, ProblemError, problems
from gpumem_exporter.edge.replies import Renderer, encoded, json_reply, json_response
from gpumem_exporter.edge.request_guard import HISTORY_PATH, Callers
from gpumem_exporter.features.history.history import History
from gpumem_exporter.features.history.points import VALUES
from gpumem_exporter.page.jobs import jobs_of

MAX_POINTS = 2000
# The maximum number of points of all series together: then a document has about 4 MB.
_MAX_DOCUMENT_POINTS = 64_000
# A second without a row is a gap only if the next row is this late.
_LATE_SECONDS = 3.0
_MAX_DEVICES = 128
_MAX_JOBS = 64
_DEFAULT_SECONDS = 600.0
# The end of the year 9999.
_LAST_UNIX_SECONDS = 253_402_300_799.0

_Device = Annotated[str, StringConstraints(min_length=1, max_length=96)]
# A workload has up to 128 characters, each up to twelve in the id.
_Job = Annotated[str, StringConstraints(min_length=1, max_length=2048)]
_Values = dict[Literal["min", "max"], list[int | None]]
_UnixSeconds = Annotated[float, Field(ge=0, le=_LAST_UNIX_SECONDS, allow_inf_nan=False)]


class HistoryParameters(KnownFields):
    """The parameters of a query for the history."""

    start: _UnixSeconds | None = Field(
        None, alias="from", description="the start in Unix seconds; ten minutes before `to` by default"
    )
    to: _UnixSeconds | None = Field(None, description="the end in Unix seconds; now by default")
    device: tuple[_Device, ...] = Field(
        (), max_length=_MAX_DEVICES, description="the UUIDs of devices; without `device` and `job`, every device"
    )
    job: tuple[_Job, ...] = Field((), max_length=_MAX_JOBS, description="the ids of jobs, as in /api/v1/live")
    points: int = Field(
        600, ge=1, le=MAX_POINTS, description="the maximum number of steps; the finest steps that fit are sent"
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


def history_router(
    history: History,
    renderer: Renderer,
    snapshot: Callable[[], Snapshot],
    hide_identities_from: Callers | None,
) -> APIRouter:
    """Return the route of the history.

    `hide_identities_from` identifies the viewers from whom the commands of others' jobs are hidden.
    """
    router = APIRouter(tags=["state"])

    @router.get(HISTORY_PATH, responses={200: json_reply(HistoryDocument), **problems(403, 422)})
    async def of(request: Request, parameters: Annotated[HistoryParameters, QueryParameters()]) -> Response:
        """What devices and jobs used: used and allocated memory, idle and other cache, and the peak of the allocated.

        Steps have one second in the last ten minutes, ten seconds in the last two hours, then a minute. They have
        several minutes if more than `points` minutes are requested. Longer steps have minimum and maximum. Devices and
        jobs of which nothing is known have no series.

        With `--web.hide-identities`, a job without a workload is named by its pid for a caller that may not act on it,
        and for every caller without all rights once it has ended.
        """
        viewer = await hide_identities_from.of(request.scope) if hide_identities_from is not None else None
        end = history.wall_clock() if parameters.to is None else parameters.to
        start = max(0.0, end - _DEFAULT_SECONDS) if parameters.start is None else parameters.start
        if start >= end:
            raise ProblemError.invalid([FieldError("from", f"{start:.0f} must be before `to`, {end:.0f}")])

        def build() -> bytes:
            names = None
            if viewer is not None and viewer.rights is not Rights.ALL:
                names = {job.id: job.name for job in jobs_of(snapshot(), viewer)}
            chosen = [*parameters.device, *parameters.job] or history.uuids()
            document = history_document(history, chosen, (start, end), parameters.points, names)
            return encoded(document, separators=(",", ":"))

        return json_response(await renderer.render(build))

    return router


def history_document(
    history: History,
    keys: Iterable[str],
    span: tuple[float, float],
    points: int,
    names: Mapping[str, str] | None = None,
) -> dict[str, Any]:
    """Return devices and jobs, by uuid and id, as JSON. A device or a job without a row has no series.

    The steps are the shortest ones that reach back to the start of the time and are at most `points`. `names` has the
    names of the jobs whose commands may be shown; None shows all.
    """
    keys = dict.fromkeys(keys)
    points = max(1, min(points, _MAX_DOCUMENT_POINTS // max(1, len(keys))))
    now_seconds = history.wall_clock()
    # The present second is not a gap.
    late = now_seconds - history.recorded_seconds
    newest_seconds = history.recorded_seconds if 0 < late < _LATE_SECONDS else now_seconds
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
        "series": [_series(*series, names, is_range=width > 1) for series in found],
    }


def _series(
    subject: Subject, columns: Sequence[Sequence[int | None]], names: Mapping[str, str] | None, *, is_range: bool
) -> dict[str, Any]:
    shown = subject.name or (subject.command if names is None else names.get(subject.job, ""))
    highs, lows = columns[: len(VALUES)], columns[len(VALUES) :] if is_range else []
    return {
        "device": subject.uuid or None,
        "job": subject.job or None,
        "name": shown or f"pid {subject.job.rpartition('~')[2]}",
        "gpu": subject.gpu or None,
        **{name: {"max": high} for name, high in zip(VALUES, highs, strict=True)},
        **{name: {"min": low, "max": high} for name, low, high in zip(VALUES, lows, highs, strict=False)},
    }
