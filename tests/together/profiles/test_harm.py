"""Profiles in a loop beside many kinds of jobs: the short form of `python -m benchmarks.guest`, without its times."""

from __future__ import annotations

import pytest

from benchmarks.guest import Profiles, jobs
from benchmarks.place import Place

KINDS = ("plain", "wrapped", "dtensor", "fsdp", "checkpointed", "swapped", "out_of_memory")
"""One of each way in which gradients and models come and go; the benchmark has all."""


@pytest.mark.slow
def test_no_kind_of_job_is_harmed_by_profiles() -> None:
    with Place(real_gpu=False, devices=2, fresh=False) as place:
        exporter = place.exporter()
        profiles = Profiles(exporter)
        try:
            seen = jobs(place, exporter, KINDS, seconds=3, together=2)
        finally:
            profiles.end()
    assert {kind: each["error"] for kind, each in seen.items() if "error" in each} == {}
    assert seen.keys() == set(KINDS)
    assert {kind: each["ooms"] for kind, each in seen.items() if each["ooms"] > each["ooms_alone"]} == {}
    assert profiles.failures == []
    assert profiles.outcomes["done"] > 0
