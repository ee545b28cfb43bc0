"""What a request to release or attach the driver must look like, and its answer."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from gpumem_exporter.nvml.poller import PollerStatus
from gpumem_exporter.server.http.problems import ProblemError, field_errors
from gpumem_exporter.server.logs import iso_time

__all__ = ["NvmlBody", "driver_state", "nvml_document", "read_nvml_request"]

MAX_WAIT_SECONDS = 60.0


class NvmlBody(BaseModel):
    """Letting the driver go, or taking it up again."""

    model_config = ConfigDict(strict=True, extra="forbid", allow_inf_nan=False)

    reason: Annotated[str, Field(max_length=1000)] = Field("", description="for the audit log")
    wait_seconds: float = Field(10.0, ge=0, le=MAX_WAIT_SECONDS, description="how long the answer may take")


def read_nvml_request(body: bytes) -> NvmlBody:
    """Read a request; an empty body asks for what is usual.

    Raises:
        ProblemError: 422, which names each field that is wrong.
    """
    try:
        return NvmlBody.model_validate_json(body or b"{}")
    except ValidationError as error:
        raise ProblemError.invalid(field_errors(error.errors(include_url=False, include_input=False))) from None


def driver_state(poller: PollerStatus) -> str:
    """`attached`, `absent` (looked for, not there), `attaching`, `releasing` or `released`."""
    if poller.release is not None:
        return "released" if poller.request_applied else "releasing"
    if not poller.request_applied or poller.polls == 0:
        return "attaching"
    return "absent" if poller.error else "attached"


def nvml_document(poller: PollerStatus, held: Sequence[str] | None) -> dict[str, Any]:
    """The driver's state as JSON.

    Args:
        poller: how the poller is doing.
        held: what of the driver this process has open; None where it cannot be known.
    """
    release = poller.release
    return {
        "state": driver_state(poller),
        "error": poller.error,
        "requested_by": release.requested_by if release else None,
        "requested": iso_time(release.requested_unix_seconds) if release else None,
        "reason": release.reason if release else None,
        "held": None if held is None else list(held),
    }
