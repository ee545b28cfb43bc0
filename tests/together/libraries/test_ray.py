"""Actors of ray: each has its job, and a name of its own."""

from __future__ import annotations

from tests.support.library_programs import PYTHON, StartLibrary


def test_actors_of_ray_have_their_job_and_differ_by_their_names(start_library: StartLibrary) -> None:
    program = start_library(PYTHON, "ray_actors.py", RAY_USAGE_STATS_ENABLED="0")
    actors = program.compare(driver=1, actor=3)["actor"]
    documents = program.exporter.processes()
    infos = program.exporter.metrics().infos()
    expected = {made.pid: f"ray::Rollout({made.more['name'] or made.more['actor'][:8]})" for made in actors}
    assert len(set(expected.values())) == 3
    assert {made.pid: documents[made.pid]["command"] for made in actors} == expected
    assert {made.pid: infos[str(made.pid)]["command"] for made in actors} == expected
    for made in actors:
        assert documents[made.pid]["ray_job_id"] == infos[str(made.pid)]["ray_job_id"] == made.more["job"] != "ffffffff"
    program.end()
