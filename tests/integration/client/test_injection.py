"""`gpumem-exporter run -- CMD`: unchanged programs report, and nothing else about them changes."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import StartExporter
from tests.emulation.fixtures import StartTorch
from tests.emulation.node import EmulatedNode
from tests.emulation.programs import Program
from tests.support.exporter_process import ExporterProcess
from tests.support.paths import REPOSITORY
from tests.support.running_command import CONSOLE_SCRIPT
from tests.support.waiting import patient, wait_for, wait_until_equal

QUICK = ("--report.interval", "0.2", "--collect.interval", "0.2")
RUN = (sys.executable, "-m", "gpumem_exporter", "run", "--")
ISOLATED_RUN = (sys.executable, "-I", "-c", CONSOLE_SCRIPT, "run", "--")
"""The command as it works from any folder, in a Python that runs no user's sitecustomize."""
BOOTSTRAP = REPOSITORY / "gpumem_exporter" / "client" / "bootstrap"
MIB = 1 << 20

PREAMBLE = """
import json, os, sys, threading
def say(value):
    sys.stdout.write(json.dumps(value) + "\\n")
    sys.stdout.flush()
def wait():
    sys.stdin.readline()
def hold(mebibytes, device=0):
    import torch
    global held
    held = torch.empty(mebibytes << 20, dtype=torch.uint8, device=f"cuda:{device}")
def threads():
    return sorted(thread.name for thread in threading.enumerate() if thread.name.startswith("gpumem"))
def modules():
    return sorted(name for name in sys.modules if "gpumem" in name)
"""
"""The start of every script of these tests."""

StartScript = Callable[..., Program]


@pytest.fixture
def exporter(node: EmulatedNode, start_exporter: StartExporter) -> ExporterProcess:
    return start_exporter(node, *QUICK)


