"""The setting `client.directory`."""

from __future__ import annotations

import os
from typing import Annotated

from pydantic import AfterValidator, Field

from gpumem_exporter.settings import SettingsModel


def _import_path(value: str) -> str:
    if value and (not value.startswith("/") or os.pathsep in value or "\0" in value):
        raise ValueError(f"expected an absolute path without {os.pathsep!r}, which separates the entries of PYTHONPATH")
    return value


class ClientDirectorySettings(SettingsModel):
    """The setting of the client's folder."""

    client_directory: Annotated[str, AfterValidator(_import_path)] = Field(
        default="",
        description="folder in which the exporter puts its client, for the PYTHONPATH of jobs; created if missing",
    )
