"""Real launchers that are killed, and what they leave behind, beside jobs that may outlive their shell."""

from __future__ import annotations

import importlib.util
import shutil
import sys
from pathlib import Path

import pytest

from gpumem_exporter.core.readings import LostLauncher
from gpumem_exporter.node.linux import LinuxHost
from tests.support.builders.builders import Clock
from tests.support.processes.adopter import PROGRAM, Adopter
from tests.support.processes.namespaces import children
from tests.support.waiting import wait_for

JOB = """
import os, subprocess, sys, time
name, *below = sys.argv[1:]
with open(f"{name}.new", "w") as file:
    file.write(str(os.getpid()))
os.replace(f"{name}.new", f"{name}.pid")
if below:  # the title and the name of a child, and of its child
    environment = {**os.environ, "PYTHONHOME": sys.base_prefix}
    subprocess.Popen([below[0], "job.py", *below[1:]], executable=os.environ["PYTHON"], env=environment)
time.sleep(3600)
"""
SPAWNS = """
import multiprocessing, runpy, sys, time
def job(name):
    sys.argv = ["job.py", name]
    runpy.run_path("job.py")
if __name__ == "__main__":
    multiprocessing.get_context("spawn").Process(target=job, args=sys.argv[1:]).start()
    time.sleep(3600)
"""
DAEMON = """
import os, sys
if os.fork() == 0:
    os.setsid()
    if os.fork() == 0:
        os.execv(sys.executable, [sys.executable, "job.py", "daemon"])
os._exit(0)
"""
AS = f"PYTHONHOME={sys.base_prefix} exec -a"
LAUNCHERS = {
    "torchrun": ("exec $PYTHON -m torch.distributed.run --standalone --nproc-per-node 1 job.py rank", ["rank"]),
    "spawn": ("exec $PYTHON spawns.py spawned", ["spawned"]),
    "server": ("exec $PYTHON job.py server VLLM::EngineCore core VLLM::Worker_TP0 worker", ["core", "worker"]),
    "raylet": (
        f"exec bash -c '{AS} raylet $PYTHON job.py raylet ray::train actor'",
        ["actor"],
    ),
}
"""A command that is killed, and the names of what it leaves behind."""
CERTAIN = {"spawned", "core", "worker"}
"""What is known to be left behind also if it is seen later."""
BACKGROUND = {
    "closed": "$PYTHON job.py closed & wait",
    "nohup": "nohup $PYTHON job.py nohup > nohup.out & wait",
    "setsid": "setsid $PYTHON job.py setsid & wait",
    "daemon": "$PYTHON daemon.py; sleep 3600",
    "init": "$PYTHON job.py init &",
    "step": f"exec bash -c \"{AS} slurmstepd $PYTHON {PROGRAM} '$PYTHON job.py step &'\"",
    "launched": "nohup $PYTHON job.py launched VLLM::EngineCore engine & wait",
}
"""Jobs that go on when their shell is killed; of `step`, the shell has ended, and the daemon of the step goes on."""
SERVERS = {
    "celery": "nohup $PYTHON -m celery --app tasks worker --concurrency 1 --without-mingle > celery.out 2>&1 & wait",
    "gunicorn": "nohup $PYTHON -m gunicorn --workers 1 --bind unix:g.sock served:served > gunicorn.out 2>&1 & wait",
}
"""The same for servers with workers."""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for name, text in {
        "job.py": JOB,
        "spawns.py": SPAWNS,
        "daemon.py": DAEMON,
        "tasks.py": "from celery import Celery\napp = Celery('tasks', broker='memory://')\n",
        "served.py": "def served(environ, start): ...\n",
    }.items():
        (tmp_path / name).write_text(text)
    return tmp_path


def lost(host: LinuxHost, adopter: Adopter) -> dict[int, LostLauncher]:
    """Return what each process below the adopter has lost."""
    found = {pid: facts.lost for pid in adopter.pids if (facts := host.facts(pid)) is not None}
    return {pid: each for pid, each in found.items() if each is not None}


def test_what_killed_launchers_leave_behind_is_named_and_no_background_job_is(folder: Path) -> None:
    background = dict(BACKGROUND)
    if shutil.which("tmux"):
        background["tmux"] = "tmux -L jobs -f /dev/null new-session -d '$PYTHON job.py tmux'; sleep 3600"
    servers = {name: command for name, command in SERVERS.items() if importlib.util.find_spec(name)}
    names = {*background, *(name for _, left in LAUNCHERS.values() for name in left), "engine"}
    with Adopter(folder, {"TMUX_TMPDIR": str(folder)}) as adopter:
        launchers = {name: adopter.run(command) for name, (command, _) in LAUNCHERS.items()}
        shells = {name: adopter.run(command) for name, command in (background | servers).items()}

        def pid_of(name: str) -> int:
            file = folder / f"{name}.pid"
            wait_for(file.exists, name)
            return int(file.read_text())

        pids = {name: pid_of(name) for name in names}
        for name in servers:
            wait_for(lambda shell=shells[name]: any(map(children, children(shell))), name)  # type: ignore[misc]
        clock = Clock(1000.0)
        host = LinuxHost(clock=clock)
        assert lost(host, adopter) == {}
        killed = {*launchers.values(), *(pid for name, pid in shells.items() if name != "step")}
        adopter.kill(*killed & set(adopter.pids))
        clock.now += 1.0
        expected = {pids[name]: launchers[launcher] for launcher, (_, left) in LAUNCHERS.items() for name in left}
        found = lost(host, adopter)
        assert {pid: each.pid for pid, each in found.items()} == expected
        assert {(each.reason, each.ended_seconds) for each in found.values()} == {("launcher_ended", 1001.0)}
        assert lost(LinuxHost(clock=clock), adopter).keys() == {pids[name] for name in CERTAIN}
        assert set(pids.values()) <= set(adopter.pids), "the jobs go on"
