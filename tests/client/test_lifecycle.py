"""Calls at exit and in forked children, in a fresh interpreter."""

from __future__ import annotations

import shutil
from pathlib import Path

from tests.support.paths import REPOSITORY
from tests.support.running_command import run_python
from tests.support.waiting import patient

PROGRAM = """
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
    ended = run_python(PROGRAM)
    assert (ended.stdout, ended.stderr) == ("fork\nexit\n", "")


FORK_DURING_A_CHANGE = """
import os, signal, sys, threading, types
from gpumem_client.hooks.process_life import after_fork_in_child
from gpumem_client.hooks.graph_captures import no_capture_starts, process_captures

parent, changing, cleared, forked = os.getpid(), threading.Event(), threading.Event(), threading.Event()

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

def clear():
    with no_capture_starts():
        cleared.set()
        forked.wait()

def in_child():  # as the reporter does, whose call was registered before the hook was installed
    signal.alarm(SECONDS)
    process_captures().watch()()
    with no_capture_starts() as quiet:
        assert quiet

sys.modules["torch.cuda.graphs"] = types.SimpleNamespace(CUDAGraph=CUDAGraph)
after_fork_in_child(in_child)
for work in (process_captures().watch, clear):
    threading.Thread(target=work).start()
changing.wait(), cleared.wait()
child = os.fork()
if child == 0:
    os._exit(0)
forked.set()
print(os.WTERMSIG(os.waitpid(child, 0)[1]))
"""


def test_a_child_forked_while_other_threads_hold_the_locks_of_the_client_does_not_wait_for_them() -> None:
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
        import gpumem_client.profile.encoded

sys.meta_path.insert(0, Waits())
thread = threading.Thread(target=load)
thread.start()
started.wait()
threading.Timer(0.1, go_on.set).start()
child = os.fork()
if child == 0:
    signal.alarm(SECONDS)
    go_on.set()
    import gpumem_client.profile.encoded
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
