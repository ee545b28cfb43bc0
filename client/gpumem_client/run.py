"""`gpumem-run`, and `gpumem-exporter run`: start a command with the reporter in every Python process below it.

The bootstrap directory, which contains a `sitecustomize`, goes in front of PYTHONPATH. Every Python interpreter that
inherits the environment imports it at its start. The command then replaces this process, so that signals, exit code
and process ID are its own.
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

from gpumem_client.wire.errors import ConfigurationError

NOT_EXECUTABLE = 126
NOT_FOUND = 127
"""The exit codes of env(1) and of shells."""

SUMMARY = "Start a command with the reporter injected into it."

_HELP = f"""\
Usage: PROGRAM [OPTIONS] -- CMD [ARG]...

  {SUMMARY}

  No code changes: the reporter starts in every Python process below CMD when the process initializes CUDA, also below
  torchrun and in spawned or forked workers. A process without CUDA spends less than a millisecond. CMD replaces this
  process, so signals and exit code are its own. Python with -I or -E ignores PYTHONPATH and gets no reporter.

Options:
  --workload NAME  Label of the processes' series (GPUMEM_WORKLOAD).
  --url URL        The exporter: http://host:port, https://host:port or unix:///path/to.sock (GPUMEM_EXPORTER_URL).
                   Default: unix:///run/gpumem/exporter.sock, then http://127.0.0.1:9844.
  --rank RANK      Rank label (GPUMEM_RANK). Not needed below torchrun and Slurm, and with torch.distributed.
  --plan FILE      The plan of each process (gpumem-exporter plan ... --json > FILE). The exporter then also exports the
                   error of the plan (GPUMEM_PLAN).
  --allocator KEY:VALUE,...
                   Settings of PyTorch's CUDA allocator, checked and added to PYTORCH_CUDA_ALLOC_CONF, such as
                   expandable_segments:True,garbage_collection_threshold:0.8.
  --oom-profile    Record the stack of each allocation, and send a memory profile of out-of-memory errors
                   (GPUMEM_OOM_PROFILE=1).
  -h, --help       Show this message and exit.

Examples:
  PROGRAM -- python train.py --lr 3e-4
  PROGRAM --workload llm-pretrain -- torchrun --nproc-per-node 8 train.py
  PROGRAM --allocator expandable_segments:True -- python train.py
  PROGRAM --plan plan.json -- python train.py
  PROGRAM --url unix:///run/gpumem/exporter.sock -- bash job.sh
  GPUMEM_DISABLED=1 PROGRAM -- python train.py    # no reporter

