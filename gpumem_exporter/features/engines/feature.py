"""The HTTP interfaces of inference engines: their caches, and the release of their memory by the exporter."""

from __future__ import annotations

from functools import partial

from gpumem_exporter.features.feature import Feature, Node, Parts


def _build(node: Node) -> Parts:
    from gpumem_exporter.features.engines.cache_use import CacheUse
    from gpumem_exporter.features.engines.engine_control import EngineControl
    from gpumem_exporter.features.engines.engine_metrics import ENGINE
    from gpumem_exporter.features.engines.smaller_cache import DEMO_SECONDS, ENOUGH_SECONDS, unused_kv_caches

    enough_seconds = ENOUGH_SECONDS if node.real_processes else DEMO_SECONDS
    findings = [partial(unused_kv_caches, enough_seconds=enough_seconds)]
    if not node.real_processes:
        return Parts(collectors=[ENGINE], findings=findings)
    engines = node.dispatcher.engines.finder = EngineControl()
    cache_use = CacheUse(engines, node.snapshot, clock=node.clock)
    node.complete_report = cache_use.complete
    return Parts(collectors=[ENGINE], findings=findings, start=cache_use.start, stop=cache_use.stop)


FEATURE = Feature(build=_build)
