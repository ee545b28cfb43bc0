"""Pools of processes: the workers use CUDA and report, their parent does not."""

from __future__ import annotations

import signal

from tests.support.library_programs import PYTHON, StartLibrary


def test_workers_of_loky_report_and_their_parent_does_not(start_library: StartLibrary) -> None:
    program = start_library(PYTHON, "loky_pool.py")
    program.compare(parent=1, worker=2)
    program.end()


def test_processes_of_celery_s_pool_report_and_their_parent_does_not(start_library: StartLibrary) -> None:
    program = start_library(PYTHON, "-m", "celery", "--app", "celery_tasks", "worker", "--concurrency", "2")
    program.compare(parent=1, worker=2)
    program.end(signal.SIGTERM)


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
