"""The planner against real training on the emulated node, to the byte where that is possible."""

from __future__ import annotations

import pytest

from tests.emulation.fixtures import MakeNode
from tests.emulation.torch_process import TorchProcess
from tests.support.torch_release import with_the_planners_kernels


@with_the_planners_kernels
@pytest.mark.parametrize(
    ("scenario", "given"),
    [
        ("planned_allocations_are_those_of_the_device", {"precision": "fp32"}),
        ("planned_allocations_are_those_of_the_device", {"precision": "bf16"}),
        ("recurrent_networks_are_planned_as_cuda_runs_them_without_cudnn", {}),
        ("a_sharded_plan_is_close_to_fully_shard", {}),
        ("the_planned_batch_trains_and_a_quarter_more_does_not", {}),
    ],
)
def test_a_plan(make_node: MakeNode, scenario: str, given: dict[str, str]) -> None:
    with TorchProcess(make_node(devices=1, total_bytes=2 << 30)) as process:
        process.call_program("planned_training", scenario, **given)
