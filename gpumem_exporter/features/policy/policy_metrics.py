"""The metrics of policy rules and of alerts."""

from __future__ import annotations

from gpumem_exporter.features.policy.policy_values import RESULTS
from gpumem_exporter.metrics.collector_types import Metric
from gpumem_exporter.metrics.instruments import Counter, Registry

ALERT_OUTCOMES = ("acted", "repeated", "waiting", "refused", "resolved", "ignored", "invalid")
EVALUATIONS = Metric(
    "gpumem_policy_evaluations_total",
    "counter",
    "Evaluations of the rules in the policy file, one per process and device, by rule and result.",
    ("result", "rule"),
)
ALERTS = Metric(
    "gpumem_alerts_total",
    "counter",
    "Alerts that Alertmanager sent, by outcome. A body that is not a valid message counts once, as invalid.",
    ("outcome",),
)
METRICS = (EVALUATIONS, ALERTS)


class PolicyMetrics:
    """Counts evaluations and alerts. Thread-safe."""

    def __init__(self, registry: Registry) -> None:
        self._evaluations = Counter.of(EVALUATIONS, registry)
        self._alerts = Counter.of(ALERTS, registry)
        for outcome in ALERT_OUTCOMES:  # the series start at 0
            self._alerts.labels(outcome)

    def add_policy_rule(self, rule: str) -> None:
        """Start the series of a policy rule at 0."""
        for result in RESULTS:
            self._evaluations.labels(result, rule)

    def remove_policy_rule(self, rule: str) -> None:
        """Remove the series of a policy rule."""
        for result in RESULTS:
            self._evaluations.remove(result, rule)

    def count_policy(self, rule: str, result: str, count: int) -> None:
        """Count evaluations of a policy rule with one result."""
        self._evaluations.labels(result, rule).inc(count)

    def count_alert(self, outcome: str) -> None:
        """Count an alert; `outcome` is one of `ALERT_OUTCOMES`."""
        self._alerts.labels(outcome).inc()
