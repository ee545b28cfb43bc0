"""What the client promises about its code: what it imports and loads, and where its hooks and calls of torch are."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.emulation.node import EmulatedNode
from tests.support.paths import REPOSITORY
from tests.support.processes.running_command import run_python
from tests.support.servers.recording_exporter import RecordingExporter
from tests.support.waiting import patient, wait_for

CLIENT = REPOSITORY / "client" / "gpumem_client"
LINES_MAX, MODULES_MAX = 7_800, 54
"""Loaded in a training process: lines with blanks, and modules."""
MODULES_OF_AN_IMPORT_MAX = 5
"""Modules of the package that an import of the client loads."""
PRIVATE_OF_TORCH = re.compile(
    r"(?:torch(?!_access)|cuda|optimizers|serialization|sys\.modules)[\w.\[\]\"']*"
    r"(?:\._[a-zA-Z]|, \"_[a-zA-Z]| import (?:\w+, )*_[a-zA-Z])"
)
"""A private attribute, also by `getattr` and `hasattr`, or a private name that is imported."""
OTHER_HOOKS = {"bootstrap", "profile", "saving", "torch_access"}
"""Modules and folders outside of `hooks` that hook into torch or the interpreter."""
FORBIDDEN = (
    *("anyio", "fastapi", "httpx", "prometheus_client", "pydantic", "pynvml", "rich", "starlette", "uvicorn"),
    *("click", "httptools", "textual", "uvloop", "yaml", "torch", "numpy"),
)
PUBLIC_NAMES = (
    "clear_cache log_summary memory_context memory_summary phase reset_peak set_memory_fraction snapshot"
    " start step stop"
)
REFUSING_FINDER = f"""
import sys
class Refuse:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in {FORBIDDEN!r}:
            raise ImportError("the guest imports " + name)
sys.meta_path.insert(0, Refuse())
"""
TRAINING = """
import sys
import torch
import gpumem_client
gpumem_client.start()
held = torch.zeros(1 << 20, device="cuda")
sys.stdin.readline()
for name in sorted(sys.modules):
    if name.partition(".")[0] == "gpumem_client":
        with open(sys.modules[name].__file__) as file:
            print(name, sum(1 for _ in file))
"""


def sources() -> Iterator[tuple[str, str]]:
    for path in sorted(CLIENT.rglob("*.py")):
        yield str(path.relative_to(CLIENT)), path.read_text()


def test_private_names_of_torch_are_used_in_one_module() -> None:
    """`hooks/cuda_start.py` is the exception: it is also loaded by its path, without the other modules."""
    used = {name: uses for name, text in sources() if (uses := PRIVATE_OF_TORCH.findall(_without_comments(text)))}
    assert used.keys() == {"torch_access.py", "hooks/cuda_start.py"}, used


def _without_comments(text: str) -> str:
    return re.sub(r'"""[\s\S]*?"""|#.*', "", text)


def test_only_one_module_registers_for_forks_and_for_the_exit() -> None:
    registering = {name for name, text in sources() if re.search(r"os\.register_at_fork\(|atexit\.register\(", text)}
    assert registering == {"hooks/process_life.py"}


def test_the_documentation_lists_every_hook() -> None:
    modules = {path.stem for path in (CLIENT / "hooks").glob("*.py")} - {"__init__"} | OTHER_HOOKS
    section = (REPOSITORY / "docs" / "reporting.md").read_text().partition("\n## Hooks\n")[2].partition("\n## ")[0]
    assert set(re.findall(r"^\| `(\w+)` \|", section, flags=re.MULTILINE)) == modules


def test_every_module_of_the_client_imports_without_other_packages() -> None:
    names = ["gpumem_client/" + name for name, _ in sources() if not name.startswith("bootstrap/")]
    imports = "".join(f"import {name[:-3].replace('/', '.').removesuffix('.__init__')}\n" for name in names)
    done = run_python(f"{REFUSING_FINDER}\n{imports}")
    assert done.returncode == 0, done.stderr


def test_an_import_of_the_client_loads_little() -> None:
    loaded = run_python("import sys, gpumem_client; print(*sys.modules)").stdout.split()
    assert loaded
    assert len([name for name in loaded if name.startswith("gpumem_client")]) <= MODULES_OF_AN_IMPORT_MAX, loaded
    too_much = {"asyncio", "ctypes", "dataclasses", "email", "http", "json", "logging", "socket", "ssl", "threading"}
    assert not too_much & set(loaded)


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


@pytest.mark.parametrize(
    ("old", "new"), [("client", "gpumem_client"), ("client.api", "gpumem_toolkit"), ("training", "gpumem_toolkit")]
)
def test_a_module_of_version_0_2_says_where_it_went(old: str, new: str) -> None:
    done = run_python(f"import gpumem_exporter.{old}")
    assert done.returncode == 1
    last = done.stderr.splitlines()[-1]
    assert last.startswith("ImportError")
    assert new in last


@pytest.mark.tools
def test_a_training_process_loads_no_code_that_no_command_has_asked_for(node: EmulatedNode, tmp_path: Path) -> None:
    with RecordingExporter(tmp_path / "exporter.sock") as exporter:
        environment = {**node.environment(), "GPUMEM_EXPORTER_URL": exporter.url}
        training = subprocess.Popen(
            [sys.executable, "-c", TRAINING],
            env={**environment, "PYTHONPATH": str(CLIENT.parent)},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        with training:
            try:
                wait_for(lambda: len(exporter.reports) > 1 and exporter.reports[1]["devices"], "a report of a device")
                output, _ = training.communicate("\n", timeout=patient(60))
            finally:
                training.kill()
    lines = {name: int(number) for name, number in map(str.split, output.splitlines())}
    print(*sorted(lines.items(), key=lambda each: -each[1]), sep="\n")
    assert "gpumem_client.reporter.report_loop" in lines
    folders = {name.split(".")[1] for name in lines if "." in name}
    assert not folders & {"objects", "profile"}
    assert sum(lines.values()) <= LINES_MAX
    assert len(lines) <= MODULES_MAX
