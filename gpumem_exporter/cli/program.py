"""What all commands share: exit codes, and the characters of their output. Standard library only."""

from __future__ import annotations

import io
from typing import IO, NamedTuple

PROGRAM = "gpumem-exporter"

COMPLETION_VARIABLE = "_GPUMEM_EXPORTER_COMPLETE"
"""Set by the shell at a tab."""

FAILED = 1
"""The request failed."""
WRONG_USAGE = 2
"""Wrong usage or configuration."""
INTERRUPTED = 130
"""Ended by Ctrl-C: 128 plus the number of the signal, as in a shell."""


class Listed(NamedTuple):
    """A command in the help of the program, which therefore imports no command."""

    group: str
    """One of `GROUPS`."""
    summary: str
    """The first sentence of the command's own help."""
    module: str
    """The module of the command's function. A feature gives it relative to its folder."""


LOOK, RELEASE, EXPLAIN, OPERATE, NODES = GROUPS = ("Look", "Release", "Explain", "Operate", "Many nodes")
"""What a command is for, in the order of the help."""


def one_line(text: str) -> str:
    """Return a text from any source as one line without control characters."""
    return "".join(c if c.isprintable() else "?" for c in " ".join(text.split()))


def replace_missing_characters(file: IO[str]) -> None:
    """Let a file write a question mark for each character that its encoding lacks."""
    if isinstance(file, io.TextIOWrapper):
        file.reconfigure(errors="replace")
