"""The three packages of the repository, and the imports between their modules."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from tests.support.paths import REPOSITORY


@dataclass(frozen=True)
class Package:
    """One distribution."""

    name: str
    root: Path
    """The folder of the package."""

    def modules(self) -> dict[str, Path]:
        """Return the files by dotted name."""
        return {
            ".".join((self.name, *path.relative_to(self.root).with_suffix("").parts)).removesuffix(".__init__"): path
            for path in self.root.rglob("*.py")
        }

    @cache  # noqa: B019 - the three packages stay
    def imports(self) -> dict[str, frozenset[str]]:
        """Return the dotted names that each module imports; without bootstrap/, whose folder is no package of a job."""
        return {
            name: frozenset(imported_names(name, path.read_text(), is_package=path.name == "__init__.py"))
            for name, path in self.modules().items()
            if "bootstrap" not in path.parts
        }


PACKAGES = (
    Package("gpumem_exporter", REPOSITORY / "gpumem_exporter"),
    Package("gpumem_client", REPOSITORY / "client" / "gpumem_client"),
    Package("gpumem_toolkit", REPOSITORY / "toolkit" / "gpumem_toolkit"),
)


def imported_names(module: str, source: str, *, is_package: bool = False) -> Iterator[str]:
    """Yield the dotted names that a module imports, also inside of functions, for types only and by `import_module`."""
    package = module.split(".") if is_package else module.split(".")[:-1]
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else []
            for alias in node.names:
                yield ".".join([*base, *([node.module] if node.module else []), alias.name])
        elif isinstance(node, ast.Call) and ast.unparse(node.func).endswith(("import_module", "__import__")):
            yield from (
                each.value for each in node.args if isinstance(each, ast.Constant) and isinstance(each.value, str)
            )
