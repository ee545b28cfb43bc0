"""Rules that request actions by themselves, or for an alert that names one of them."""

from __future__ import annotations

from gpumem_exporter.features.feature import Feature, Node, Parts


def _build(node: Node) -> Parts:
    from gpumem_exporter.edge.request_guard import ALERTS_PATH
    from gpumem_exporter.features.policy.policy_routes import MAX_BODY_BYTES, policy_router
    from gpumem_exporter.features.policy.policy_runner import EVALUATIONS, PolicyRunner
    from gpumem_exporter.features.policy.policy_settings import PolicySettings
    from gpumem_exporter.metrics.instruments import Counter

    settings = node.settings
    runner = PolicyRunner(
        settings.of(PolicySettings).policy_file,
        dispatcher=node.dispatcher,
        snapshot=node.snapshot,
        # A sample that two reports in a row did not contain no longer describes the process.
        stale_seconds=max(3 * settings.report_interval, 5.0),
        evaluations=Counter.of(EVALUATIONS, node.registry),
        record=lambda event: node.journal.put(event),  # a later feature replaces the journal
        wall_clock=node.wall_clock,
    )
    # By then, every process that still runs has reported to an exporter that has just started.
    complete_seconds = node.clock() + settings.report_expiry
    return Parts(
        routers=[policy_router(runner, node.registry, own_names=node.own_names, complete_seconds=complete_seconds)],
        body_limits={ALERTS_PATH: MAX_BODY_BYTES},
        chores={"run_policies": runner.evaluate} if runner.path else {},
        reload=runner.reload_on_hangup if runner.path else None,
    )


FEATURE = Feature(build=_build, settings="PolicySettings")
