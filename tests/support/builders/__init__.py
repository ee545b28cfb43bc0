"""Builders of values, documents and nodes, with defaults for what a test does not need."""
