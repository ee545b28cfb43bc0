"""Commands from the exporter: what they do, and when they run."""
