"""The command and the job of a process in its reports, from real interpreters and from what Ray says."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import types
from pathlib import Path
from typing import Any

import pytest

from gpumem_client.reporter import identity
from gpumem_client.reporter.reporter_settings import ReporterSettings
from gpumem_client.wire.protocol import ProcessIdentity
from tests.support.paths import REPOSITORY
from tests.support.waiting import patient

WORKER = """
import json, multiprocessing, os, sys

def describe():
    from gpumem_client.reporter.identity import current_process
    from gpumem_client.reporter.reporter_settings import ReporterSettings
    from gpumem_exporter.node.linux import LinuxHost

    own = current_process(ReporterSettings.resolve(environ={})).command
    print(json.dumps([own, LinuxHost().facts(os.getpid()).command]), flush=True)

def run():
    worker = multiprocessing.get_context(sys.argv[1]).Process(target=describe)
    worker.start()
    worker.join()

if __name__ == "__main__":
    run()
"""
PACKAGE = "import workers; workers.run()"
"""multiprocessing does not import the __main__ of a package in its workers, so this has no guard."""


@pytest.mark.parametrize(
    ("method", "script", "reported"),
    [
        ("spawn", ["{folder}/workers.py"], "workers.py"),
        ("forkserver", ["-m", "workers"], "-m workers"),
        ("spawn", ["-m", "package"], "package"),
    ],
)
def test_a_worker_of_multiprocessing_has_the_command_of_its_script(
    tmp_path: Path, method: str, script: list[str], reported: str
) -> None:
    (tmp_path / "workers.py").write_text(WORKER)
    (tmp_path / "package").mkdir()
    (tmp_path / "package" / "__main__.py").write_text(PACKAGE)
    script = [word.format(folder=tmp_path) for word in script]
    environ = {**os.environ, "PYTHONPATH": f"{REPOSITORY}:{tmp_path}"}
    command = [sys.executable, "-u", *script, method, "--token=secret"]
    run = subprocess.run(command, env=environ, capture_output=True, check=True, timeout=patient(60))
    program = Path(sys.executable).name
    of_host = " ".join([*script[:-1], Path(script[-1]).name])
    assert json.loads(run.stdout) == [f"{program} {reported}", f"{program} {of_host}"]


class Context:
    def __init__(self, job_id: str, actor_id: str | None, name: str | None) -> None:
        self.get_job_id = lambda: job_id
        self.get_actor_id = lambda: actor_id
        self.get_actor_name = lambda: name


def ray(context: Context | None) -> Any:
    module: Any = types.ModuleType("ray")
    module.is_initialized = lambda: context is not None
    module.get_runtime_context = lambda: context
    return module


@pytest.fixture
def own(monkeypatch: pytest.MonkeyPatch) -> ProcessIdentity:
    monkeypatch.setenv("RAY_JOB_ID", "ffffffff")
    monkeypatch.setattr(identity, "_cmdline", lambda: ["ray::Trainer.step"])
    return identity.current_process(ReporterSettings.resolve(environ={}))


def test_ray_is_not_imported_and_is_asked_only_once_it_is_initialized(
    own: ProcessIdentity, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delitem(sys.modules, "ray", raising=False)
    assert identity.with_ray(own) is None
    assert "ray" not in sys.modules
    monkeypatch.setitem(sys.modules, "ray", types.ModuleType("ray"))
    assert identity.with_ray(own) is None, "another thread imports Ray"
    monkeypatch.setitem(sys.modules, "ray", ray(None))
    assert identity.with_ray(own) is None


@pytest.mark.parametrize(
    ("context", "job_id", "command"),
    [
        (Context("02000000", None, None), "02000000", None),
        (Context("ffffffff", None, None), "", None),
        (Context("02000000", "4dc5ab2f1b0e7a2e1a1f6f6a02000000", ""), "02000000", "ray::Trainer(4dc5ab2f)"),
        (Context("02000000", "4dc5ab2f1b0e7a2e1a1f6f6a02000000", "a\nb"), "02000000", "ray::Trainer(a?b)"),
    ],
    ids=["a driver or a task", "no job", "an actor", "an actor with a name"],
)
def test_ray_says_which_job_and_which_actor_a_process_is(
    own: ProcessIdentity, monkeypatch: pytest.MonkeyPatch, context: Context, job_id: str, command: str | None
) -> None:
    monkeypatch.setitem(sys.modules, "ray", ray(context))
    known = identity.with_ray(own)
    assert known is not None
    assert (known.ray_job_id, known.command) == (job_id, command or own.command)
