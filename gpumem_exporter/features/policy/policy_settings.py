"""The settings of policies."""

from __future__ import annotations

from pydantic import Field

from gpumem_exporter.settings import SettingsModel


class PolicySettings(SettingsModel):
    """Where the rules are."""

    policy_file: str = Field(default="", description="file with the rules of automatic actions")
