"""The metrics page of random nodes with conflicting pids, namespaces and devices."""

from __future__ import annotations

import itertools
import re

from hypothesis import given, settings
from hypothesis import strategies as st
from prometheus_client.openmetrics.parser import text_string_to_metric_families as parse_openmetrics
from prometheus_client.parser import text_string_to_metric_families as parse_text

from gpumem_exporter.core.samples import Snapshot
from tests.support.exposition_builders import exposition, read, text_of
from tests.support.random_snapshots import SNAPSHOTS


@given(st.lists(SNAPSHOTS, min_size=1, max_size=3))
@settings(max_examples=25)
def test_both_formats_have_the_same_samples_whatever_earlier_pages_had(history: list[Snapshot]) -> None:
    writer = exposition()
    for known in history:
        openmetrics = text_of(writer, known, openmetrics=True)
        assert openmetrics == text_of(exposition(), known, openmetrics=True)
    text = text_of(writer, known)
    assert read(parse_text(text)) == read(parse_openmetrics(openmetrics))
    # The lines of a family are consecutive, so its name occurs once after equal neighbors are merged.
    names = [re.split("[{ ]", line)[0] for line in text.split("\n") if line and not line.startswith("#")]
    names = [re.sub("(?<=_duration_seconds)_(bucket|count|sum)$", "", name) for name in names]
    families = [name for name, _ in itertools.groupby(names)]
    for header in ("# TYPE ", "# HELP "):
        assert [line.split(" ")[2] for line in text.split("\n") if line.startswith(header)] == families
    assert len(families) == len(set(families))
