"""Rules that request actions by themselves, or for an alert that names one of them."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from gpumem_exporter.features.feature import Feature, Node, Parts

if TYPE_CHECKING:
    from gpumem_exporter.settings import Settings


def _file(settings: Settings) -> Path | None:
    from gpumem_exporter.features.policy.policy_settings import PolicySettings

    path = settings.of(PolicySettings).policy_file
    return Path(path) if path else None


def _check_file(settings: Settings) -> None:
    path = _file(settings)
    if path is not None:
        from gpumem_exporter.features.policy.policy_rules import read_policy

        read_policy(path, allowed=settings.action_allow)


def _build(node: Node) -> Parts:
    from gpumem_exporter.edge.request_guard import ALERTS_PATH
    from gpumem_exporter.features.policy.policy_routes import MAX_BODY_BYTES, policy_router
    from gpumem_exporter.features.policy.policy_runner import PolicyRunner

    settings = node.settings
    path = _file(settings)
    runner = PolicyRunner(
        path,
        allowed=frozenset(settings.action_allow),
        dispatcher=node.dispatcher,
        snapshot=node.snapshot,
        # A sample that two reports in a row did not contain no longer describes the process.
        stale_seconds=max(3 * settings.report_interval, 5.0),
        registry=node.registry,
        record=lambda event: node.journal.put((event,)),
        wall_clock=node.wall_clock,
    )
    # By then, every process that still runs has reported to an exporter that has just started.
    complete_seconds = node.clock() + settings.report_expiry
    return Parts(
        routers=[policy_router(runner, node.registry, own_names=node.own_names, complete_seconds=complete_seconds)],
        body_limits={ALERTS_PATH: MAX_BODY_BYTES},
        chores={} if path is None else {"run_policies": runner.tick},
        reload=None if path is None else runner.reload_on_hangup,
    )


FEATURE = Feature(build=_build, settings="PolicySettings", check_files=_check_file)
