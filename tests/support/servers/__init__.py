"""Servers in place of real ones, and the real exporter, Prometheus and Alertmanager, for tests."""
