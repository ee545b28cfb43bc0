"""The wait for CUDA and imports, with a torch of three lines, in a fresh interpreter."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from gpumem_client.hooks import cuda_start
from tests.support.running_command import run_python

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
    ended = run_python(program)
    assert ended.stderr == ""
    return json.loads(ended.stdout)


def test_each_callback_runs_once_when_cuda_starts_and_leaves_no_finder(folder: Path) -> None:
    rest = """
finders = lambda: [type(finder).__name__ for finder in sys.meta_path].count('_TorchCudaFinder')
before = [finders(), list(began)]
import torch.cuda
imported = [finders(), list(began)]
torch.cuda.init()
result = [before, imported, sorted(began)]
"""
    assert run(folder, rest) == [[2, []], [0, []], ["first", "second"]]


def test_ending_the_wait_restores_the_finders(folder: Path) -> None:
    rest = """
before = list(sys.meta_path)
stop = when_cuda_starts(lambda: began.append("third"))
between = len(sys.meta_path)
stop()
stop()
same = before == sys.meta_path
import torch.cuda
torch.cuda.init()
result = [same, between - len(before), sorted(began)]
"""
    assert run(folder, rest) == [True, 1, ["first", "second"]]


def test_ending_the_wait_restores_torch_s_queue(folder: Path) -> None:
    rest = """
import threading, torch.cuda
cuda = torch.cuda
cuda._queued_calls, cuda._initialization_lock = [], threading.Lock()
cuda._lazy_call = lambda call: cuda._queued_calls.append((call, []))
of_the_program = lambda: began.append("the program's")
cuda._lazy_call(of_the_program)
stop = when_cuda_starts(lambda: began.append("third"))
queued = len(cuda._queued_calls)
stop()
left = [call is of_the_program for call, _ in cuda._queued_calls]
stop = when_cuda_starts(lambda: began.append("fourth"))
with cuda._initialization_lock:  # CUDA is being initialized
    stop()
[call() for call, _ in cuda._queued_calls]
result = [queued, left, began]
"""
    assert run(folder, rest) == [2, [True], ["the program's"]]


def test_a_callback_may_wait_for_cuda_again_while_torch_has_the_lock_of_its_queue(folder: Path) -> None:
    """`run` starts the reporter in a callback. In older releases the lock is not reentrant, also in that thread."""
    rest = """
import threading, torch.cuda
cuda = torch.cuda
cuda._initialization_lock, cuda._tls = threading.Lock(), threading.local()
def queue(call):
    assert cuda._initialization_lock.acquire(timeout=1)
    cuda.waiting.append(call)
    cuda._initialization_lock.release()
cuda._lazy_call = queue
when_cuda_starts(lambda: when_cuda_starts(lambda: began.append("third")))
with cuda._initialization_lock:
    cuda._tls.is_initializing = True
    cuda.init()
result = began
"""
    assert run(folder, rest) == ["first", "second", "third"]
