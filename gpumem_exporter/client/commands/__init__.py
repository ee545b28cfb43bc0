"""Commands from the exporter: when they run, and what they do."""
