"""Whole outputs of commands, compared with files in `tests/data/golden`.

GPUMEM_UPDATE_GOLDEN=1 rewrites the files after an intended change. Read the difference before you commit it.
"""

from __future__ import annotations

import io
import os

from rich.console import Console, RenderableType

from tests.support.paths import DATA

GOLDEN = DATA / "golden"


def assert_golden(name: str, text: str) -> None:
    """Assert that a text without paths, ports and times equals the file `tests/data/golden/<name>`."""
    path = GOLDEN / name
    if os.environ.get("GPUMEM_UPDATE_GOLDEN"):
        GOLDEN.mkdir(exist_ok=True)
        path.write_text(text)
    assert text == path.read_text(), f"{path} differs; GPUMEM_UPDATE_GOLDEN=1 rewrites it"


def printed(*renderables: RenderableType, width: int = 80) -> list[str]:
    """Return the lines that a terminal of this width shows."""
    out = io.StringIO()
    Console(file=out, width=width).print(*renderables, sep="\n")
    return [line.rstrip() for line in out.getvalue().splitlines()]
