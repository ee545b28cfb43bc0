"""The functions and folders that docs/architecture.md names exist."""

from __future__ import annotations

import ast
import re

import pytest

from tests.support.paths import REPOSITORY

PAGE = (REPOSITORY / "docs" / "architecture.md").read_text()
PACKAGE = REPOSITORY / "gpumem_exporter"
STEPS = re.findall(r"^\| `([\w/]+\.py)` \| `([\w.]+)` \|", PAGE, re.MULTILINE)


def test_the_page_describes_the_main_paths() -> None:
    assert len(STEPS) > 30


@pytest.mark.parametrize(("module", "name"), dict.fromkeys(STEPS))
def test_each_named_function_exists(module: str, name: str) -> None:
    body = ast.parse((PACKAGE / module).read_text()).body
    for part in name.split("."):
        found = [node for node in body if isinstance(node, _DEFINITIONS) and node.name == part]
        assert found, f"{module} has no {name}"
        body = found[0].body


@pytest.mark.parametrize("path", sorted({*re.findall(r"`([a-z_]+/(?:[\w/]+\.py)?|deploy/[\w/]+)`", PAGE)}))
def test_each_named_folder_and_file_exists(path: str) -> None:
    assert (PACKAGE / path).exists() or (REPOSITORY / path).exists()


def test_every_package_is_described() -> None:
    packages = {path.parent.name for path in PACKAGE.glob("*/__init__.py")}
    assert packages == set(re.findall(r"`(\w+)/`", PAGE.partition("## Packages")[2].partition("## Threads")[0]))


_DEFINITIONS = (ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
