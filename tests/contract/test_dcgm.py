"""The expressions of docs/dcgm.md, over series as dcgm-exporter writes them."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.support.paths import REPOSITORY
from tests.support.processes.running_command import promtool_check, promtool_tests

pytestmark = pytest.mark.tools

GIB = 2**30
L4 = "GPU-c2f76b33-7953-256e-8f33-1343419b1a1c"
H100 = "GPU-559c7f49-0000-0000-0000-000000000000"
NODE = "i-030791dc5a37cd257"
OF_L4 = (
    f'gpu="0",UUID="{L4}",pci_bus_id="00000000:31:00.0",device="nvidia0",modelName="NVIDIA L4",Hostname="{NODE}",'
    'DCGM_FI_DRIVER_VERSION="580.105.08"'
)
OF_MIG = (
    f'gpu="1",UUID="{H100}",device="nvidia1",modelName="NVIDIA H100 80GB HBM3",GPU_I_PROFILE="3g.40gb",GPU_I_ID="%d",'
    f'Hostname="{NODE}",DCGM_FI_DRIVER_VERSION="570.195.03"'
)
DCGM = {
    # The page of an L4, as recorded; two pods share the device, so each series exists twice.
    f'DCGM_FI_PROF_GR_ENGINE_ACTIVE{{{OF_L4},namespace="ml",pod="a",container="c"}}': 0.0,
    f'DCGM_FI_PROF_GR_ENGINE_ACTIVE{{{OF_L4},namespace="ml",pod="b",container="c"}}': 0.0,
    f'DCGM_FI_DEV_POWER_USAGE{{{OF_L4},namespace="ml",pod="a",container="c"}}': 16.0,
    f'DCGM_FI_DEV_POWER_USAGE{{{OF_L4},namespace="ml",pod="b",container="c"}}': 16.0,
    # A busy device of another node.
    f"DCGM_FI_PROF_GR_ENGINE_ACTIVE{{{OF_L4.replace(L4, 'GPU-busy').replace(NODE, 'node-2')}}}": 0.96,
    f"DCGM_FI_PROF_GR_ENGINE_ACTIVE{{{OF_MIG % 1}}}": 0.0,
    f"DCGM_FI_PROF_GR_ENGINE_ACTIVE{{{OF_MIG % 2}}}": 0.0,
}
OURS = {
    f'gpumem_process_memory_used_bytes{{job="gpumem",instance="{NODE}",gpu="0",uuid="{L4}",pid="7"}}': 16 * GIB,
    f'gpumem_process_memory_used_bytes{{job="gpumem",instance="{NODE}",gpu="0",uuid="{L4}",pid="8"}}': 500 << 20,
    'gpumem_process_memory_used_bytes{job="gpumem",instance="node-2:9844",gpu="0",uuid="GPU-busy",pid="7"}': 8 * GIB,
    f'gpumem_process_info{{job="gpumem",instance="{NODE}",pid="7",workload="eval",user="ann",command="a"}}': 1,
    f'gpumem_process_info{{job="gpumem",instance="{NODE}",pid="8",workload="",user="bob",command="b"}}': 1,
    'gpumem_process_info{job="gpumem",instance="node-2:9844",pid="7",workload="train",user="ann",command="c"}': 1,
    f'gpumem_device_info{{job="gpumem",instance="{NODE}",gpu="1:0",uuid="MIG-a",parent_uuid="{H100}"}}': 1,
    f'gpumem_device_info{{job="gpumem",instance="{NODE}",gpu="0",uuid="{L4}"}}': 1,
    f'gpumem_device_memory_used_bytes{{job="gpumem",instance="{NODE}",gpu="1:0",uuid="MIG-a"}}': 9 * GIB,
    f'gpumem_device_memory_used_bytes{{job="gpumem",instance="{NODE}",gpu="0",uuid="{L4}"}}': 17 * GIB,
}
HELD = f'{{job="gpumem",instance="{NODE}",gpu="0",uuid="{L4}",pid="7",workload="eval",user="ann"}}'
EXPECTED: list[dict[str, float]] = [
    {HELD: 16 * GIB},
    {'{user="ann"}': 0.96 * 8 / 24, '{user="bob"}': 0.0},
    {f'{{host="{NODE}"}}': (16 * GIB + (500 << 20)) / 16},
    {f'{{parent_uuid="{H100}"}}': 9 * GIB},
]


def test_the_joins_with_dcgm_exporter_find_what_the_page_says(tmp_path: Path) -> None:
    page = (REPOSITORY / "docs" / "dcgm.md").read_text(encoding="utf-8")
    expressions = re.findall(r"^```promql\n(.*?)^```", page, flags=re.MULTILINE | re.DOTALL)
    series = {name: f"{value}x70" for name, value in {**DCGM, **OURS}.items()}
    checks = [promtool_check(*each) for each in zip(expressions, [3900.0] * 4, EXPECTED, strict=True)]
    promtool_tests(tmp_path, {"input_series": series, "promql_expr_test": checks}, interval="1m")
