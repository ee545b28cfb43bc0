"""Folders of the repository that tests read."""

from __future__ import annotations

from pathlib import Path

REPOSITORY = Path(__file__).parents[2]
"""The root of the checkout."""
DATA = REPOSITORY / "tests" / "data"
"""The files that tests compare with."""
