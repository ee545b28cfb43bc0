"""What the client promises about its code: where private torch calls, hooks and process-wide registrations are."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import gpumem_client
from tests.support.paths import REPOSITORY
from tests.support.running_command import run_python

CLIENT = Path(gpumem_client.__file__).parent
TORCH = re.compile(r"torch(?!_access)|cuda|optimizers|serialization|sys\.modules")
PRIVATE_NAME = re.compile(r"_[a-zA-Z]\w*")
OTHER_HOOKS = {"bootstrap", "profile", "saving", "torch_access"}
"""Modules and folders outside of `hooks` that hook into torch or the interpreter."""
MODULES_MAX = 5
"""Modules of the package that an import of the client loads."""


def sources() -> Iterator[tuple[str, ast.AST]]:
    for path in sorted(CLIENT.rglob("*.py")):
        yield str(path.relative_to(CLIENT)), ast.parse(path.read_text())


def private_names_of_torch(tree: ast.AST) -> Iterator[str]:
    """Yield private attributes of torch, also by `getattr` and `hasattr`, and private names imported from it."""
    for node in ast.walk(tree):
        owner, name = "", ""
        if isinstance(node, ast.Attribute):
            owner, name = ast.unparse(node.value), node.attr
        elif isinstance(node, ast.Call) and ast.unparse(node.func) in ("getattr", "hasattr"):
            owner, name = ast.unparse(node.args[0]), str(getattr(node.args[1], "value", ""))
        elif isinstance(node, ast.ImportFrom) and node.level == 0:
            owner, name = str(node.module), next((each.name for each in node.names if each.name[0] == "_"), "")
        if PRIVATE_NAME.fullmatch(name) and TORCH.search(owner):
            yield f"{owner}.{name}"


def test_private_names_of_torch_are_used_in_one_module() -> None:
    """`hooks/cuda_start.py` is the exception: it is also loaded by its path, without the other modules."""
    used = {name: list(private_names_of_torch(tree)) for name, tree in sources()}
    assert {name for name, uses in used.items() if uses} == {"torch_access.py", "hooks/cuda_start.py"}, used


def test_only_one_module_registers_for_forks_and_for_the_exit() -> None:
    registering = {
        name
        for name, tree in sources()
        for node in ast.walk(tree)
        if isinstance(node, ast.Attribute) and ast.unparse(node) in ("os.register_at_fork", "atexit.register")
    }
    assert registering == {"hooks/process_life.py"}


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
