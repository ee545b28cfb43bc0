"""Inference engines: their caches, the release of their memory by the exporter, and the actions that wait for them."""

from __future__ import annotations

from functools import partial

from gpumem_exporter.features.feature import Feature, Node, Parts


def _build(node: Node) -> Parts:
    from gpumem_exporter.features.engines.cache_use import CacheUse
    from gpumem_exporter.features.engines.engine_control import EngineControl
    from gpumem_exporter.features.engines.engine_memory import EngineMemory
    from gpumem_exporter.features.engines.engine_metrics import ENGINE
    from gpumem_exporter.features.engines.smaller_cache import DEMO_SECONDS, ENOUGH_SECONDS, unused_kv_caches

    enough_seconds = ENOUGH_SECONDS if node.real_processes else DEMO_SECONDS
    findings = [partial(unused_kv_caches, enough_seconds=enough_seconds)]
    control = EngineControl() if node.real_processes else None
    node.dispatcher.engines = EngineMemory(
        node.store,
        node.dispatcher.actions,
        control,
        clock=node.clock,
        wall_clock=node.wall_clock,
        poll_soon=node.poll_soon,
        spawn=node.dispatcher.spawn,
        hide_identities=node.settings.web_hide_identities,
    )
    if control is None:
        return Parts(collectors=[ENGINE], findings=findings)
    cache_use = CacheUse(control, node.snapshot, clock=node.clock)
    node.complete_report = cache_use.complete
    return Parts(collectors=[ENGINE], findings=findings, start=cache_use.start, stop=cache_use.stop)


FEATURE = Feature(build=_build)
