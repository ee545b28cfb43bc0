"""The metrics page: the catalog of metrics, the samples of a snapshot, and their text formats.

Other folders import: `collector_types`, `exposition`, `instruments`, `metrics_route`.
"""
