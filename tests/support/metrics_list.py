"""All metrics that the exporter declares: of the page, of its own work, and of each feature."""

from gpumem_exporter.features.events import event_metrics
from gpumem_exporter.features.policy import policy_metrics
from gpumem_exporter.metrics import catalog

METRICS = (*catalog.METRICS, *event_metrics.METRICS, *policy_metrics.METRICS)
