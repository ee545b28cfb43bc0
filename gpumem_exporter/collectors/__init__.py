"""From a snapshot to the metrics page: the catalog of metrics, the fast page, and the same as a collector."""
