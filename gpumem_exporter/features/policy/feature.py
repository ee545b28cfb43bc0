"""Rules that request actions by themselves, or for an alert that names one of them."""

from __future__ import annotations

from typing import TYPE_CHECKING

from gpumem_exporter.features.feature import Feature, Node, Parts

if TYPE_CHECKING:
    from gpumem_exporter.features.policy.policy_metrics import PolicyMetrics
    from gpumem_exporter.features.policy.policy_runner import PolicyRunner
    from gpumem_exporter.settings import Settings


def _file(settings: Settings) -> str:
    from gpumem_exporter.features.policy.policy_settings import PolicySettings

    return settings.of(PolicySettings).policy_file


def _check_file(settings: Settings) -> None:
    from pathlib import Path

    from gpumem_exporter.features.policy.policy_rules import read_policy

    if path := _file(settings):
        read_policy(Path(path), allowed=settings.action_allow)


def _build(node: Node) -> Parts:
    from gpumem_exporter.edge.request_guard import ALERTS_PATH
    from gpumem_exporter.features.policy.alerts import MAX_BODY_BYTES, AlertReceiver, alerts_router
    from gpumem_exporter.features.policy.policy_metrics import PolicyMetrics
    from gpumem_exporter.features.policy.policy_route import policy_router

    metrics = PolicyMetrics(node.registry)
    runner = _runner(node, metrics)
    receiver = AlertReceiver(
        node.dispatcher,
        runner,
        node.snapshot,
        clock=node.clock,
        wall_clock=node.wall_clock,
        # By then, every process that still runs has reported to an exporter that has just started.
        complete_seconds=node.clock() + node.settings.report_expiry,
    )
    return Parts(
        routers=[
            alerts_router(receiver, own_names=node.own_names, count_alert=metrics.count_alert),
            policy_router(runner),
        ],
        body_limits={ALERTS_PATH: MAX_BODY_BYTES},
        chores={} if runner is None else {"run_policies": runner.tick},
        reload=None if runner is None else runner.reload_on_hangup,
    )


def _runner(node: Node, metrics: PolicyMetrics) -> PolicyRunner | None:
    from pathlib import Path

    path, settings = _file(node.settings), node.settings
    if not path:
        return None
    from gpumem_exporter.features.policy.policy_runner import PolicyRunner  # loaded only if there is a policy

    return PolicyRunner(
        Path(path),
        allowed=frozenset(settings.action_allow),
        dispatcher=node.dispatcher,
        snapshot=node.snapshot,
        # A sample that two reports in a row did not contain no longer describes the process.
        stale_seconds=max(3 * settings.report_interval, 5.0),
        metrics=metrics,
        record=lambda event: node.journal.put((event,)),
        wall_clock=node.wall_clock,
    )


FEATURE = Feature(build=_build, settings="PolicySettings", check_files=_check_file)
