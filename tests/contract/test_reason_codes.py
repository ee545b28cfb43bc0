"""Programs compare reason codes, never the texts beside them."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator

from gpumem_client.wire.reason_codes import ReasonCode
from tests.support.packages import PACKAGES
from tests.support.paths import REPOSITORY

TEXTS = frozenset({"reason", "detail", "why"})
"""The names of texts for people in results, documents and errors."""
TEXTS_OF_LIBRARIES = ("detail == 'Not Found'",)
"""Starlette's error for an unknown path has no code that distinguishes it from other errors 404."""
_TEXT_METHODS = frozenset({"startswith", "find", "index", "count", "partition", "rpartition", "split"})


def test_no_module_compares_a_text_for_people() -> None:
    offenders = []
    for path in sorted(path for package in PACKAGES for path in package.root.rglob("*.py")):
        for line, code in comparisons(path.read_text()):
            if code not in TEXTS_OF_LIBRARIES:
                offenders.append(f"{path.relative_to(REPOSITORY)}:{line}: {code}")
    assert offenders == []


def test_the_documentation_has_exactly_these_codes() -> None:
    section = (REPOSITORY / "docs" / "actions.md").read_text().partition("## Reason codes")[2].partition("\n## ")[0]
    first_column = "".join(line.split("|")[1] for line in section.splitlines() if line.startswith("| `"))
    assert set(re.findall(r"`([a-z0-9_]+)`", first_column)) == {"reason_code", *(code.value for code in ReasonCode)}


def comparisons(source: str) -> Iterator[tuple[int, str]]:
    """Yield line and source of each comparison of a text for people with a literal that is not empty."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Compare):
            sides = [node.left, *node.comparators]
            literals = [side.value for side in sides if isinstance(side, ast.Constant) and isinstance(side.value, str)]
            found = any(literals) and any(_is_text(side) for side in sides)
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
            found = node.func.attr in _TEXT_METHODS and bool(node.args) and _is_text(node.func.value)
        else:
            continue
        if found:
            yield node.lineno, ast.unparse(node)


def _is_text(node: ast.expr) -> bool:
    """Return whether this is a text for people: `x.reason`, `x["reason"]`, `x.get("reason")`, `reason`, `str(…)`."""
    if isinstance(node, ast.Attribute):
        return node.attr in TEXTS
    if isinstance(node, ast.Name):
        return node.id in TEXTS
    if isinstance(node, ast.Subscript):
        return isinstance(node.slice, ast.Constant) and node.slice.value in TEXTS
    if isinstance(node, ast.Call) and node.args:
        first = node.args[0]
        if isinstance(node.func, ast.Attribute) and node.func.attr == "get":
            return isinstance(first, ast.Constant) and first.value in TEXTS
        return isinstance(node.func, ast.Name) and node.func.id == "str" and _is_text(first)
    return False
