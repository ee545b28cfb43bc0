"""The capabilities above the core, a folder each, which owns everything that the capability adds.

`NAMES` is the list of them. Without a folder and its line here, the exporter starts without the capability.

Other folders import: `feature`.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from gpumem_exporter.features.feature import Feature

NAMES = ("client_directory", "history", "policy", "profiles", "events", "oom", "orphans", "engines", "fleet", "webhook")
"""The folders, in the order in which they start: a slot of `Node` is filled before a later feature reads it."""


def features() -> dict[str, Feature]:
    """Return the features by the name of their folder."""
    return {name: importlib.import_module(f"{__name__}.{name}.feature").FEATURE for name in NAMES}
