"""Whole texts that a person reads, compared with files in `tests/data/golden`.

Run the tests with GPUMEM_UPDATE_GOLDEN=1 to rewrite the files after a deliberate change of a text, and read the
difference before it is committed.
"""

from __future__ import annotations

import os

from tests.support.paths import DATA

__all__ = ["assert_golden"]

GOLDEN = DATA / "golden"


def assert_golden(name: str, text: str) -> None:
    """Assert that a text equals the file `tests/data/golden/<name>`.

    Args:
        name: File name, one per command, such as `info.txt`.
        text: What the program printed, with everything that differs between runs (paths, ports, times) replaced.
    """
    path = GOLDEN / name
    if os.environ.get("GPUMEM_UPDATE_GOLDEN"):
        GOLDEN.mkdir(exist_ok=True)
        path.write_text(text)
    assert text == path.read_text(), f"{path} differs; GPUMEM_UPDATE_GOLDEN=1 rewrites it"
