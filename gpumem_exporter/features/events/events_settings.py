"""The settings of events."""

from __future__ import annotations

from pydantic import Field

from gpumem_exporter.settings import SettingsModel


class EventsSettings(SettingsModel):
    """How long events are kept."""

    storage_retention: float = Field(
        default=604800.0, ge=1, le=10 * 365 * 86400, description="seconds after which an event is deleted"
    )
