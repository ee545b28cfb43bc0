"""A program below `gpumem-exporter run` has the environment, the streams and the signals that it has without it."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

from tests.support.exporter_process import ExporterProcess
from tests.support.injected_scripts import (
    BOOTSTRAP,
    MIB,
    StartScript,
    exporter,
    folder_with,
    run_to_the_end,
    start_script,
    wait_for_allocated,
)

__all__ = ["exporter", "start_script"]


@pytest.mark.parametrize("raises", [False, True])
def test_the_user_s_sitecustomize_runs_once_and_fails_as_without_the_client(
    exporter: ExporterProcess, start_script: StartScript, tmp_path: Path, raises: bool
) -> None:
    runs = tmp_path / "runs"
    own = folder_with(
        tmp_path / "own",
        helper="import json, csv, decimal\nlines = 2",
        sitecustomize=(
            "import os, helper, queue\n"
            f"with open({str(runs)!r}, 'a') as file: file.write(f'{{os.getpid()}} {{__file__}} {{helper.lines}}\\n')\n"
            + ("raise RuntimeError('of the user')\n" if raises else "")
        ),
    )
    code = "module = sys.modules.get('sitecustomize')\nsay([sys.path[1:], module and module.__file__])"
    path = os.pathsep.join((str(own), str(tmp_path / "further")))
    plain = start_script(code, injected=False, PYTHONPATH=path)
    expected = run_to_the_end(plain)
    injected = start_script(f"hold(1)\n{code}\nwait()", PYTHONPATH=path)
    assert injected.heard() == expected[0]
    wait_for_allocated(exporter, {(injected.pid, "0"): MIB})
    injected.go()
    assert injected.finish() == 0
    assert injected.stderr() == expected[1]
    assert ("of the user" in injected.stderr()) is raises
    assert runs.read_text().splitlines() == [
        f"{program.pid} {own / 'sitecustomize.py'} 2" for program in (plain, injected)
    ]


@pytest.mark.parametrize("text", ["import no_such_module_anywhere", "not python"])
def test_python_reports_a_broken_sitecustomize_as_without_the_client(
    start_script: StartScript, tmp_path: Path, text: str
) -> None:
    own = folder_with(tmp_path / "own", sitecustomize=text)
    ends = []
    for injected in (False, True):
        program = start_script("say(1)", injected=injected, PYTHONPATH=str(own))
        ends.append((program.finish(), program.stderr()))
    assert ends[0] == ends[1]
    assert ends[0][1]


@pytest.mark.parametrize("path", [None, "", ":{0}/a:{0}/b:"])
def test_sys_path_is_the_same_as_without_the_client(
    start_script: StartScript, tmp_path: Path, path: str | None
) -> None:
    environ = {} if path is None else {"PYTHONPATH": path.format(tmp_path)}
    code = "say([sys.path[1:], os.getcwd()])"
    plain, _ = run_to_the_end(start_script(code, injected=False, **environ))
    injected, _ = run_to_the_end(start_script(code, **environ))
    assert injected == plain


@pytest.mark.parametrize("option", ["-I", "-S", "-P"])
def test_the_interpreter_s_options_work_as_without_the_client(start_script: StartScript, option: str) -> None:
    if option == "-P" and sys.version_info < (3, 11):
        pytest.skip("-P came with Python 3.11")
    code = "say([sys.path, modules(), threads(), sys.flags.optimize, sys.argv[1:]])"
    plain = start_script(code, option, injected=False, arguments=("a b", "--x"))
    injected = start_script(code, option, arguments=("a b", "--x"))
    plain_said, plain_stderr = run_to_the_end(plain)
    said, stderr = run_to_the_end(injected)
    if option == "-S":  # the folder stays on sys.path, but its only file is not imported
        said[0].remove(str(BOOTSTRAP))
    assert (said, stderr) == (plain_said, plain_stderr)


def test_gpumem_disabled_leaves_no_trace(exporter: ExporterProcess, start_script: StartScript, tmp_path: Path) -> None:
    own = folder_with(tmp_path / "own", sitecustomize="import sys\nsys.chained = True")
    program = start_script(
        "hold(1)\n"
        "say([threads(), modules(), sys.chained, [str(each) for each in sys.meta_path if 'gpumem' in str(each)]])\n"
        "wait()",
        GPUMEM_DISABLED="1",
        PYTHONPATH=str(own),
    )
    assert program.heard() == [[], [], True, []]
    other = start_script("hold(1)\nsay(1)\nwait()")
    other.heard()
    wait_for_allocated(exporter, {(other.pid, "0"): MIB})


def test_a_broken_installation_does_not_affect_the_program(start_script: StartScript, tmp_path: Path) -> None:
    # Another package of the same name, which cannot be imported.
    own = folder_with(tmp_path / "own", gpumem_client="raise RuntimeError('broken installation')")
    program = start_script("hold(1)\nsay([held.numel(), threads()])", PYTHONPATH=str(own))
    assert run_to_the_end(program) == ([MIB, []], "")
