"""The commands of the core, then the commands of each feature."""

from __future__ import annotations

from gpumem_exporter.actions.kinds import KINDS
from gpumem_exporter.features import features

_CORE = {
    "gpumem_exporter.serve_command": ("serve",),
    "gpumem_exporter.cli.commands.info": ("info",),
    "gpumem_exporter.cli.commands.top": ("top",),
    "gpumem_exporter.cli.commands.actions": tuple(kind.command for kind in KINDS.values() if kind.command),
    "gpumem_exporter.cli.commands.report": ("report",),
    "gpumem_exporter.cli.commands.nvml": ("release-nvml", "attach-nvml"),
    "gpumem_exporter.cli.commands.doctor": ("doctor",),
    "gpumem_exporter.cli.commands.passed_on": ("run", "plan", "help"),
}

COMMANDS = {
    **{name: module for module, names in _CORE.items() for name in names},
    **{
        command: f"gpumem_exporter.features.{name}.{module}"
        for name, feature in features().items()
        for command, module in feature.commands.items()
    },
}
"""The module of each command, in the order of the help."""
