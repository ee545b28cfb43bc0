"""Helpers that tests share: processes, exporters, builders, a browser."""
