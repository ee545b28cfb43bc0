"""Pages of metrics of a snapshot, and their samples."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable
from itertools import chain

from prometheus_client import Metric

from gpumem_exporter.core.samples import Snapshot
from gpumem_exporter.features.engines.engine_metrics import ENGINE
from gpumem_exporter.features.oom.oom_metrics import OOM
from gpumem_exporter.features.orphans.orphan_metrics import ORPHANS
from gpumem_exporter.metrics.exposition import Exposition
from gpumem_exporter.metrics.instruments import Registry

Read = dict[tuple[str, frozenset[tuple[str, str]]], float]


def exposition(registry: Registry | None = None, *, off: Collection[str] = ()) -> Exposition:
    """Return an exposition with a constant clock."""
    return Exposition(
        registry or Registry(), (OOM, ORPHANS, ENGINE), version="1", source="nvml", off=off, clock=lambda: 0.0
    )


def whole_text_of(
    writer: Exposition, snapshot: Snapshot, *, openmetrics: bool = False, collectors: Collection[str] = ()
) -> str:
    """Return a page."""
    return b"".join(chain(*writer.render(snapshot, openmetrics=openmetrics, collectors=collectors))).decode()


def text_of(writer: Exposition, snapshot: Snapshot, *, openmetrics: bool = False) -> str:
    """Return a page without the exporter's process, so that two pages of one snapshot are equal."""
    page = whole_text_of(writer, snapshot, openmetrics=openmetrics)
    return re.sub(r"^(# \w+ )?(process|python)_.*\n", "", page, flags=re.MULTILINE)


def read(families: Iterable[Metric]) -> tuple[dict[str, tuple[str, str]], Read]:
    """Return type and help of each family, and each sample; a duplicate sample fails."""
    kinds: dict[str, tuple[str, str]] = {}
    samples: Read = {}
    for family in families:
        kinds[family.name] = (family.type, family.documentation)
        for sample in family.samples:
            identity = (sample.name, frozenset(sample.labels.items()))
            assert identity not in samples, f"doubled: {identity}"
            samples[identity] = float(sample.value)
    return kinds, samples
