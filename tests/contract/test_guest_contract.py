"""What the client promises about its code: where its hooks and process-wide registrations are."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import gpumem_client
from tests.support.paths import REPOSITORY
from tests.support.running_command import run_python

CLIENT = Path(gpumem_client.__file__).parent
OTHER_HOOKS = {"bootstrap", "model_forward", "profile", "storage_tags", "torch_access"}
"""Modules and folders outside of `hooks` that hook into torch or the interpreter."""
MODULES_MAX = 5
"""Modules of the package that an import of the client loads."""


def sources() -> Iterator[tuple[str, ast.AST]]:
    for path in sorted(CLIENT.rglob("*.py")):
        yield str(path.relative_to(CLIENT)), ast.parse(path.read_text())


def test_only_one_module_registers_for_forks_and_for_the_exit() -> None:
    registering = {
        name
        for name, tree in sources()
        for node in ast.walk(tree)
        if isinstance(node, ast.Attribute) and ast.unparse(node) in ("os.register_at_fork", "atexit.register")
    }
    assert registering == {"hooks/lifecycle.py"}


def test_the_documentation_lists_every_hook() -> None:
    modules = {path.stem for path in (CLIENT / "hooks").glob("*.py")} - {"__init__"} | OTHER_HOOKS
    section = (REPOSITORY / "docs" / "reporting.md").read_text().partition("\n## Hooks\n")[2].partition("\n## ")[0]
    assert set(re.findall(r"^\| `(\w+)` \|", section, flags=re.MULTILINE)) == modules


def test_an_import_of_the_client_loads_little() -> None:
    loaded = run_python("import sys, gpumem_client; print(*sys.modules)").stdout.split()
    assert loaded
    assert len([name for name in loaded if name.startswith("gpumem_client")]) <= MODULES_MAX, loaded
    too_much = {"asyncio", "ctypes", "dataclasses", "email", "http", "json", "logging", "socket", "ssl", "threading"}
    assert not too_much & set(loaded)
