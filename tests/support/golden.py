"""Whole outputs of commands, compared with files in `tests/data/golden`.

GPUMEM_UPDATE_GOLDEN=1 rewrites the files after an intended change. Read the difference before you commit it.
"""

from __future__ import annotations

import os

from tests.support.paths import DATA

GOLDEN = DATA / "golden"


def assert_golden(name: str, text: str) -> None:
    """Assert that a text equals the file `tests/data/golden/<name>`.

    Values that differ between runs (paths, ports, times) are replaced in the text.
    """
    path = GOLDEN / name
    if os.environ.get("GPUMEM_UPDATE_GOLDEN"):
        GOLDEN.mkdir(exist_ok=True)
        path.write_text(text)
    assert text == path.read_text(), f"{path} differs; GPUMEM_UPDATE_GOLDEN=1 rewrites it"