@pytest.fixture
def start_script(node: EmulatedNode, tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[StartScript]:
    """Runs a script below `run`, in a folder where this project cannot be found, and kills it after the test.

    `start_script(code, "-E", arguments=("x",), command=(…), GPUMEM_WORKLOAD="…")`: the options are the interpreter's,
    `command` stands for the interpreter and its arguments before the script, names in capitals are environment.
    """
    programs: list[Program] = []
    folder = tmp_path / "scripts"
    folder.mkdir()

    def start(
        code: str,
        *options: str,
        arguments: tuple[str, ...] = (),
        command: tuple[str, ...] = (),
        injected: bool = True,
        **environment: str,
    ) -> Program:
        script = folder / f"script{len(programs)}.py"
        script.write_text(PREAMBLE + code)
        environ = clean_environment()
        if "exporter" in request.fixturenames:
            environ["GPUMEM_EXPORTER_URL"] = request.getfixturevalue("exporter").url
        environ.update(environment)
        programs.append(
            Program(
                node,
                launcher=("env", "-i", f"--chdir={folder}", *assignments(node.environment(environ))),
                command=(
                    *(ISOLATED_RUN if injected else ()),
                    *(command or (sys.executable, *options)),
                    *(str(script), *arguments),
                ),
            )
        )
        return programs[-1]

    yield start
    for program in programs:
        program.__exit__()


def clean_environment() -> dict[str, str]:
    """This process' environment without the variables of Python and of the reporter."""
    steering = ("GPUMEM_", "PYTHON", "COVERAGE")
    kept = {name: value for name, value in os.environ.items() if not name.startswith(steering)}
    return {**kept, "PYTHONWARNINGS": "ignore"}


def assignments(environment: Mapping[str, str]) -> list[str]:
    return [f"{name}={value}" for name, value in environment.items()]


def folder_with(path: Path, **files: str) -> Path:
    """Make a folder with these modules."""
    path.mkdir()
    for name, text in files.items():
        (path / f"{name}.py").write_text(text)
    return path


def run_to_the_end(program: Program) -> tuple[Any, str]:
    """Return the last output and stderr of a program that exits with 0."""
    said = program.heard()
    assert program.finish() == 0, program.stderr()
    return said, program.stderr()


def allocated(exporter: ExporterProcess) -> dict[tuple[int, str], float]:
    """Return the allocated bytes of the reporting processes, by pid and gpu."""
    found = exporter.metrics().samples.get("gpumem_torch_allocated_bytes", {}).items()
    return {(int(dict(labels)["pid"]), dict(labels)["gpu"]): value for labels, value in found}


def wait_for_allocated(exporter: ExporterProcess, expected: dict[tuple[int, str], float]) -> None:
    """Wait until exactly these processes report, with exactly these bytes."""
    wait_until_equal(lambda: allocated(exporter), expected, "allocated bytes by pid and device")


# Processes that report, and processes that do not


def test_a_plain_script_reports_without_a_change_in_its_code(
    exporter: ExporterProcess, start_script: StartScript
) -> None:
    program = start_script("hold(3)\nsay([threads(), os.getpid()])\nwait()", GPUMEM_WORKLOAD="plain", RANK="5")
    assert program.heard() == [["gpumem-reporter"], program.pid]
    wait_for_allocated(exporter, {(program.pid, "0"): 3 * MIB})
    process = exporter.processes()[program.pid]
    assert (process["workload"], process["rank"], process["own_pid"]) == ("plain", "5", program.pid)
    assert process["command"].endswith("script0.py")
    program.go()
    assert program.finish() == 0
    assert program.stderr() == ""
    wait_for_allocated(exporter, {})


def test_a_script_without_cuda_has_no_thread_and_does_not_report(
    exporter: ExporterProcess, start_script: StartScript
) -> None:
    idle = start_script("import torch\nsay([threads(), modules(), torch.cuda.is_initialized()])\nwait()")
    busy = start_script("hold(1)\nsay(1)\nwait()")
    assert idle.heard() == [[], [], False]
    busy.heard()
    wait_for_allocated(exporter, {(busy.pid, "0"): MIB})
    assert set(exporter.processes()) == {busy.pid}
    idle.go()
    assert idle.finish() == 0
    assert idle.stderr() == ""


def test_a_process_without_torch_imports_no_further_module(start_script: StartScript) -> None:
    code = "say(sorted(sys.modules))"
    injected, _ = run_to_the_end(start_script(code))
    plain, _ = run_to_the_end(start_script(code, injected=False))
    assert set(injected) - set(plain) <= {"sitecustomize"}
    assert set(plain) <= set(injected)


# The program's own environment


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


@pytest.mark.parametrize("text", ["import no_such_module_anywhere", "import sitecustomize.part", "not python"])
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


@pytest.mark.parametrize("path", [None, "", "{0}/a:{0}/b", ":{0}/a", "{0}/a:"])
def test_sys_path_is_the_same_as_without_the_client(
    start_script: StartScript, tmp_path: Path, path: str | None
) -> None:
    environ = {} if path is None else {"PYTHONPATH": path.format(tmp_path)}
    code = "say([sys.path[1:], os.getcwd()])"
    plain, _ = run_to_the_end(start_script(code, injected=False, **environ))
    injected, _ = run_to_the_end(start_script(code, **environ))
    assert injected == plain


@pytest.mark.parametrize("option", ["-I", "-E", "-S", "-s", "-P", "-O", "-B"])
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


def test_the_program_keeps_pid_arguments_streams_and_exit_code(
    exporter: ExporterProcess, start_script: StartScript
) -> None:
    program = start_script(
        "hold(1)\n"
        "say([os.getpid(), sys.argv[1:]])\n"
        "line = sys.stdin.readline()\n"
        "sys.stderr.write('to stderr ' + line)\n"
        "sys.exit(77)",
        arguments=("--lr", "3e-4", "ein Wort", ""),
    )
    assert program.heard() == [program.pid, ["--lr", "3e-4", "ein Wort", ""]]
    exporter.wait_for_processes(program.pid)
    program.go()
    assert program.finish() == 77
    assert program.stderr() == "to stderr \n"


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_signals_work_as_without_the_client(
    exporter: ExporterProcess, start_script: StartScript, number: signal.Signals
) -> None:
    code = (
        "import signal, time\n"
        "hold(1)\n"
        "def caught(number, frame):\n"
        "    say(number)\n"
        "    sys.exit(5)\n"
        "signal.signal(signal.SIGINT, caught)\n"
        "say(signal.getsignal(signal.SIGTERM) == signal.SIG_DFL)\n"
        "while True: time.sleep(60)"
    )
    program = start_script(code)
    assert program.heard() is True
    exporter.wait_for_processes(program.pid)
    os.kill(program.pid, number)
    if number == signal.SIGINT:
        assert program.heard() == number
        assert program.finish() == 5
    else:
        assert program.finish() == -number
    wait_for_allocated(exporter, {})
    assert program.stderr() == ""


# Children


CHILD = """
import multiprocessing, sys, time
def child(mebibytes, pipe):
    hold(mebibytes)
    pipe.send([os.getpid(), threads()])
    pipe.recv()
"""


@pytest.mark.parametrize(
    ("method", "torch_first"), [("spawn", False), ("forkserver", True), ("fork", False), ("fork", True)]
)
def test_children_of_multiprocessing_report_and_a_parent_without_cuda_does_not(
    exporter: ExporterProcess, start_script: StartScript, method: str, torch_first: bool
) -> None:
    program = start_script(
        CHILD
        + (
            "if __name__ == '__main__':\n"
            + ("    import torch\n" if torch_first else "")
            + f"    context = multiprocessing.get_context({method!r})\n"
            "    pipes = [context.Pipe() for _ in range(2)]\n"
            "    children = [context.Process(target=child, args=(i + 1, far)) for i, (_, far) in enumerate(pipes)]\n"
            "    for each in children: each.start()\n"
            "    say([near.recv() for near, _ in pipes])\n"
            "    wait()\n"
            "    for near, _ in pipes: near.send(None)\n"
            "    for each in children: each.join()\n"
            "    say([[each.exitcode for each in children], threads()])\n"
        )
    )
    children = program.heard(120)
    pids = [pid for pid, _ in children]
    assert [names for _, names in children] == [["gpumem-reporter"]] * 2
    wait_for_allocated(exporter, {(pids[0], "0"): MIB, (pids[1], "0"): 2 * MIB})
    program.go()
    assert run_to_the_end(program) == ([[0, 0], []], "")
    wait_for_allocated(exporter, {})


def test_below_torchrun_every_rank_reports_and_the_launcher_does_not(
    exporter: ExporterProcess, start_script: StartScript, tmp_path: Path
) -> None:
    program = start_script(
        "import time\n"
        "import torch.distributed as dist\n"
        "dist.init_process_group('gloo')\n"
        "rank = dist.get_rank()\n"
        "hold(rank + 1, device=int(os.environ['LOCAL_RANK']))\n"
        "ranks = [None, None]\n"
        "dist.all_gather_object(ranks, [os.getpid(), os.getppid(), threads()])\n"
        "if rank == 0: say(ranks)\n"
        # torchrun starts each rank in its own session: after a failed test the ranks end by themselves
        "launcher = os.getppid()\n"
        "while not os.path.exists(sys.argv[1]) and os.getppid() == launcher: time.sleep(0.02)\n"
        "os._exit(0)\n",
        command=(sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"),
        arguments=(str(tmp_path / "finished"),),
        OMP_NUM_THREADS="1",
        GLOO_SOCKET_IFNAME="lo",
        GPUMEM_WORKLOAD="pair",
    )
    ranks = program.heard(120)
    assert [parent for _, parent, _ in ranks] == [program.pid] * 2
    assert [names for _, _, names in ranks] == [["gpumem-reporter"]] * 2
    pids = [pid for pid, _, _ in ranks]
    wait_for_allocated(exporter, {(pids[0], "0"): MIB, (pids[1], "1"): 2 * MIB})
    processes = exporter.processes()
    assert {pid: (entry["workload"], entry["rank"]) for pid, entry in processes.items()} == {
        pids[0]: ("pair", "0"),
        pids[1]: ("pair", "1"),
    }
    action = exporter.act("reset_peak", target={"workload": "pair", "rank": "1"})
    assert [(row["pid"], row["gpu"], row["outcome"]) for row in action["results"]] == [(pids[1], "1", "done")]
    # the launcher is alive and has no thread of the client
    names = [task.read_text().strip() for task in Path(f"/proc/{program.pid}/task").glob("*/comm")]
    assert not [name for name in names if name.startswith("gpumem")]
    (tmp_path / "finished").touch()
    assert program.finish() == 0
    wait_for_allocated(exporter, {})


# Missing packages, exporters and permission


def test_a_python_without_the_package_uses_the_command_s_package(
    exporter: ExporterProcess, start_script: StartScript, tmp_path: Path
) -> None:
    venv = tmp_path / "venv"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(venv)], check=True, timeout=patient(60))
    (site_packages,) = venv.glob("lib/python*/site-packages")
    import torch

    # all packages of this environment except this project
    for entry in Path(torch.__file__).parents[1].iterdir():
        if "gpumem" not in entry.name and entry.suffix != ".pth":
            (site_packages / entry.name).symlink_to(entry)
    program = start_script(
        "try:\n"
        "    import gpumem_exporter\n"
        "except ModuleNotFoundError as error:\n"
        "    say(error.name)\n"
        "hold(1)\n"
        "say([modules()[:2], threads(), [entry for entry in sys.path if 'gpumem' in entry]])\n"
        "import gpumem_exporter\n"
        "from gpumem_exporter import client\n"
        "client.start()\n"
        "say([gpumem_exporter.__file__, threads()])\n"
        "wait()",
        command=(str(venv / "bin" / "python"),),
    )
    assert program.heard() == "gpumem_exporter"
    assert program.heard() == [["gpumem_exporter", "gpumem_exporter.client"], ["gpumem-reporter"], []]
    assert program.heard() == [str(REPOSITORY / "gpumem_exporter" / "__init__.py"), ["gpumem-reporter"]]
    wait_for_allocated(exporter, {(program.pid, "0"): MIB})


