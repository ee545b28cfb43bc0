"""Waiting for CUDA does nothing to the program's imports; with a torch of three lines, in a fresh interpreter."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from gpumem_exporter.client.hooks import cuda_start
from tests.support.waiting import patient

TORCH = {
    "__init__.py": "",
    "cuda.py": "waiting = []\n_lazy_call = waiting.append\ndef init():\n    [call() for call in waiting]\n",
}
PROGRAM = """
import json, runpy, sys
sys.path.insert(0, {folder!r})
when_cuda_starts = runpy.run_path({module!r})["when_cuda_starts"]
began = []
when_cuda_starts(lambda: began.append("first"))
when_cuda_starts(lambda: began.append("second"))
{rest}
print(json.dumps(result))
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "torch").mkdir()
    for name, text in TORCH.items():
        (tmp_path / "torch" / name).write_text(text)
    return tmp_path


def run(folder: Path, rest: str) -> Any:
    program = PROGRAM.format(folder=str(folder), module=cuda_start.__file__, rest=rest)
    ended = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=False, timeout=patient(60)
    )
    assert ended.stderr == ""
    return json.loads(ended.stdout)


def test_each_callback_runs_once_when_cuda_starts_and_not_before(folder: Path) -> None:
    rest = "import torch.cuda\nbefore = list(began)\ntorch.cuda.init()\nresult = [before, sorted(began)]"
    assert run(folder, rest) == [[], ["first", "second"]]


def test_the_list_of_finders_stays_as_it_is_since_other_threads_may_be_on_their_way_along_it(folder: Path) -> None:
    rest = "before = list(sys.meta_path)\nimport torch.cuda\nresult = [before == sys.meta_path, len(before)]"
    same, finders = run(folder, rest)
    assert same
    assert finders > 2


def test_a_finder_without_find_spec_is_passed_over(folder: Path) -> None:
    rest = """
import warnings
warnings.simplefilter("ignore")  # Python before 3.12 asks such a finder in another way, and warns of it

class Old:
    def find_module(self, name, path=None):
        return None

sys.meta_path.insert(2, Old())
import torch.cuda
torch.cuda.init()
result = sorted(began)
"""
    assert run(folder, rest) == ["first", "second"]


LOADERS = """
import importlib.machinery

class Loader:
    def create_module(self, spec):
        return None
    def exec_module(self, module):
        module.waiting = []
        module._lazy_call = module.waiting.append

class Unchangeable(Loader):
    __slots__ = ()
    def __setattr__(self, name, value):
        raise AttributeError(name)

class Wrapping:
    # as wrapt's, with what others hook imports: what is set on it is set on what it wraps
    def __init__(self, wrapped):
        self.__dict__.update(wrapped=wrapped, exec_module=lambda module: self.wrapped.exec_module(module))
    def __getattr__(self, name):
        return getattr(self.wrapped, name)
    def __setattr__(self, name, value):
        setattr(self.wrapped, name, value)
    def __delattr__(self, name):
        delattr(self.wrapped, name)

class Finder:
    def find_spec(self, name, path=None, target=None):
        return importlib.machinery.ModuleSpec(name, loader) if name == "torch.cuda" else None

loader = {loader}
sys.meta_path.insert(0, Finder())
when_cuda_starts(lambda: began.append("third"))
import torch.cuda
[call() for call in torch.cuda.waiting]
result = sorted(began)
"""


@pytest.mark.parametrize(("loader", "began"), [("Unchangeable()", []), ("Wrapping(Loader())", ["third"])])
def test_torch_is_imported_whatever_loader_another_import_hook_has_brought(
    folder: Path, loader: str, began: list[str]
) -> None:
    assert run(folder, LOADERS.format(loader=loader)) == began
