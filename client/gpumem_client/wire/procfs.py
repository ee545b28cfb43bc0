"""Parse /proc entries that identify a process and its program.

The client describes its own process and the exporter describes the processes on a device. Both use this module, so
their descriptions agree. The module uses the standard library only, because training processes import it. All functions
are thread-safe.
"""

from __future__ import annotations

import functools
import os
import re
from collections.abc import Sequence
from typing import NamedTuple

from gpumem_client.wire.protocol import MAX_LABEL_LENGTH

INITIAL_PID_NAMESPACE = 0xEFFFFFFC
"""The inode of the host's PID namespace (PROC_PID_INIT_INO of the kernel). The driver reports the pids of it."""

_PYTHON = re.compile(r"(?:python|pypy)(?:\d+(?:\.\d+)*)?[td]*")
_OPTIONS_WITH_VALUE = "WX"
_LONG_OPTIONS_WITH_VALUE = ("--check-hash-based-pycs",)
_MULTIPROCESSING = ("from multiprocessing.spawn import ", "from multiprocessing.forkserver import ")
_RAY_NIL_JOB_ID = "f" * 8
_INTERCEPTOR = "libvgpu.so"


def describe_command(argv: Sequence[str]) -> str:
    """Return the program and the script of a command line, without its arguments, which may contain secrets.

    `python -u -X dev train.py --token x` becomes `python train.py`, `python -m pkg.mod --key x` becomes
    `python -m pkg.mod`, and `python -c code` becomes `python -c`. Any other command becomes the base name of its
    program. The result has no directories, is printable, encodes as UTF-8 and is at most `MAX_LABEL_LENGTH` characters
    long. It is empty when `argv` is empty.
    """
    # A program that set its own title (setproctitle) leaves one string, which may include the arguments.
    words = argv[0].split() if len(argv) == 1 else argv
    if not words:
        return ""
    program = os.path.basename(words[0])  # noqa: PTH119 - pathlib takes ten times as long
    script = _script(words[1:]) if _PYTHON.fullmatch(program) else ""
    return label_text(f"{program} {script}" if script else program)


def label_text(text: str) -> str:
    """Return a text as the value of a label: printable, and at most `MAX_LABEL_LENGTH` characters long."""
    return "".join(c if c.isprintable() else "?" for c in text)[:MAX_LABEL_LENGTH]


def runs_python(argv: Sequence[str]) -> bool:
    """Whether a command line runs a Python interpreter."""
    return bool(argv) and _PYTHON.fullmatch(os.path.basename(argv[0])) is not None  # noqa: PTH119 - as above


def started_by_multiprocessing(argv: Sequence[str]) -> bool:
    """Whether `multiprocessing` started this interpreter with `spawn` or `forkserver`, so that it runs no script."""
    return any(word.startswith(_MULTIPROCESSING) for word in argv)


def known_ray_job_id(job_id: str) -> str:
    """Return a Ray job id; empty for the nil id, which Ray's workers have until they belong to a job."""
    return "" if job_id == _RAY_NIL_JOB_ID else job_id


def _script(arguments: Sequence[str]) -> str:
    """Return the script, `-m module`, `-c` or `-` among a Python interpreter's arguments, parsed as CPython does."""
    rest = iter(arguments)
    for word in rest:
        if word == "-":
            return "-"
        if word == "--":
            return _base_name(next(rest, ""))
        if word.startswith("--"):
            if word in _LONG_OPTIONS_WITH_VALUE:
                next(rest, None)
            continue
        if not word.startswith("-"):
            return _base_name(word)
        for position, letter in enumerate(word[1:], start=2):
            if letter == "c":
                return "-c"
            if letter == "m":
                return f"-m {word[position:] or next(rest, '')}".rstrip()
            if letter in _OPTIONS_WITH_VALUE:
                if not word[position:]:
                    next(rest, None)
                break
    return ""


def _base_name(path: str) -> str:
    # `python directory/` runs the directory's __main__.py
    return os.path.basename(path.rstrip("/"))  # noqa: PTH119


def split_cmdline(cmdline: bytes) -> list[str]:
    """Split /proc/PID/cmdline into its arguments; bytes that are not UTF-8 are replaced.

    The kernel ends every argument with a NUL. A program that shortened its title leaves additional NULs at the end.
    """
    text = cmdline.rstrip(b"\0").decode("utf-8", "replace")
    return text.split("\0") if text else []


class ProcStat(NamedTuple):
    """A part of /proc/PID/stat (proc_pid_stat(5))."""

    state: str
    """`R`, `S`, `D`, ...; `Z` or `X` for a process that has exited."""
    parent_pid: int
    """0 if the parent is in another PID namespace."""
    cpu_ticks: int
    """The CPU time that the process has used, in clock ticks."""
    start_time_ticks: int
    """Clock ticks after boot, the same in every PID namespace."""


def parse_stat(stat_text: str) -> ProcStat:
    """Parse /proc/PID/stat.

    Raises:
        ValueError: the text is not a line of /proc/PID/stat.
    """
    fields = _fields_after_name(stat_text)
    return ProcStat(fields[0], int(fields[1]), int(fields[11]) + int(fields[12]), int(fields[19]))


def parse_stat_program(stat_text: str) -> tuple[int, str, int] | None:
    """Return a value that identifies the program that a process runs, across exec and pid reuse.

    Returns:
        The start time, the line up to the kernel's short name, and the stack address, which every exec changes. The
        address is 0 where the kernel hides it from this user. None if the process has exited or the text is not a line
        of /proc/PID/stat.
    """
    try:
        fields = _fields_after_name(stat_text)
        start_stack = int(fields[25]) if len(fields) > 25 else 0
        return None if fields[0] in "ZXx" else (int(fields[19]), stat_text[: stat_text.rindex(")")], start_stack)
    except ValueError:
        return None


def _fields_after_name(stat_text: str) -> list[str]:
    # The name in the second field may itself contain spaces and parentheses, so split after the last parenthesis.
    _, parenthesis, rest = stat_text.rpartition(")")
    fields = rest.split()
    if not parenthesis or len(fields) < 20:
        raise ValueError(f"not a line of /proc/PID/stat: {stat_text[:80]!r}")
    return fields


def start_time_ticks(proc_entry: str = "/proc/self") -> int:
    """Return `ProcStat.start_time_ticks` of a process, or 0 if it is unreadable."""
    try:
        with open(f"{proc_entry}/stat", encoding="utf-8", errors="replace") as stat:  # noqa: PTH123 - as above
            return parse_stat(stat.read()).start_time_ticks
    except (OSError, ValueError):
        return 0


def pid_namespace(proc_entry: str = "/proc/self") -> int:
    """Return the inode of the PID namespace of the process, or 0 if it is unreadable."""
    try:
        return os.stat(f"{proc_entry}/ns/pid").st_ino  # noqa: PTH116
    except OSError:
        return 0


@functools.lru_cache(maxsize=None)  # libraries are preloaded when a program starts
def nvml_interceptor(preload: str = "/etc/ld.so.preload") -> str:
    """Return the name of a preloaded library that answers for NVML in this process; empty if there is none.

    HAMi's libvgpu.so shows a container's share of a device as the device, and other values of processes.
    """
    try:
        with open(preload, encoding="utf-8", errors="replace") as file:  # noqa: PTH123 - a client imports no pathlib
            preloaded = file.read(1 << 16)
    except OSError:
        preloaded = ""
    return _INTERCEPTOR if _INTERCEPTOR in f"{preloaded} {os.environ.get('LD_PRELOAD', '')}" else ""
