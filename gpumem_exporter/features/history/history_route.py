"""`GET /api/v1/history`: what devices and jobs used, for charts."""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated

from fastapi import APIRouter, Request, Response
from fastapi import Query as QueryParameters
from pydantic import Field, StringConstraints
from typing_extensions import NotRequired, TypedDict

from gpumem_exporter.actions.action_routes import KnownFields
from gpumem_exporter.core.caller import Caller, Rights
from gpumem_exporter.core.samples import Snapshot
from gpumem_exporter.edge.problems import FieldError, ProblemError, problems
from gpumem_exporter.edge.replies import Renderer, encoded, json_reply, json_response
from gpumem_exporter.edge.request_guard import HISTORY_PATH, Callers
from gpumem_exporter.features.history.history import History
from gpumem_exporter.page.jobs import jobs_of

MAX_POINTS = 2000
_MAX_DEVICES = 128
_MAX_JOBS = 64
_DEFAULT_SECONDS = 600.0
# The end of the year 9999.
_LAST_UNIX_SECONDS = 253_402_300_799.0

_Device = Annotated[str, StringConstraints(min_length=1, max_length=96)]
# A workload has up to 128 characters, each up to twelve in the id.
_Job = Annotated[str, StringConstraints(min_length=1, max_length=2048)]
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


class RangeDocument(TypedDict):
    """A value in bytes in each step; null is unknown. Steps of one second have no `min`: it is equal to `max`."""

    min: NotRequired[list[int | None]]
    max: list[int | None]


class PeakDocument(TypedDict):
    """The highest value in bytes in each step; null is unknown."""

    max: list[int | None]


class SeriesDocument(TypedDict):
    """The values of a device or a job."""

    device: str | None
    job: str | None
    name: str
    gpu: str | None
    used: RangeDocument
    allocated: RangeDocument
    idle_cache: RangeDocument
    other_cache: RangeDocument
    in_use_peak: PeakDocument


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
    *,
    snapshot: Callable[[], Snapshot],
    wall_clock: Callable[[], float],
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
        end = wall_clock() if parameters.to is None else parameters.to
        start = max(0.0, end - _DEFAULT_SECONDS) if parameters.start is None else parameters.start
        if start >= end:
            raise ProblemError.invalid([FieldError("from", f"{start:.0f} must be before `to`, {end:.0f}")])

        def build() -> bytes:
            document = history.document(
                uuids=parameters.device if parameters.device or parameters.job else None,
                jobs=parameters.job,
                from_unix_seconds=start,
                to_unix_seconds=end,
                points=parameters.points,
                names=_names(viewer, snapshot),
            )
            return encoded(document, separators=(",", ":"))

        return json_response(await renderer.render(build))

    return router


def _names(viewer: Caller | None, snapshot: Callable[[], Snapshot]) -> dict[str, str] | None:
    """Return the names of the running jobs as the viewer may see them; None if the viewer may see every name."""
    if viewer is None or viewer.rights is Rights.ALL:
        return None
    if viewer.rights is Rights.NONE:
        return {}
    return {job.id: job.name for job in jobs_of(snapshot(), viewer)}
