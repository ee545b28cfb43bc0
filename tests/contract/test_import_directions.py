"""Imports go in the direction that docs/architecture.md shows: between packages, and between folders of a package."""

from __future__ import annotations

import re
from collections.abc import Iterable
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

from tests.support.packages import PACKAGES, Package
from tests.support.paths import REPOSITORY

PAGE = (REPOSITORY / "docs" / "architecture.md").read_text()
ORDER = PAGE.partition("\nImports go down.")[2].partition("```\n")[2].partition("```")[0].splitlines()
LINES = {
    (line.partition(": ")[0], name): number
    for number, line in enumerate(ORDER)
    for name in line.partition(": ")[2].split(", ")
}
"""The line of each folder and module of the top level: a lower one has a greater number."""
NAMES = {package.name for package in PACKAGES}
SHIMS = {"gpumem_exporter.client", "gpumem_exporter.training"}
ALLOWED = {
    ("gpumem_exporter.demo", "gpumem_client"),
    ("gpumem_exporter.features.profiles", "gpumem_client.profile.profile_types"),
    ("gpumem_exporter.main", "gpumem_client.run"),
    ("gpumem_exporter.cli.commands.plan", "gpumem_toolkit.planning.command"),
}
"""What a folder or module imports beyond the rule: the demo's reporters, the types of profiles, the commands `run` and
`plan`."""


def forbidden_imports(module: str, imported: Iterable[str]) -> list[str]:
    """Return the imports of a module that go up, to the side, or to a package that it must not know."""
    return [
        f"{module}: {target}"
        for target in imported
        if target.partition(".")[0] in NAMES and not _may_import(module, target)
    ]


def _may_import(module: str, target: str) -> bool:
    if any(_is_below(module, folder) and _is_below(target, allowed) for folder, allowed in ALLOWED):
        return True
    here, there = module.split("."), target.split(".")
    if here[0] == there[0]:
        if len(here) == 1 or here[1] == "__main__" or len(there) == 1 or (here[0], there[1]) not in LINES:
            return True  # the package itself, such as its version
        return here[1] == there[1] or LINES[here[0], there[1]] > LINES[here[0], here[1]]
    if here[0] == "gpumem_exporter":
        return _is_below(target, "gpumem_client.wire")
    return (here[0], there[0]) == ("gpumem_toolkit", "gpumem_client")


def _is_below(module: str, folder: str) -> bool:
    return f"{module}.".startswith(f"{folder}.")


@pytest.mark.parametrize("package", PACKAGES, ids=lambda package: package.name)
def test_imports_go_down(package: Package) -> None:
    tops = {name.split(".")[1] for name in package.imports() if "." in name and name not in SHIMS} - {"__main__"}
    assert tops == {name for owner, name in LINES if owner == package.name}
    offenders = [each for name, imported in package.imports().items() for each in forbidden_imports(name, imported)]
    assert offenders == []


@pytest.mark.parametrize("package", PACKAGES, ids=lambda package: package.name)
def test_folders_within_a_folder_have_no_cycle(package: Package) -> None:
    modules = package.modules()
    edges: dict[str, set[str]] = {}
    for name, imported in package.imports().items():
        here = _folder(modules, name)
        for target in imported:
            there = _folder(modules, target if target in modules else target.rpartition(".")[0])
            # A module beside the folders, such as app.py, may import all of them.
            if here != there and min(here.count("."), there.count(".")) > 1:
                edges.setdefault(here, set()).add(there)
    TopologicalSorter(edges).prepare()  # raises CycleError, which names the circle


def test_no_feature_imports_another() -> None:
    root = REPOSITORY / "gpumem_exporter" / "features"
    folders = [f"gpumem_exporter.features.{path.parent.name}" for path in root.glob("*/__init__.py")]
    assert len(folders) > 5
    found = [
        f"{name}: {target}"
        for name, imported in PACKAGES[0].imports().items()
        for target in imported
        for folder in folders
        if _is_below(target, folder) and not _is_below(name, folder) and any(_is_below(name, each) for each in folders)
    ]
    assert found == []


@pytest.mark.parametrize("package", PACKAGES, ids=lambda package: package.name)
def test_files_within_a_folder_have_no_cycle(package: Package) -> None:
    modules = package.modules()
    # Without the packages themselves: their modules import names of theirs, such as the version.
    files = {name for name, path in modules.items() if path.name != "__init__.py"}
    edges: dict[str, set[str]] = {}
    for name, imported in package.imports().items():
        for target in imported:
            module = target if target in files else target.rpartition(".")[0]
            if {name, module} <= files and name != module and _folder(modules, name) == _folder(modules, module):
                edges.setdefault(name, set()).add(module)
    TopologicalSorter(edges).prepare()


def test_each_folder_names_the_modules_that_other_folders_import() -> None:
    modules = {name: path for package in PACKAGES for name, path in package.modules().items()}
    used: dict[str, set[str]] = {}
    for package in PACKAGES:
        for name, imported in package.imports().items():
            for target in imported:
                module = target if target in modules else target.rpartition(".")[0]
                folder, _, last = module.rpartition(".")
                if module in modules and _folder(modules, module) == folder != _folder(modules, name):
                    used.setdefault(folder, set()).add(last)
    for name, path in modules.items():
        if path.name == "__init__.py":
            sentence = path.read_text().partition("Other folders import: ")[2].partition(".")[0]
            assert set(re.findall(r"`(\w+)`", sentence)) == used.get(name, set()), name


def _folder(modules: dict[str, Path], name: str) -> str:
    """Return the package of a module; empty for what is not of this package."""
    if name not in modules:
        return ""
    return name if modules[name].name == "__init__.py" else name.rpartition(".")[0]


PRIVATE_IMPORT = re.compile(r"\bgpumem_\w+(?:\.\w+)*\._[a-z]|from gpumem_[\w.]+ import (?:\([^)]*?|[^\n(]*)\b_[a-z]")


def test_no_private_module_is_imported() -> None:
    folders = [
        *(package.root for package in PACKAGES),
        *(REPOSITORY / name for name in ("tests", "benchmarks", "examples")),
    ]
    paths = [path for folder in folders for path in folder.rglob("*.py")]
    assert [str(path) for path in paths if PRIVATE_IMPORT.search(path.read_text())] == []
