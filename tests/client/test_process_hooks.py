"""Hooks into a fresh interpreter: at its exit and in forked children, at imports, and at the start of CUDA."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from gpumem_client.hooks import cuda_start
from tests.support.paths import REPOSITORY
from tests.support.processes.running_command import run_python
from tests.support.waiting import patient

AT_THE_END = """
import os
from gpumem_client.hooks.process_life import after_fork_in_child, at_exit

def say(text):
    return lambda: os.write(1, text.encode() + b"\\n")

removers = [at_exit(say("exit removed")), after_fork_in_child(say("fork removed"))]
at_exit(say("exit")), after_fork_in_child(say("fork"))
for remove in removers * 2:
    remove()
child = os.fork()
if child == 0:
    os._exit(0)
os.waitpid(child, 0)
"""


def test_calls_at_exit_and_after_a_fork_can_be_removed() -> None:
    ended = run_python(AT_THE_END)
    assert (ended.stdout, ended.stderr) == ("fork\nexit\n", "")


FORK_DURING_A_CHANGE = """
import os, signal, sys, threading, types
from gpumem_client.hooks.process_life import after_fork_in_child
from gpumem_client.hooks.graph_captures import process_captures

parent, changing, forked = os.getpid(), threading.Event(), threading.Event()

class ChangesSlowly(type):
    def __setattr__(cls, name, value):
        changing.set()
        if os.getpid() == parent:
            forked.wait()
        super().__setattr__(name, value)

class CUDAGraph(metaclass=ChangesSlowly):
    def capture_begin(self):
        pass
    def capture_end(self):
        pass

def in_child():  # as the reporter does, whose call was registered before the hook was installed
    signal.alarm(SECONDS)
    process_captures().watch()()

sys.modules["torch.cuda.graphs"] = types.SimpleNamespace(CUDAGraph=CUDAGraph)
after_fork_in_child(in_child)
threading.Thread(target=process_captures().watch).start()
changing.wait()
child = os.fork()
if child == 0:
    os._exit(0)
forked.set()
print(os.WTERMSIG(os.waitpid(child, 0)[1]))
"""


def test_a_child_forked_while_another_thread_installs_a_hook_does_not_wait_for_it() -> None:
    ended = run_python(FORK_DURING_A_CHANGE.replace("SECONDS", str(round(patient(10)))))
    assert (ended.stdout, ended.stderr) == ("0\n", "")


FORK_DURING_A_LOAD = """
import os, signal, sys, threading
from gpumem_client.hooks.process_life import loading

started, go_on = threading.Event(), threading.Event()

class Waits:
    def find_spec(self, name, path=None, target=None):
        if name == "gpumem_client.profile.profile_types":
            started.set()
            go_on.wait()

def load():
    with loading():
        import gpumem_client.profile.aggregate

sys.meta_path.insert(0, Waits())
thread = threading.Thread(target=load)
thread.start()
started.wait()
threading.Timer(0.1, go_on.set).start()
child = os.fork()
if child == 0:
    signal.alarm(SECONDS)
    go_on.set()
    import gpumem_client.profile.aggregate
    with loading():
        import gpumem_client.profile.gradients
    os._exit(0)
print(os.WTERMSIG(os.waitpid(child, 0)[1]))
thread.join()
with loading():
    print(os.waitstatus_to_exitcode(os.system("exit 0")))
"""


def test_a_child_can_import_what_another_thread_was_loading_when_it_was_forked() -> None:
    ended = run_python(FORK_DURING_A_LOAD.replace("SECONDS", str(round(patient(10)))))
    assert (ended.stdout, ended.stderr) == ("0\n0\n", "")


REPLACED_FILES = """
import os
from pathlib import Path
from gpumem_client.hooks import process_life

with process_life.loading():
    pass
file = Path(process_life.__file__)
written = file.with_name("new")
written.write_bytes(file.read_bytes())
written.replace(file)
try:
    with process_life.loading():
        print("loaded")
except ImportError as error:
    print("start the process again" in str(error))
"""


def test_nothing_is_loaded_from_files_of_another_installation(tmp_path: Path) -> None:
    shutil.copytree(REPOSITORY / "client" / "gpumem_client", tmp_path / "gpumem_client")
    ended = run_python(f"import sys; sys.path.insert(0, {str(tmp_path)!r})\n{REPLACED_FILES}")
    assert (ended.stdout, ended.stderr) == ("True\n", "")


# --- The start of CUDA, with a torch of three lines

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
finders = lambda: [type(finder).__name__ for finder in sys.meta_path].count('_Wait')
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
