"""The commands of the core and of each feature, as the help lists them."""

from __future__ import annotations

from gpumem_exporter.actions.kinds import KINDS
from gpumem_exporter.cli.program import EXPLAIN, GROUPS, LOOK, OPERATE, RELEASE, Listed
from gpumem_exporter.features import features

_CLI = "gpumem_exporter.cli.commands"
_CORE = {
    "info": Listed(LOOK, "Show jobs, devices and where every byte is.", f"{_CLI}.info"),
    "top": Listed(LOOK, "Show findings, jobs and devices, live.", f"{_CLI}.top"),
    **{
        kind.command: Listed(RELEASE if kind.releases else EXPLAIN, kind.summary, f"{_CLI}.actions")
        for kind in KINDS.values()
        if kind.command
    },
    "report": Listed(EXPLAIN, "Show the memory of a job, even after it has ended.", f"{_CLI}.report"),
    "plan": Listed(EXPLAIN, "Predict the GPU memory of a training job before it runs.", f"{_CLI}.passed_on"),
    "serve": Listed(OPERATE, "Run the exporter.", "gpumem_exporter.serve_command"),
    "run": Listed(OPERATE, "Start a command with the reporter injected into it.", f"{_CLI}.passed_on"),
    "doctor": Listed(OPERATE, "Show what is wrong and how to fix it.", f"{_CLI}.doctor"),
    "release-nvml": Listed(OPERATE, "Release NVML for maintenance of the driver.", f"{_CLI}.nvml"),
    "attach-nvml": Listed(OPERATE, "Attach NVML again after release-nvml.", f"{_CLI}.nvml"),
    "help": Listed(OPERATE, "Show the help of a command.", f"{_CLI}.passed_on"),
}
_ALL = {
    **_CORE,
    **{
        command: listed._replace(module=f"gpumem_exporter.features.{name}.{listed.module}")
        for name, feature in features().items()
        for command, listed in feature.commands.items()
    },
}

COMMANDS = {name: listed for group in GROUPS for name, listed in _ALL.items() if listed.group == group}
"""By name, in the order of the help."""
