"""`fleet`: Prometheus selects exporters and processes by a query; each exporter acts on its own processes.

There is no inventory and no coordinator.
"""
