"""The client in the training process imports only the standard library, also indirectly."""

from __future__ import annotations

import re
from itertools import chain

import pytest

from tests.support.packages import PACKAGES, imported_names
from tests.support.paths import REPOSITORY
from tests.support.running_command import run_python

FORBIDDEN = (
    *("anyio", "fastapi", "httpx", "prometheus_client", "pydantic", "pynvml", "rich", "starlette", "uvicorn"),
    *("click", "httptools", "textual", "uvloop", "yaml", "torch", "numpy"),
)
CLIENT = REPOSITORY / "client" / "gpumem_client"
GUEST_MODULES = sorted(
    ".".join(path.relative_to(CLIENT.parent).with_suffix("").parts).removesuffix(".__init__")
    for path in CLIENT.rglob("*.py")
    if "bootstrap" not in path.parts
)

PUBLIC_NAMES = (
    "clear_cache log_summary memory_context memory_summary phase reset_peak set_memory_fraction snapshot"
    " start step stop"
)

PRIVATE_IMPORT = re.compile(r"\bgpumem_\w+(?:\.\w+)*\._|from gpumem_[\w.]+ import (?:\([^)]*?|[^\n(]*)\b_[a-z]")

REFUSING_FINDER = f"""
import sys
class Refuse:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in {FORBIDDEN!r}:
            raise ImportError("the guest imports " + name)
sys.meta_path.insert(0, Refuse())
"""


def test_every_module_of_the_client_imports_without_other_packages() -> None:
    imports = "".join(f"import {name}\n" for name in GUEST_MODULES)
    done = run_python(f"{REFUSING_FINDER}\n{imports}")
    assert done.returncode == 0, done.stderr


def test_private_modules_are_imported_only_in_their_package() -> None:
    imported = {name: names for package in PACKAGES for name, names in package.imports().items()}
    folders = (REPOSITORY / folder for folder in ("tests", "benchmarks", "examples"))
    for path in chain.from_iterable(folder.rglob("*.py") for folder in folders):
        text = path.read_text()
        if PRIVATE_IMPORT.search(text):  # only these are parsed, which takes seconds for all
            imported[f"{path.parent.name}.{path.stem}"] = frozenset(imported_names(path.stem, text))
    offenders = [
        f"{module}: {name}"
        for module, names in imported.items()
        for name in names
        if _is_private_elsewhere(name, module)
    ]
    assert offenders == []


def _is_private_elsewhere(name: str, module: str) -> bool:
    """Return whether `name` has a private part of this project outside of the package of a module."""
    parts = name.split(".")
    private = [index for index, part in enumerate(parts) if part.startswith("_") and not part.startswith("__")]
    package = ".".join(parts[: private[0]]) if private else ""
    return parts[0].startswith("gpumem_") and bool(private) and package not in (module, module.rpartition(".")[0])


@pytest.mark.parametrize(
    ("old", "new"), [("client", "gpumem_client"), ("client.api", "gpumem_toolkit"), ("training", "gpumem_toolkit")]
)
def test_a_module_of_version_0_2_says_where_it_went(old: str, new: str) -> None:
    done = run_python(f"import gpumem_exporter.{old}")
    assert done.returncode == 1
    last = done.stderr.splitlines()[-1]
    assert last.startswith("ImportError")
    assert new in last


def test_starting_a_reporter_neither_imports_torch_nor_starts_a_thread() -> None:
    done = run_python(
        "import sys, threading\n"
        "import gpumem_client as client\n"
        "client.start('w'); client.start('w'); client.step()\n"
        "assert 'torch' not in sys.modules, 'torch'\n"
        "assert threading.active_count() == 1, threading.enumerate()\n"
        "client.stop()\n"
    )
    assert (done.returncode, done.stderr) == (0, "")


def test_public_names_of_the_client_are_imported_on_first_use_and_without_torch() -> None:
    done = run_python(
        f"{REFUSING_FINDER}\nimport gpumem_client as client\n"
        "print(*client.__all__)\n"
        "print(len([name for name in client.__all__ if name in vars(client)]))\n"
        "assert all(callable(getattr(client, name)) for name in client.__all__)"
    )
    assert (done.stdout.splitlines(), done.stderr) == ([PUBLIC_NAMES, "3"], "")
