"""All metrics that the exporter declares: of the page, of its own work, and of each feature."""

from gpumem_exporter.features.engines.engine_metrics import ENGINE
from gpumem_exporter.features.events import event_log
from gpumem_exporter.features.oom.oom_metrics import OOM
from gpumem_exporter.features.orphans.orphan_metrics import ORPHANS
from gpumem_exporter.features.policy import policy_routes
from gpumem_exporter.metrics import catalog

SCRAPED = (*catalog.SCRAPED, *OOM.families, *ORPHANS.families, *ENGINE.families)
"""The metrics of a snapshot."""
METRICS = (*SCRAPED, *catalog.OWN, *event_log.METRICS, *policy_routes.METRICS)