Exit code: the exit code of CMD; 2 wrong usage; 126 CMD cannot be executed; 127 CMD is not found.
"""

_VARIABLES = {
    "--workload": "GPUMEM_WORKLOAD",
    "--url": "GPUMEM_EXPORTER_URL",
    "--rank": "GPUMEM_RANK",
    "--plan": "GPUMEM_PLAN",
}


def main() -> int:
    """Run the command line of `gpumem-run` and return its exit code."""
    try:
        return run(sys.argv[1:], program="gpumem-run")
    except ConfigurationError as error:
        print(f"gpumem-run: {' '.join(str(error).split())}", file=sys.stderr)
        return 2


def run(arguments: Sequence[str], *, program: str = "gpumem-exporter run") -> int:
    """Replace this process by the command in `arguments`. Returns only after `--help`, or if the command cannot start.

    `program` is the name for messages and the help.

    Raises:
        ConfigurationError: an option is invalid, or there is no command.
    """
    names = ["help", "workload=", "url=", "rank=", "plan=", "allocator=", "oom-profile"]
    try:
        options, command = getopt.getopt(list(arguments), "h", names)
    except getopt.GetoptError as error:
        raise ConfigurationError(
            f"{error}; the options are --workload, --url, --rank, --plan, --allocator and --oom-profile,"
            " and the command follows after `--`"
        ) from error
    if any(name in ("-h", "--help") for name, _ in options):
        print(_HELP.replace("PROGRAM", program), end="")
        return 0
    if not command or not command[0]:
        raise ConfigurationError(f"no command; give one, such as {program} -- python train.py")
    given = {_VARIABLES[name]: value for name, value in options if name in _VARIABLES}
    if ("--oom-profile", "") in options:
        given["GPUMEM_OOM_PROFILE"] = "1"
    # What each option needs is imported only with the option: a plain `run` starts in a few milliseconds.
    settings = [value for name, value in options if name == "--allocator"]
    if settings:
        from gpumem_client.allocator.allocator_environment import environment_with

        given.update(environment_with(os.environ, ",".join(settings)))
    if "GPUMEM_EXPORTER_URL" in given:
        from gpumem_client.wire.http import Connection

        Connection(given["GPUMEM_EXPORTER_URL"], timeout_seconds=1.0).close()
    if "GPUMEM_PLAN" in given:
        from gpumem_client.reporter.planned_peak import planned_peak_bytes

        planned_peak_bytes(given["GPUMEM_PLAN"])
        # The command may change the working directory.
        given["GPUMEM_PLAN"] = str(Path(given["GPUMEM_PLAN"]).absolute())
    bootstrap = str(Path(__file__).resolve().parent / "bootstrap")
    environment = injected_environment({**_given_environment(), **given}, bootstrap)
    sys.stdout.flush()
    sys.stderr.flush()
    _restore_signals()
    try:
        os.execvpe(command[0], command, environment)  # noqa: S606 - this is the purpose of `run`
    except OSError as error:
        return _cannot_run(program, command[0], error)


def injected_environment(environ: Mapping[str, str], bootstrap: str) -> dict[str, str]:
    """Return an environment in which Python starts the reporter: `bootstrap` is the first entry of PYTHONPATH."""
    # An empty entry stands for the working directory: an existing one stays, and an empty variable adds none, because
    # the modules there would hide modules that the command imports.
    inherited = environ.get("PYTHONPATH", "")
    entries = [entry for entry in inherited.split(os.pathsep) if entry != bootstrap] if inherited else []
    return {**environ, "PYTHONPATH": os.pathsep.join([bootstrap, *entries]), "GPUMEM_INJECT": "1"}


def _given_environment() -> dict[str, str]:
    """Return the environment with which this process was started."""
    environment = dict(os.environ)
    # In the C locale the interpreter sets LC_CTYPE (PEP 538). The command must not inherit it.
    with contextlib.suppress(OSError):
        given = Path("/proc/self/environ").read_bytes().split(b"\0")
        environment.pop("LC_CTYPE", None)
        for entry in given:
            if entry.startswith(b"LC_CTYPE="):
                environment["LC_CTYPE"] = os.fsdecode(entry.partition(b"=")[2])
    return environment


def _restore_signals() -> None:
    """Restore the signals that the interpreter ignores."""
    # Python sets SIGPIPE to SIG_IGN, which survives exec: the command would not end when its reader does.
    for number in (signal.SIGPIPE, signal.SIGXFSZ):
        if signal.getsignal(number) is signal.SIG_IGN:
            with contextlib.suppress(OSError, ValueError):
                signal.signal(number, signal.SIG_DFL)


def _cannot_run(program: str, command: str, error: OSError) -> int:
    missing = error.errno == errno.ENOENT or (error.errno == errno.ENOTDIR and os.sep not in command)
    if missing and shutil.which(command) is not None:
        reason, code = "the interpreter in its first line is missing", NOT_EXECUTABLE
    elif missing:
        where = "" if os.sep in command else " in PATH"
        reason, code = f"not found{where}", NOT_FOUND
    else:
        reason, code = (error.strerror or str(error)).lower(), NOT_EXECUTABLE
    printable = "".join(c if c.isprintable() else "?" for c in command)
    print(f"{program}: {printable}: {reason}", file=sys.stderr)
    return code


if __name__ == "__main__":
    sys.exit(main())
