"""What all commands share: exit codes, and the form of their errors. Standard library only."""

from __future__ import annotations

PROGRAM = "gpumem-exporter"

COMPLETION_VARIABLE = "_GPUMEM_EXPORTER_COMPLETE"
"""Set by the shell at a tab."""

FAILED = 1
"""The request failed."""
WRONG_USAGE = 2
"""Wrong usage or configuration."""
INTERRUPTED = 130
"""Ended by Ctrl-C: 128 plus the number of the signal, as in a shell."""


def one_line(text: str) -> str:
    """Return a text from any source as one line without control characters."""
    return "".join(c if c.isprintable() else "?" for c in " ".join(text.split()))
