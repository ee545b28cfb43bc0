"""Ranks of torchrun and actors of ray: pids, ranks, names and bytes of each process."""

from __future__ import annotations

from tests.support.exporter_process import ExporterProcess
from tests.support.library_programs import PYTHON, StartLibrary


def test_ranks_of_torchrun_with_ddp_and_fsdp(start_library: StartLibrary, exporter: ExporterProcess) -> None:
    torchrun = (PYTHON, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")
    program = start_library(*torchrun, "ddp_and_fsdp.py")
    replicated = program.compare(ddp=2)["ddp"]
    assert [(made.rank, made.world_size) for made in replicated] == [(0, 2), (1, 2)]
    action = exporter.act("reset_peak", target={"workload": "job", "rank": "1"})
    assert {(row["pid"], row["outcome"]) for row in action["results"]} == {(replicated[1].pid, "done")}
    sharded = program.compare(fsdp=2)["fsdp"]
    assert [made.pid for made in sharded] == [made.pid for made in replicated]
    program.end()


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
