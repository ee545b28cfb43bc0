"""One line that says what the caller may do, from `GET /api/v1/caller`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from gpumem_client.wire.errors import ExporterAnswerError
from gpumem_client.wire.units import counted
from gpumem_exporter.cli.api_client import ExporterApi
from gpumem_exporter.cli.program import one_line

__all__ = ["read_rights", "rights_line"]


def read_rights(api: ExporterApi) -> Mapping[str, Any]:
    """Read the rights of this user; empty if the exporter is too old to know them.

    Raises:
        ExporterUnreachableError: no address answers.
    """
    try:
        return api.get("/api/v1/caller")
    except ExporterAnswerError:
        return {}


def rights_line(rights: Mapping[str, Any], verb: str = "act on") -> str:
    """Return what the caller may do: "You can clear your own 3 processes (uid 1001)."; empty if it is unknown."""
    count = rights.get("processes", 0)
    if rights.get("rights") == "own":
        return f"You can {verb} your own {counted(count, 'process', 'processes')} (uid {rights.get('uid')})."
    if rights.get("rights") == "all":
        return f"You can {verb} all processes that report ({count})."
    if rights.get("rights") == "none":
        return f"You cannot {verb} processes. {one_line(str(rights.get('reason') or ''))}".strip()
    return ""
