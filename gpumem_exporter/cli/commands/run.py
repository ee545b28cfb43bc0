"""`run`: start a command with the reporter injected into every Python process below it.

Standard library only: this runs in training images that have this package without its dependencies.

The bootstrap directory, which holds a `sitecustomize`, goes in front of PYTHONPATH; every Python interpreter that
inherits the environment imports it when it starts. The command then replaces this process, so that signals, exit code
and process id are its own.
"""

from __future__ import annotations

import contextlib
import errno
import getopt
import os
import shutil
import signal
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from gpumem_exporter.errors import ConfigurationError

__all__ = ["HELP", "NOT_EXECUTABLE", "NOT_FOUND", "SUMMARY", "injected_environment", "run"]

NOT_EXECUTABLE = 126
NOT_FOUND = 127
"""As env(1) and shells have it."""

SUMMARY = "Start a command with the reporter injected into it."

HELP = f"""\
Usage: gpumem-exporter run [OPTIONS] -- CMD [ARG]...

  {SUMMARY}

  No code changes: the reporter starts by itself in every Python process below CMD once that initialises CUDA, also
  below torchrun, in spawned and in forked workers. It costs under a millisecond where CUDA is never touched. CMD
  replaces this process: signals and exit code are its own. Only Python started with -I or -E, which ignore PYTHONPATH,
  is left out.

Options:
  --workload NAME  Label of the processes' series (GPUMEM_WORKLOAD).
  --url URL        The exporter: http://host:port, https://host:port or unix:///path/to.sock (GPUMEM_EXPORTER_URL).
                   Default: first unix:///run/gpumem/exporter.sock, then http://127.0.0.1:9844.
  --rank RANK      Rank label (GPUMEM_RANK). Below torchrun and Slurm leave it out: RANK and SLURM_PROCID are used.
  --plan FILE      What was planned for each process (gpumem-exporter plan ... --json > FILE): the error of the plan is
                   exported beside what the processes take (GPUMEM_PLAN).
  --allocator KEY:VALUE,...
                   Settings of PyTorch's CUDA allocator, checked and put in force beside those that the environment
                   has (PYTORCH_CUDA_ALLOC_CONF), as in expandable_segments:True,garbage_collection_threshold:0.8.
  -h, --help       Show this and exit.

Examples:
  gpumem-exporter run -- python train.py --lr 3e-4
  gpumem-exporter run --workload llm-pretrain -- torchrun --nproc-per-node 8 train.py
  gpumem-exporter run --allocator expandable_segments:True -- python train.py
  gpumem-exporter run --plan plan.json -- python train.py
  gpumem-exporter run --url unix:///run/gpumem/exporter.sock -- bash job.sh
  GPUMEM_DISABLED=1 gpumem-exporter run -- python train.py    # the same command, nothing injected

Exit code: the command's own; 2 wrong usage, 126 the command cannot be executed, 127 it is not found.
"""

_VARIABLES = {
    "--workload": "GPUMEM_WORKLOAD",
    "--url": "GPUMEM_EXPORTER_URL",
    "--rank": "GPUMEM_RANK",
    "--plan": "GPUMEM_PLAN",
}


def run(arguments: Sequence[str]) -> int:
    """Replace this process by the command that `arguments` names; returns only when that cannot be done.

    Raises:
        ConfigurationError: the options are wrong, or no command is given.
    """
    names = ["help", "workload=", "url=", "rank=", "plan=", "allocator="]
    try:
        options, command = getopt.getopt(list(arguments), "h", names)
    except getopt.GetoptError as error:
        raise ConfigurationError(
            f"{error}; options before the command are --workload, --url, --rank, --plan and --allocator,"
            " and the command follows `--`"
        ) from error
    if any(name in ("-h", "--help") for name, _ in options):
        print(HELP, end="")
        return 0
    if not command or not command[0]:
        raise ConfigurationError("no command is given; say for instance gpumem-exporter run -- python train.py")
    given = {_VARIABLES[name]: value for name, value in options if name in _VARIABLES}
    given |= _allocator_settings([value for name, value in options if name == "--allocator"])
    _require_url(given.get("GPUMEM_EXPORTER_URL"))
    if "GPUMEM_PLAN" in given:
        given["GPUMEM_PLAN"] = _require_plan(given["GPUMEM_PLAN"])
    environment = injected_environment({**_given_environment(), **given}, _bootstrap_directory())
    return _replace_process(command, environment)


