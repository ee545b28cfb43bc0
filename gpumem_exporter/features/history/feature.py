"""The history of devices and jobs: one row a second, the page's timelines, and the minima that growth is found by."""

from __future__ import annotations

from functools import partial

from gpumem_exporter.features.feature import Feature, Node, Parts


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
    return Parts(
        routers=[history_router(history, node.renderer, node.hide_identities_from)],
        each_second={"history": history.add},
        start=None if file is None else file.start,
        # A save needs 0.2 s of CPU, and the time of the disk.
        stop=None if file is None else partial(file.stop, 2.0),
    )


FEATURE = Feature(build=_build, settings="HistorySettings")
