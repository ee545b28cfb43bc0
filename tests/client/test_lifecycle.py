"""Calls at exit and in forked children, in a fresh interpreter."""

from __future__ import annotations

from tests.support.running_command import run_python

PROGRAM = """
import os
from gpumem_client.hooks.lifecycle import after_fork_in_child, at_exit

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
