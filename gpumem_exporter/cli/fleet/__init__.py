"""What the commands of `fleet` do: who is meant, by a query; asking many exporters; what came of it.

Prometheus says which exporters there are and what they saw, each exporter acts on its own processes: there is no
inventory and no coordinator.
"""
