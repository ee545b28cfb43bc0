"""The settings of the history."""

from __future__ import annotations

from pydantic import Field

from gpumem_exporter.settings import SettingsModel


class HistorySettings(SettingsModel):
    """How much of the past is kept."""

    history_retention: float = Field(
        default=86400.0, ge=600, le=7 * 86400, description="seconds of the history of devices and jobs"
    )
