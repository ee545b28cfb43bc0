"""Ranks of launchers: pids, ranks and bytes of each process."""

from __future__ import annotations

from tests.emulation.node import EmulatedNode
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


def test_ranks_of_accelerate_launch(start_library: StartLibrary, node: EmulatedNode) -> None:
    launch = (PYTHON, "-m", "accelerate.commands.accelerate_cli", "launch", "--multi_gpu", "--num_processes", "2")
    program = start_library(*launch, "--main_process_port", "0", "accelerated_loop.py")
    ranks = program.compare(rank=2)["rank"]
    assert [(made.rank, made.world_size) for made in ranks] == [(0, 2), (1, 2)]
    for made in ranks:
        assert made.devices[node.uuid(made.more["local_rank"])][0] > 0
    program.end()
