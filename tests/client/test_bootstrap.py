"""The bootstrap in the oldest and newest Pythons, also in Pythons that the client does not support."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from gpumem_client.run import injected_environment
from tests.support.paths import REPOSITORY
from tests.support.waiting import patient

BOOTSTRAP = REPOSITORY / "client" / "gpumem_client" / "bootstrap"
VERSIONS = ("2.7", "3.6", "3.7", "3.8", "3.13", "3.14")
FIRST_WITH_A_MESSAGE = "3.6"
FIRST_SUPPORTED = "3.8"

TORCH = """
queue = []
def _lazy_call(callback):
    queue.append((callback,))
def is_initialized():
    return False
def init():
    for callback, in queue:
        callback()
"""
"""What the bootstrap uses of torch.cuda, for Pythons without a torch."""

PROGRAM = """
import sys
import torch.cuda
torch.cuda.init()
client = sys.modules.get("gpumem_client")
sys.stdout.write("%s %s" % (sys.chained, client is not None and client.__file__))
"""


def number(version: str) -> tuple[int, ...]:
    return tuple(map(int, version.split(".")))


def interpreter(version: str) -> str:
    """Return a Python of this version on this machine, or skip the test."""
    installed = Path(os.environ.get("PYENV_ROOT", Path.home() / ".pyenv"), "versions")
    for path in (shutil.which(f"python{version}"), *installed.glob(f"{version}.*/bin/python")):
        works = path and subprocess.run([path, "-c", ""], capture_output=True, check=False).returncode == 0
        if works:
            return str(path)
    pytest.skip(f"Python {version} is not installed")


def run(
    version: str, tmp_path: Path, program: str, *options: str, bootstrap: bool = True, path: str = "own", **environ: str
) -> subprocess.CompletedProcess[str]:
    """Run a program in the folder of a torch and of a sitecustomize, with this rest of PYTHONPATH."""
    own = tmp_path / "own"
    if not own.exists():
        (own / "torch").mkdir(parents=True)
        (own / "torch" / "__init__.py").write_text("__version__ = '0'")
        (own / "torch" / "cuda.py").write_text(TORCH)
        (own / "sitecustomize.py").write_text("import sys\nsys.chained = True")
    environ = {"PYTHONPATH": path, "PYTHONDONTWRITEBYTECODE": "1", **environ}
    return subprocess.run(
        [interpreter(version), *options, "-c", program],
        env=injected_environment(environ, str(BOOTSTRAP)) if bootstrap else environ,
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
        timeout=patient(30),
    )


@pytest.mark.parametrize("version", VERSIONS)
def test_a_program_without_torch_runs_as_without_the_client(version: str, tmp_path: Path) -> None:
    program = "import sys; sys.stdout.write(str((sorted(sys.modules), sys.chained)))"
    plain = run(version, tmp_path, program, "-W", "error", bootstrap=False)
    done = run(version, tmp_path, program, "-W", "error")
    assert (done.returncode, done.stdout, done.stderr) == (0, plain.stdout, "")


@pytest.mark.parametrize("version", VERSIONS)
def test_the_client_starts_with_cuda_or_tells_that_python_is_too_old(version: str, tmp_path: Path) -> None:
    done = run(version, tmp_path, PROGRAM)
    assert done.returncode == 0, done.stderr
    if number(version) >= number(FIRST_SUPPORTED):
        assert done.stdout == f"True {BOOTSTRAP.parent / '__init__.py'}"
        assert done.stderr == ""
    else:
        assert done.stdout == "True False"
        told = number(version) >= number(FIRST_WITH_A_MESSAGE)
        lines = done.stderr.splitlines()
        assert [FIRST_SUPPORTED in line and version in line for line in lines] == [True] * told


@pytest.mark.parametrize("version", [version for version in VERSIONS if number(version) >= number(FIRST_SUPPORTED)])
def test_every_module_of_the_client_imports_in_every_supported_python(version: str) -> None:
    package = BOOTSTRAP.parent
    modules = [path for path in package.rglob("*.py") if path.parent != BOOTSTRAP]
    names = [".".join(path.relative_to(package.parent).with_suffix("").parts) for path in modules]
    imports = "".join(f"import {name}\n".replace(".__init__", "") for name in names)
    command = [interpreter(version), "-W", "error", "-B", "-c", imports]
    done = subprocess.run(command, env={"PYTHONPATH": str(package.parent)}, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")


NEWEST = f"{sys.version_info[0]}.{sys.version_info[1]}"
SHOWN = """
import sys
others = lambda names: [name for name in names if "bootstrap" not in name]
print(others(sys.path), sys.flags, [name for name in sys.modules if "gpumem" in name])
print(others(sys.modules[name].__file__ for name in ("sitecustomize", "helper") if name in sys.modules))
"""


@pytest.mark.parametrize("options", [(), ("-I",), ("-S",), ("-O",)])
@pytest.mark.parametrize(
    ("text", "path"),
    [
        ("import helper, queue\nprint('once')", "own"),
        ("raise RuntimeError('of the user')", "own"),
        ("import no_such_module_anywhere", "own"),
        ("not python", ":own:further:"),
        ("", ""),
    ],
)
def test_sitecustomize_sys_path_and_options_work_as_without_the_client(
    tmp_path: Path, text: str, path: str, options: tuple[str, ...]
) -> None:
    own = tmp_path / "own"
    own.mkdir()
    (own / "helper.py").touch()
    (own / "sitecustomize.py").write_text(text)
    ended = [run(NEWEST, tmp_path, SHOWN, *options, bootstrap=with_it, path=path) for with_it in (False, True)]
    plain, injected = [(each.returncode, each.stdout, each.stderr) for each in ended]
    assert injected == plain
    assert options or not path or "sitecustomize" in plain[1] + plain[2]


@pytest.mark.parametrize("disabled", [True, False])
def test_a_disabled_or_broken_client_leaves_no_trace(tmp_path: Path, disabled: bool) -> None:
    run(NEWEST, tmp_path, "")
    if not disabled:  # another package of the same name, which cannot be imported
        (tmp_path / "own" / "gpumem_client.py").write_text("raise RuntimeError('broken installation')")
    done = run(NEWEST, tmp_path, PROGRAM, GPUMEM_DISABLED=str(disabled))
    assert (done.returncode, done.stdout, done.stderr) == (0, "True False", "")
