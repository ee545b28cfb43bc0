"""The pages of docs/ that are generated from the code are up to date."""

from __future__ import annotations

import importlib.util
import re
from types import ModuleType

import pytest

from tests.support.paths import REPOSITORY

DOCS = REPOSITORY / "docs"
OUTDATED = "run `python docs/generate.py` and commit the pages"


def generator() -> ModuleType:
    specification = importlib.util.spec_from_file_location("generate_documentation", DOCS / "generate.py")
    assert specification
    assert specification.loader
    module = importlib.util.module_from_spec(specification)
    specification.loader.exec_module(module)
    return module


def without_types_of_options(page: str) -> list[str]:
    """Return the words of a page without placeholders of values, which differ between releases of click."""
    return re.sub(r"<(?:str|int|float)>|\b(?:TEXT|INTEGER|FLOAT)\b|[{}\[\]]", " ", page).split()


@pytest.mark.parametrize("name", ["metrics.md", "command-line.md"])
def test_a_generated_page_is_up_to_date(name: str) -> None:
    written = (DOCS / name).read_text(encoding="utf-8")
    made = generator().PAGES[name]()
    assert without_types_of_options(made) == without_types_of_options(written), OUTDATED
