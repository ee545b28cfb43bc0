"""The log of the node: errors, devices, processes and actions."""

from __future__ import annotations

from gpumem_exporter.features.feature import Feature

FEATURE = Feature(commands={"events": "events_command", "actions": "action_log_command"})