def injected_environment(environ: Mapping[str, str], bootstrap: str) -> dict[str, str]:
    """The environment in which Python starts the reporter: `bootstrap` stands first in PYTHONPATH, once.

    What stood there stays, in its order. An empty entry of PYTHONPATH means the working directory: one that was there
    stays, and none is added.
    """
    inherited = environ.get("PYTHONPATH", "")
    entries = [entry for entry in inherited.split(os.pathsep) if entry != bootstrap] if inherited else []
    return {**environ, "PYTHONPATH": os.pathsep.join([bootstrap, *entries]), "GPUMEM_INJECT": "1"}


def _given_environment() -> dict[str, str]:
    """The environment that this process was started with.

    In the C locale an interpreter sets LC_CTYPE as it starts (PEP 538), which the command would inherit.
    """
    environment = dict(os.environ)
    with contextlib.suppress(OSError):
        given = Path("/proc/self/environ").read_bytes().split(b"\0")
        environment.pop("LC_CTYPE", None)
        for entry in given:
            if entry.startswith(b"LC_CTYPE="):
                environment["LC_CTYPE"] = os.fsdecode(entry.partition(b"=")[2])
    return environment


def _bootstrap_directory() -> str:
    directory = Path(__file__).resolve().parents[2] / "client" / "bootstrap"
    if not (directory / "sitecustomize.py").is_file():
        raise ConfigurationError(f"{directory} lacks sitecustomize.py: this installation is broken; install it again")
    if os.pathsep in str(directory):
        raise ConfigurationError(
            f"PYTHONPATH cannot carry {directory}, for the {os.pathsep!r} in it; install elsewhere"
        )
    return str(directory)


def _allocator_settings(lines: Sequence[str]) -> dict[str, str]:
    if not lines:
        return {}
    from gpumem_exporter.client.allocator.settings import environment_with

    return environment_with(os.environ, ",".join(lines))


def _require_url(url: str | None) -> None:
    if url is None:
        return
    from gpumem_exporter.wire.http import Connection

    Connection(url, timeout_seconds=1.0).close()


def _require_plan(path: str) -> str:
    """The file's absolute path: the command may begin in this folder and go on in another."""
    from gpumem_exporter.client.reporter.plan import planned_peak_bytes

    planned_peak_bytes(path)
    return str(Path(path).absolute())


def _replace_process(command: Sequence[str], environment: Mapping[str, str]) -> int:
    sys.stdout.flush()
    sys.stderr.flush()
    _restore_signals()
    try:
        os.execvpe(command[0], list(command), dict(environment))  # noqa: S606 - running the command is what it is for
    except OSError as error:
        return _cannot_run(command[0], error)


def _restore_signals() -> None:
    """Undo what the interpreter ignores from its start on: ignored signals stay ignored across exec."""
    for name in ("SIGPIPE", "SIGXFSZ"):
        number = getattr(signal, name, None)
        if number is not None and signal.getsignal(number) is signal.SIG_IGN:
            with contextlib.suppress(OSError, ValueError):
                signal.signal(number, signal.SIG_DFL)


def _cannot_run(program: str, error: OSError) -> int:
    missing = error.errno == errno.ENOENT or (error.errno == errno.ENOTDIR and os.sep not in program)
    if missing and shutil.which(program) is not None:
        reason, code = "the interpreter that its first line names is missing", NOT_EXECUTABLE
    elif missing:
        where = "" if os.sep in program else " in PATH"
        reason, code = f"not found{where}", NOT_FOUND
    else:
        reason, code = (error.strerror or str(error)).lower(), NOT_EXECUTABLE
    printable = "".join(c if c.isprintable() else "?" for c in program)
    print(f"gpumem-exporter run: {printable}: {reason}", file=sys.stderr)
    return code
