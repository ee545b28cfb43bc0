"""Runs and schedules commands from the exporter."""
