"""The pages of docs/ that are generated from the code are up to date."""

from __future__ import annotations

import re
import runpy

import pytest

from tests.support.paths import REPOSITORY

DOCS = REPOSITORY / "docs"


def without_types_of_options(page: str) -> list[str]:
    """Return the words of a page without placeholders of values, which differ between releases of click."""
    return re.sub(r"<(?:str|int|float)>|\b(?:TEXT|INTEGER|FLOAT)\b|[{}\[\]]", " ", page).split()


@pytest.mark.parametrize("name", ["metrics.md", "command-line.md"])
def test_a_generated_page_is_up_to_date(name: str) -> None:
    written = (DOCS / name).read_text(encoding="utf-8")
    made = runpy.run_path(str(DOCS / "generate.py"))["PAGES"][name]()
    assert without_types_of_options(made) == without_types_of_options(written), "run `python docs/generate.py`"
