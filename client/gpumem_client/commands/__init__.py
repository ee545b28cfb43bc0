"""Runs and schedules commands from the exporter.

Other folders import: `executor`, `profiling`, `scheduler`.
"""
