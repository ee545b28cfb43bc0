"""Runs and schedules commands from the exporter.

Other folders import: `executor`, `scheduler`.
"""
