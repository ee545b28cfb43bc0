"""What all commands share: their names, exit codes, and the form of their errors. Standard library only."""

from __future__ import annotations

PROGRAM = "gpumem-exporter"

_MODULES = (
    ("serve_command", ("serve",)),
    ("cli.commands.passed_on", ("run",)),
    ("cli.commands.info", ("info",)),
    ("cli.commands.top", ("top",)),
    (
        "cli.commands.actions",
        ("clear", "gc", "reset-peak", "snapshot", "fraction", "sleep", "wake", "terminate"),
    ),
    ("features.profiles.profile_command", ("profile",)),
    ("features.events.events_command", ("events",)),
    ("features.events.action_log_command", ("actions",)),
    ("cli.commands.passed_on", ("plan",)),
    ("cli.commands.nvml", ("release-nvml", "attach-nvml")),
    ("cli.commands.report", ("report",)),
    ("cli.commands.doctor", ("doctor",)),
    ("features.fleet.fleet_command", ("fleet",)),
    ("features.webhook.webhook_command", ("webhook",)),
    ("cli.commands.passed_on", ("help",)),
)
COMMANDS = {name: f"gpumem_exporter.{module}" for module, names in _MODULES for name in names}
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
