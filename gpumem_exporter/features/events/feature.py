"""The log of the node: errors, devices, processes and actions."""

from __future__ import annotations

from gpumem_exporter.cli.program import LOOK, Listed
from gpumem_exporter.features.feature import Feature

FEATURE = Feature(
    commands={
        "events": Listed(LOOK, "Show what happened on the node, oldest first.", "events_command"),
        "actions": Listed(LOOK, "Show the actions that were requested, and cancel them.", "action_log_command"),
    }
)
