"""Ranks of launchers: pids, ranks and bytes of each process."""

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


def test_workers_of_data_loaders_do_not_report_and_spawned_ranks_do(start_library: StartLibrary) -> None:
    program = start_library(PYTHON, "torch_workers.py")
    (trainer,) = program.compare(trainer=1, forked=2, spawned=1)["trainer"]
    assert trainer.more["batches"] == [2] * 8
    ranks = program.compare(main=1, rank=2)["rank"]
    assert [(made.rank, made.world_size) for made in ranks] == [(0, 2), (1, 2)]
    program.end()
