"""Orphans: idle processes that their launcher, server or container has left behind.

Actions and views select them with `--orphans`, from the snapshot.
"""

from __future__ import annotations

from gpumem_exporter.features.feature import Feature, Node, Parts


def _build(node: Node) -> Parts:
    from gpumem_exporter.features.orphans.orphan_findings import orphans_left_behind
    from gpumem_exporter.features.orphans.orphan_metrics import ORPHANS
    from gpumem_exporter.features.orphans.orphan_search import OrphanSearch

    node.store.find_orphans = OrphanSearch().find
    return Parts(collectors=[ORPHANS], findings=[orphans_left_behind])


FEATURE = Feature(build=_build)
