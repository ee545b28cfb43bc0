"""The functions and folders that docs/architecture.md names exist, and imports go in the direction that it shows."""

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


IMPORTS = PAGE.partition("Imports go down.")[2].partition("```\n")[2].partition("```")[0]
LINES = {name: number for number, line in enumerate(IMPORTS.splitlines()) for name in line.split(", ")}
"""The line of each package and module of the top level: a lower one has a greater number."""
EXPORTER = ("server", "collectors", "events", "actions", "nvml", "host", "core")
GUEST = ("client", "training")


def forbidden_imports(path: str, source: str) -> list[str]:
    """Return the imports of a module that go up or to the side; `path` is relative to the package."""
    here = path.removesuffix(".py").split("/")
    names = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            names += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            base = ["gpumem_exporter", *here][: -node.level] if node.level else []
            names += [".".join([*base, *([node.module] if node.module else []), each.name]) for each in node.names]
        elif isinstance(node, ast.Call) and ast.unparse(node.func).endswith(("import_module", "__import__")):
            names += [
                each.value for each in node.args if isinstance(each, ast.Constant) and isinstance(each.value, str)
            ]
    targets = {name.split(".")[1] for name in names if name.startswith("gpumem_exporter.")} & LINES.keys()
    return [f"{path}: {target}" for target in sorted(targets) if not _may_import(here[0], target)]


def _may_import(package: str, target: str) -> bool:
    if package in EXPORTER and target in GUEST:
        return False
    return target == package or LINES[target] > LINES[package]


def test_imports_go_down() -> None:
    modules = {path.relative_to(PACKAGE).as_posix(): path.read_text() for path in PACKAGE.rglob("*.py")}
    assert {path.split("/")[0].removesuffix(".py") for path in modules} - LINES.keys() == {"__init__", "__main__"}
    offenders = [
        offender
        for path, source in modules.items()
        if path not in ("__init__.py", "__main__.py")
        for offender in forbidden_imports(path, source)
    ]
    assert offenders == []


@pytest.mark.parametrize(
    ("path", "source", "target"),
    [
        ("core/store.py", "import gpumem_exporter.server.app", "server"),
        ("actions/model.py", "from gpumem_exporter.cli import main", "cli"),
        ("actions/model.py", "from gpumem_exporter import cli, core", "cli"),
        ("core/store.py", "def late():\n    from gpumem_exporter.server import app", "server"),
        ("core/store.py", "if TYPE_CHECKING:\n    from gpumem_exporter.server.app import create_app", "server"),
        ("core/store.py", "from ..server import app", "server"),
        ("core/store.py", "from .. import server", "server"),
        ("core/store.py", "importlib.import_module('gpumem_exporter.server.app')", "server"),
        ("client/api.py", "from gpumem_exporter.core import ledger", "core"),
        ("server/app.py", "from gpumem_exporter.client import start", "client"),
        ("wire/http.py", "from gpumem_exporter.procfs import pid_namespace", "procfs"),
    ],
)
def test_an_import_that_goes_up_is_found(path: str, source: str, target: str) -> None:
    assert forbidden_imports(path, source) == [f"{path}: {target}"]


_DEFINITIONS = (ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
