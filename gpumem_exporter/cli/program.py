"""What all commands share: their names, exit codes, and the form of their errors. Standard library only."""

from __future__ import annotations

PROGRAM = "gpumem-exporter"

_MODULES = (
    ("serve", ("serve",)),
    ("unparsed", ("run",)),
    ("info", ("info",)),
    ("top", ("top",)),
    ("actions", ("clear", "gc", "reset-peak", "snapshot", "fraction", "sleep", "wake", "terminate")),
    ("profile", ("profile",)),
    ("events", ("events",)),
    ("action_log", ("actions",)),
    ("unparsed", ("plan",)),
    ("nvml", ("release-nvml", "attach-nvml")),
    ("report", ("report",)),
    ("doctor", ("doctor",)),
    ("fleet", ("fleet",)),
    ("webhook", ("webhook",)),
    ("unparsed", ("help",)),
)
COMMANDS = {name: f"gpumem_exporter.cli.commands.{module}" for module, names in _MODULES for name in names}
"""The module of each command, in the order of the help."""

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
