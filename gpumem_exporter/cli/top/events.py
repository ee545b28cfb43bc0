"""The exporter's last events."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from gpumem_exporter.errors import ExporterAnswerError, ExporterError

__all__ = ["Events"]

Document = Mapping[str, Any]

_EVERY_SECONDS = 3.0
_REFUSED_SECONDS = 60.0
_KEPT = 100
_REFUSALS = (401, 403)
_SERVER_ERROR = 500


class Events:
    """Stores the last events. Not thread-safe; every `now` is from one monotonic clock."""

    def __init__(self) -> None:
        self.refusal = ""
        """Why there are no events; empty if there are, or before the first answer."""
        self._events: tuple[Document, ...] | None = None
        self._after: int | None = None
        self._due_seconds = -float("inf")

    @property
    def known(self) -> tuple[Document, ...] | None:
        """The events, as in `/api/v1/events`; None if they are unknown."""
        return self._events

    @property
    def path(self) -> str:
        """The URL path of the events since the last answer."""
        return f"/api/v1/events?limit={_KEPT}" + ("" if self._after is None else f"&after={self._after}")

    def due(self, now: float) -> bool:
        """Whether to query the exporter."""
        return now >= self._due_seconds

    def take(self, page: Document, now: float) -> None:
        """Add the events of an answer. An answer in another format is dropped."""
        try:
            after = int(page["next_after"])
            events = tuple(event for event in page["events"] if event["id"] >= 0 and event["unix_seconds"] >= 0)
        except (KeyError, TypeError, ValueError):
            self._drop("this exporter has no events", now)
            return
        known = self._events if self._after is not None and self._events is not None else ()
        self._events = (*known, *events)[-_KEPT:]
        self._after, self.refusal = after, ""
        self._due_seconds = now if page.get("more") else now + _EVERY_SECONDS

    def failed(self, error: ExporterError, now: float) -> None:
        """Record a failed query. The known events are kept if the exporter is slow or has an internal error."""
        if not isinstance(error, ExporterAnswerError):
            self._due_seconds = now + _REFUSED_SECONDS
        elif error.status in _REFUSALS:
            self._drop(f"the exporter refuses to show events: {error.detail}", now)
        elif error.status >= _SERVER_ERROR:
            self._due_seconds = now + _EVERY_SECONDS
        else:
            self._drop("this exporter has no events", now)

    def forget(self) -> None:
        """Forget the events, because the next answer may come from another exporter."""
        self.refusal = ""
        self._events = self._after = None
        self._due_seconds = -float("inf")

    def _drop(self, refusal: str, now: float) -> None:
        self.forget()
        self.refusal = refusal
        self._due_seconds = now + _REFUSED_SECONDS