@pytest.mark.parametrize("first", ["start", "cuda"])
def test_a_program_that_starts_the_client_itself_has_one_reporter(
    exporter: ExporterProcess, start_torch: StartTorch, first: str
) -> None:
    process = start_torch(launcher=RUN, GPUMEM_EXPORTER_URL=exporter.url, GPUMEM_WORKLOAD="environment")
    for action in (first, "cuda" if first == "start" else "start"):
        if action == "start":
            process.call("start_client", workload="argument")
        else:
            process.call("alloc", nbytes=MIB)
    exporter.wait_for_processes(process.pid)
    code = "import threading; result = [t.name for t in threading.enumerate() if t.name.startswith('gpumem')]"
    assert process.exec(code) == ["gpumem-reporter"]
    (entry,) = exporter.processes().values()
    assert entry["workload"] == ("argument" if first == "start" else "environment")
    assert len(exporter.metrics().values("gpumem_reporter_up")) == 1
    process.call("stop_client")
    wait_for(lambda: not exporter.processes(), "the reporter to be gone")
    assert process.exec(code) == []
    assert process.finish() == 0


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


@pytest.mark.parametrize("url", ["ftp://127.0.0.1:9844", "http://[", "unix:///nonexistent/exporter.sock"])
def test_an_invalid_or_unreachable_exporter_url_does_not_affect_the_program(
    start_script: StartScript, url: str
) -> None:
    program = start_script(
        "hold(1)\nimport torch\nsay([torch.cuda.memory_allocated(), int(held.numel())])", GPUMEM_EXPORTER_URL=url
    )
    said, stderr = run_to_the_end(program)
    assert said == [MIB, MIB]
    assert "Traceback" not in stderr
    # a missing exporter is not logged; an invalid address is
    assert ("this process is not reported" in stderr) == (not url.startswith("unix:///"))


def test_a_broken_installation_does_not_affect_the_program(start_script: StartScript, tmp_path: Path) -> None:
    # Another package of the same name, which cannot be imported.
    own = folder_with(tmp_path / "own", gpumem_exporter="raise RuntimeError('broken installation')")
    program = start_script("hold(1)\nsay([held.numel(), threads()])", PYTHONPATH=str(own))
    assert run_to_the_end(program) == ([MIB, []], "")
