"""What both sides of the wire read in /proc: which process this is, and what may be told of its command line.

A reporter describes itself and the exporter describes whatever holds a device; they agree because both do it here.
Standard library only: this module is imported by training processes. Any thread may call anything here.
"""

from __future__ import annotations

import os
import re
from collections.abc import Sequence

from gpumem_exporter.wire.protocol import MAX_LABEL_LENGTH

__all__ = [
    "describe_command",
    "parse_stat_program",
    "parse_stat_start_time",
    "parse_stat_state",
    "pid_namespace",
    "split_cmdline",
    "start_time_ticks",
]

_PYTHON = re.compile(r"(?:python|pypy)(?:\d+(?:\.\d+)*)?[td]*")
_OPTIONS_WITH_VALUE = "WX"
_LONG_OPTIONS_WITH_VALUE = ("--check-hash-based-pycs",)


def describe_command(argv: Sequence[str]) -> str:
    """Name a process by program and script, never by its arguments: those carry secrets.

    `python -u -X dev train.py --token x` is `python train.py`, `python -m pkg.mod --key x` is `python -m pkg.mod`,
    `python -c code` is `python -c`, anything else is the base name of its program. Directories are left out. The
    result is printable, encodes as UTF-8 and is no longer than a label may be; it is empty when `argv` is.
    """
    # A program that wrote its own title (setproctitle) left one string, in which the arguments may stand too.
    words = argv[0].split() if len(argv) == 1 else argv
    if not words:
        return ""
    program = os.path.basename(words[0])  # noqa: PTH119 - a text from elsewhere; pathlib costs ten times as much
    what = _script(words[1:]) if _PYTHON.fullmatch(program) else ""
    described = f"{program} {what}" if what else program
    return "".join(c if c.isprintable() else "?" for c in described)[:MAX_LABEL_LENGTH]


def _script(arguments: Sequence[str]) -> str:
    """What a Python interpreter was asked to run, read from its arguments the way CPython's own getopt does."""
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

    The kernel ends every argument with a NUL; a program that shortened its title leaves more of them at the end.
    """
    text = cmdline.rstrip(b"\0").decode("utf-8", "replace")
    return text.split("\0") if text else []


def parse_stat_start_time(stat_text: str) -> int:
    """Field 22 of /proc/PID/stat: clock ticks after boot at which the process began.

    Raises:
        ValueError: the text is not such a line.
    """
    return int(_fields_after_name(stat_text)[19])


def parse_stat_state(stat_text: str) -> str:
    """Field 3 of /proc/PID/stat: `R`, `S`, `D`, ... and `Z` or `X` for a process that has ended.

    Raises:
        ValueError: the text is not such a line.
    """
    return _fields_after_name(stat_text)[0]


def parse_stat_program(stat_text: str) -> tuple[int, str, int] | None:
    """What tells the program that a process runs from any other that it, or another with its pid, runs or ran.

    Start time, the kernel's short name, and the address of the stack, which every exec draws anew (0 where the kernel
    does not show it to this user). None for a process that has ended, or a text that is no such line.
    """
    try:
        fields = _fields_after_name(stat_text)
        start_stack = int(fields[25]) if len(fields) > 25 else 0
        return None if fields[0] in "ZXx" else (int(fields[19]), stat_text[: stat_text.rindex(")")], start_stack)
    except ValueError:
        return None


def _fields_after_name(stat_text: str) -> list[str]:
    # The second field, the name in parentheses, may hold blanks and parentheses itself: count from the last one.
    _, parenthesis, rest = stat_text.rpartition(")")
    fields = rest.split()
    if not parenthesis or len(fields) < 20:
        raise ValueError(f"not a line of /proc/PID/stat: {stat_text[:80]!r}")
    return fields


def start_time_ticks(proc_entry: str = "/proc/self") -> int:
    """When the process began, in clock ticks after boot: the same from every PID namespace; 0 where unreadable."""
    try:
        with open(f"{proc_entry}/stat", encoding="utf-8", errors="replace") as stat:  # noqa: PTH123 - as above
            return parse_stat_start_time(stat.read())
    except (OSError, ValueError):
        return 0


def pid_namespace(proc_entry: str = "/proc/self") -> int:
    """Inode of the process' PID namespace; 0 where it cannot be read."""
    try:
        return os.stat(f"{proc_entry}/ns/pid").st_ino  # noqa: PTH116
    except OSError:
        return 0
