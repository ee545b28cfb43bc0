"""Places in the repository that tests read."""

from __future__ import annotations

from pathlib import Path

REPOSITORY = Path(__file__).parents[2]
"""The root of the checkout, which holds `gpumem_exporter` and `tests`."""
DATA = REPOSITORY / "tests" / "data"
"""Files that tests compare with."""
