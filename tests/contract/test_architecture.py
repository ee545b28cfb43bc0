"""The functions and folders that docs/architecture.md names exist."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

from tests.support.packages import PACKAGES, Package
from tests.support.paths import REPOSITORY

PAGE = (REPOSITORY / "docs" / "architecture.md").read_text()
PACKAGE = REPOSITORY / "gpumem_exporter"
STEPS = re.findall(r"^\| `([\w/]+\.py)` \| `([\w.]+)` \|", PAGE, re.MULTILINE)


def test_the_page_describes_the_main_paths() -> None:
    assert len(STEPS) > 30


@pytest.mark.parametrize(("module", "name"), dict.fromkeys(STEPS))
def test_each_named_function_exists(module: str, name: str) -> None:
    body = ast.parse(_path(module).read_text()).body
    for part in name.split("."):
        found = [node for node in body if isinstance(node, _DEFINITIONS) and node.name == part]
        assert found, f"{module} has no {name}"
        body = found[0].body


@pytest.mark.parametrize("path", sorted({*re.findall(r"`([a-z_]+/(?:[\w/]+\.py)?|deploy/[\w/]+)`", PAGE)}))
def test_each_named_folder_and_file_exists(path: str) -> None:
    assert any(
        (root / path).exists()
        for root in (REPOSITORY, *(folder for each in PACKAGES for folder in (each.root, each.root.parent)))
    )


@pytest.mark.parametrize("package", PACKAGES, ids=lambda package: package.name)
def test_every_folder_is_described(package: Package) -> None:
    folders = {path.parent.name for path in package.root.glob("*/__init__.py")}
    section = PAGE.partition(f"Folders of `{package.name}`:")[2].partition("\n\n")[2].partition("\n\n")[0]
    assert folders <= set(re.findall(r"`(\w+)/`", section))


def _path(module: str) -> Path:
    """Return the file of a module that the page names: relative to the exporter, or with the name of its package."""
    roots = {package.name: package.root for package in PACKAGES}
    first, _, rest = module.partition("/")
    return roots[first] / rest if first in roots else PACKAGE / module


_DEFINITIONS = (ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
