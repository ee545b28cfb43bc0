"""The history of devices and jobs: one row a second, the page's timelines, and the minima that growth is found by."""

from __future__ import annotations

from functools import partial

from gpumem_exporter.features.feature import Feature, Node, Parts

STOP_SECONDS = 2.0
"""The time for saving the history at the exit, which needs 0.2 s of CPU and what the disk needs."""


def _build(node: Node) -> Parts:
    from gpumem_exporter.features.history.history import History
    from gpumem_exporter.features.history.history_file import FILE_NAME, HistoryFile
    from gpumem_exporter.features.history.history_route import history_router
    from gpumem_exporter.features.history.history_settings import HistorySettings

    retention_seconds = node.settings.of(HistorySettings).history_retention
    history = History(retention_seconds=retention_seconds, clock=node.clock, wall_clock=node.wall_clock)
    if node.folder is None or not (node.folder / FILE_NAME).exists():
        history.restore(node.past(node.wall_clock()))
    file = HistoryFile(history, node.folder) if node.folder is not None else None
    node.view.minima_of = history.minima
    node.kv_cache_peaks = partial(getattr, history, "kv_cache_peaks")
    router = history_router(history, node.renderer, node.snapshot, node.hide_identities_from)
    return Parts(
        routers=[router],
        each_second={"history": history.add},
        start=None if file is None else file.start,
        stop=None if file is None else partial(file.stop, STOP_SECONDS),
    )


FEATURE = Feature(build=_build, settings="HistorySettings")
