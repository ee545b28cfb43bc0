"""The results of queries on given series, evaluated by promtool: of the dashboards, and of docs/dcgm.md."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.support.paths import REPOSITORY
from tests.support.processes.running_command import promtool_check, promtool_tests
from tests.support.truth.panel_queries import Scope, expression, letter_of, load_dashboard, panel_of

pytestmark = pytest.mark.tools

GIB = 1 << 30
ERROR_AT = 1500
"""promtool's time starts at 0; the error is at 25 minutes, and the queries are evaluated at 30."""
EVALUATED_AT = 1800

ON = 'instance="a:9844", gpu="0", uuid="GPU-0"'
PROCESS = f'{ON}, pid="7", workload="train", rank="0"'
OTHER = f'{ON}, pid="8", workload="notebook", rank=""'


@dataclass(frozen=True)
class Oom:
    """The values of an error in GiB, and the reclaimable memory of another process on its device."""

    requested: float
    free: float
    limit: float
    allocated: float
    reclaimable: float | None = 0.0
    fragmented: float | None = 0.0
    others_reclaimable: float = 0.0

    @property
    def reserved(self) -> float:
        return self.allocated + (self.reclaimable or 0.0) + (self.fragmented or 0.0)

    def series(self) -> dict[str, str]:
        values = {
            "requested": self.requested,
            "device_free": self.free,
            "limit": self.limit,
            "allocated": self.allocated,
            "reserved": self.reserved,
            "reclaimable": self.reclaimable,
            "fragmented": self.fragmented,
        }
        series = {f"gpumem_last_oom_timestamp_seconds{{{PROCESS}}}": f"_x100 {ERROR_AT}x20"}
        for name, value in values.items():
            if value is not None:
                series[f"gpumem_last_oom_{name}_bytes{{{PROCESS}}}"] = f"_x100 {round(value * GIB)}x20"
        # The values before the error; later ones must not count.
        cache = round(self.others_reclaimable * GIB)
        series[f"gpumem_torch_reclaimable_bytes{{{OTHER}}}"] = f"{cache}x100 0x20"
        series[f"gpumem_torch_reclaimable_bytes{{{PROCESS}}}"] = f"{100 * GIB}x100"
        return series


def check(tmp_path: Path, series: dict[str, str], query: str, expected: dict[str, float]) -> None:
    """Assert that the expression returns exactly these series at EVALUATED_AT, with samples every 15 seconds."""
    checks = [promtool_check(query, EVALUATED_AT, expected)]
    promtool_tests(tmp_path, {"input_series": series, "promql_expr_test": checks})


VERDICTS = {
    "the memory was free a moment later": (1, Oom(requested=2, free=3, limit=80, allocated=60)),
    "other processes have enough cache": (2, Oom(requested=8, free=2, limit=80, allocated=40, others_reclaimable=10)),
    "the process's pools have enough cache": (2, Oom(requested=8, free=2, limit=80, allocated=40, reclaimable=7)),
    "enough is fragmented": (3, Oom(requested=8, free=2, limit=80, allocated=60, fragmented=10)),
    "the cache of others does not change the limit": (
        3,
        Oom(requested=8, free=2, limit=50, allocated=30, fragmented=18, others_reclaimable=20),
    ),
    "fragmented below a limit, on a device with free memory": (
        3,
        Oom(requested=8, free=30, limit=50, allocated=30, fragmented=18),
    ),
    "other processes use the memory": (
        4,
        Oom(requested=8, free=2, limit=80, allocated=30, fragmented=3, others_reclaimable=1),
    ),
    "only the limit": (5, Oom(requested=8, free=30, limit=40, allocated=38)),
    "too large for the device": (6, Oom(requested=8, free=2, limit=80, allocated=75)),
    "not enough values": (0, Oom(requested=8, free=2, limit=80, allocated=60, reclaimable=None, fragmented=None)),
}


@pytest.mark.parametrize("case", VERDICTS)
def test_the_verdict_is_the_cheapest_sufficient_remedy(case: str, tmp_path: Path) -> None:
    verdict, oom = VERDICTS[case]
    query = expression("oom", "Verdict", node="a:9844", pid="7")
    check(tmp_path, oom.series(), query, {f"{{{PROCESS}}}": verdict})
    mapping, *_ = panel_of(load_dashboard("oom"), "Verdict")["fieldConfig"]["defaults"]["mappings"]
    assert mapping["options"][str(verdict)]["text"]


def test_the_ledger_is_the_last_one_before_the_error(tmp_path: Path) -> None:
    series = {
        f"gpumem_last_oom_timestamp_seconds{{{PROCESS}}}": f"_x100 {ERROR_AT}x20",
        f'gpumem_ledger_bytes{{{ON}, category="torch_allocated"}}': "5x98 70x1 3x40",
        'gpumem_ledger_bytes{instance="b:9844", gpu="0", uuid="GPU-0", category="torch_allocated"}': "9x200",
    }
    query = expression("oom", "Ledger at the last scrape", "A", node="a:9844", pid="7")
    check(tmp_path, series, query, {'{gpu="0"}': 70})


def test_the_largest_process_is_found_on_each_node_with_equal_pids(tmp_path: Path) -> None:
    series = {}
    for node, workload, used in (("a:9844", "train", 40), ("b:9844", "serve", 50)):
        here = f'instance="{node}"'
        device = f'{here}, gpu="0", uuid="GPU-{node}"'
        series[f'gpumem_process_memory_used_bytes{{{device}, pid="7"}}'] = f"{used}x200"
        series[f'gpumem_process_memory_used_bytes{{{device}, pid="9"}}'] = "1x200"
        labels = f'workload="{workload}", rank="0", user="u", command="c", k8s_pod=""'
        series[f'gpumem_process_info{{{here}, pid="7", {labels}}}'] = "1x200"
        series[f'gpumem_process_info{{{here}, pid="9", workload="small", user="u", command="c"}}'] = "1x200"
    title = "Devices by pressure"
    query = expression("fleet", title, letter_of("fleet", title, "Its bytes"))
    expected: dict[str, float] = {
        '{instance="a:9844", gpu="0", uuid="GPU-a:9844", pid="7", workload="train", user="u", command="c"}': 40,
        '{instance="b:9844", gpu="0", uuid="GPU-b:9844", pid="7", workload="serve", user="u", command="c"}': 50,
    }
    check(tmp_path, series, query, expected)


def test_equal_nodes_of_two_clusters_are_two_jobs_of_one_user(tmp_path: Path) -> None:
    series = {}
    for cluster, used, cache in (("east", 40, 10), ("west", 50, 20)):
        here = f'cluster="{cluster}", instance="a:9844"'
        device = f'{here}, gpu="0", uuid="GPU-0"'
        series[f'gpumem_process_memory_used_bytes{{{device}, pid="7"}}'] = f"{used}x200"
        series[f'gpumem_torch_idle_cache_bytes{{{device}, pid="7", workload="train", rank=""}}'] = f"{cache}x200"
        info = f'{here}, pid="7", workload="train", rank="", user="ann", k8s_namespace="ml"'
        series[f"gpumem_process_info{{{info}}}"] = "1x200"
    # Another user's process on the same device.
    bobs = 'cluster="west", instance="a:9844"'
    series[f'gpumem_process_memory_used_bytes{{{bobs}, gpu="0", uuid="GPU-0", pid="9"}}'] = "5x200"
    series[f'gpumem_process_info{{{bobs}, pid="9", user="bob"}}'] = "1x200"

    def job(cluster: str) -> str:
        return f'{{cluster="{cluster}", instance="a:9844", workload="train", user="ann", k8s_namespace="ml"}}'

    bob = f'{{{bobs}, user="bob"}}'
    for title, heading, expected in (
        ("Jobs", "Used", {job("east"): 40, job("west"): 50, bob: 5}),
        ("Jobs", "Idle cache", {job("east"): 10, job("west"): 20}),
        ("Users", "Used", {'{user="ann"}': 90, '{user="bob"}': 5}),
        ("Users", "Processes", {'{user="ann"}': 2, '{user="bob"}': 1}),
        ("Users", "Devices", {'{user="ann"}': 2, '{user="bob"}': 1}),
        ("Namespaces", "Used", {'{k8s_namespace="ml"}': 90, "{}": 5}),
    ):
        check(tmp_path, series, expression("fleet", title, letter_of("fleet", title, heading)), dict(expected))
    letter = letter_of("fleet", "Jobs", "Used")
    check(tmp_path, series, expression("fleet", "Jobs", letter, user="bob"), {bob: 5})
    check(tmp_path, series, expression("fleet", "Jobs", letter, cluster="east"), {job("east"): 40})
    check(tmp_path, series, expression("fleet", "Jobs", letter, namespace="none"), {})


def test_the_hours_of_a_user_are_the_sums_of_the_minutes_of_its_owners(tmp_path: Path) -> None:
    series = {}
    held, reported, idle = (
        f"owner:gpumem_{name}"
        for name in (
            "process_memory_used_bytes:mean1m",
            "process_memory_used_bytes:reported_mean1m",
            "torch_idle_cache_bytes:mean1m",
        )
    )
    owners = (("east", "ann", {held: 40, reported: 40, idle: 4}), ("west", "ann", {held: 20, reported: 20, idle: 2}))
    for cluster, user, values in (*owners, ("west", "bob", {held: 11})):
        for name, gib in values.items():
            series[f'{name}{{cluster="{cluster}", user="{user}"}}'] = f"_x40 {gib * GIB}x59"  # an hour of minutes
    for heading, expected in (
        ("Held", {"ann": 60, "bob": 11}),
        ("Reported", {"ann": 1}),
        ("Idle cache share", {"ann": 0.1}),
        ("Held by idle jobs", {"ann": 0, "bob": 0}),  # no activity is known
    ):
        query = expression("usage", "Users", letter_of("usage", "Users", heading))
        check(tmp_path, series, query, {f'{{user="{user}"}}': value for user, value in expected.items()})


COVERED: dict[str, tuple[dict[str, str], float | None]] = {
    "a node whose driver lists every process": ({}, 0.75),
    "no list of processes on a second device": (
        {'gpumem_device_memory_total_bytes{instance="a:9844", gpu="1", uuid="GPU-1"}': "9x200"},
        None,
    ),
    "a silent reporter that has exited": (
        {
            'gpumem_process_info{instance="a:9844", pid="11", workload="", reporting="false"}': "1x200",
            'gpumem_reporter_up{instance="a:9844", pid="11", workload="", rank=""}': "0x200",
        },
        0.75,
    ),
}


@pytest.mark.parametrize("case", COVERED)
def test_coverage_is_the_share_of_reporting_processes_where_all_are_known(case: str, tmp_path: Path) -> None:
    more, ratio = COVERED[case]
    series = {
        f"gpumem_device_memory_total_bytes{{{ON}}}": "100x200",
        f'gpumem_ledger_bytes{{{ON}, category="other_processes"}}': "10x200",
        f'gpumem_process_memory_used_bytes{{{ON}, pid="7"}}': "30x200",
        f'gpumem_process_memory_used_bytes{{{ON}, pid="8"}}': "10x200",
        'gpumem_process_info{instance="a:9844", pid="7", workload="train", reporting="true"}': "1x200",
        'gpumem_process_info{instance="a:9844", pid="8", workload="", reporting="false"}': "1x200",
        **more,
    }
    for dashboard in ("fleet", "node"):
        query = expression(dashboard, "Coverage", node="a:9844")
        check(tmp_path, series, query, {} if ratio is None else {"{}": ratio})


PRESSED = {
    "for ten minutes and the minute of the rise": ("20x79 95x80", 660.0),
    "no longer": ("95x79 20x80", 0.0),
}


@pytest.mark.parametrize("case", PRESSED)
def test_above_90_percent_has_the_duration(case: str, tmp_path: Path) -> None:
    used, seconds = PRESSED[case]
    free = " ".join(f"{100 - int(part.split('x')[0])}x{part.split('x')[1]}" for part in used.split())
    series = {
        f'gpumem_ledger_bytes{{{ON}, category="torch_allocated"}}': used,
        f'gpumem_ledger_bytes{{{ON}, category="torch_reclaimable"}}': "0x200",
        f'gpumem_ledger_bytes{{{ON}, category="driver_reserved"}}': "1000x200",
        f'gpumem_ledger_bytes{{{ON}, category="free"}}': free,
    }
    title = "Devices by pressure"
    query = expression("fleet", title, letter_of("fleet", title, "Above 90 % for"))
    check(tmp_path, series, query, {f"{{{ON}}}": seconds})


def test_time_to_full_uses_the_low_mark_and_the_reclaimable_cache(tmp_path: Path) -> None:
    # A sawtooth with steps of one minute; the low mark grows by one byte per second, and 5,400 bytes are left.
    teeth = " ".join(f"{60 * minute + tooth}" for minute in range(130) for tooth in (0, 900, 900, 900))
    series = {
        f"gpumem_torch_allocated_bytes{{{PROCESS}}}": teeth,
        f"gpumem_torch_reclaimable_bytes{{{PROCESS}}}": "1400x200",
        f"gpumem_device_memory_free_bytes{{{ON}}}": "4000x200",
    }
    query = expression("workload", "Time to full", range_seconds=900, workload="train")
    check(tmp_path, series, f"round({query})", {"{}": 5400})
    slope = expression("workload", "Leak slope", range_seconds=900, workload="train")
    check(tmp_path, series, f"round({slope}, 0.001)", {"{}": 1})


def test_a_low_mark_that_varies_more_than_it_grows_has_no_time_to_full(tmp_path: Path) -> None:
    # Two programs alternate every five minutes; the larger one is last.
    turns = " ".join(" ".join([str(floor)] * 20) for floor in (10, 900) * 4)
    series = {
        f"gpumem_torch_allocated_bytes{{{PROCESS}}}": turns,
        f"gpumem_torch_reclaimable_bytes{{{PROCESS}}}": "1400x200",
        f"gpumem_device_memory_free_bytes{{{ON}}}": "4000x200",
        f"gpumem_device_memory_used_bytes{{{ON}}}": turns,
        f'gpumem_ledger_bytes{{{ON}, category="free"}}': "4000x200",
    }
    query = expression("workload", "Time to full", workload="train")
    check(tmp_path, series, expression("workload", "Leak slope", workload="train") + " > bool 0", {"{}": 1})
    check(tmp_path, series, query, {})
    title = "Devices by pressure"
    check(tmp_path, series, expression("fleet", title, letter_of("fleet", title, "Full in")), {})


def test_ranks_at_different_points_of_a_step_are_balanced(tmp_path: Path) -> None:
    def rank(number: int) -> str:
        return (
            f'instance="a:9844", gpu="{number}", uuid="GPU-{number}", pid="{number}", workload="train", rank="{number}"'
        )

    series = {
        f"gpumem_torch_allocated_bytes{{{rank(0)}}}": " ".join(["10", "900"] * 80),
        f"gpumem_torch_allocated_bytes{{{rank(1)}}}": " ".join(["900", "10"] * 80),
        f"gpumem_torch_allocated_bytes{{{rank(2)}}}": " ".join(["10", "960"] * 80),
    }
    check(tmp_path, series, expression("workload", "Imbalance of ranks", workload="train"), {"{}": 60})


def test_a_silent_reporter_is_listed_with_its_process_and_duration(tmp_path: Path) -> None:
    series = {}
    for node, up in (("a:9844", 0), ("b:9844", 1)):
        who = f'instance="{node}", pid="7", workload="train", rank="0"'
        series[f"gpumem_reporter_up{{{who}}}"] = f"{up}x200"
        series[f"gpumem_reporter_last_report_timestamp_seconds{{{who}}}"] = "1500x200"
        series[f'gpumem_process_info{{{who}, command="python t.py", user="ann", k8s_pod="p"}}'] = "1x200"
    query = expression("fleet", "Silent processes")
    labels = '{instance="a:9844", pid="7", workload="train", rank="0", command="python t.py", user="ann", k8s_pod="p"}'
    check(tmp_path, series, query, {labels: 300})


def test_the_annotation_of_an_error_has_its_time_and_the_range_of_its_post_mortem(tmp_path: Path) -> None:
    (annotation,) = (mark for mark in load_dashboard("fleet")["annotations"]["list"] if mark["name"] == "Out of memory")
    scope = Scope(EVALUATED_AT, variables={"cluster": ".*", "node": ".*", "gpu": ".*", "workload": ".*"})
    series = {f"gpumem_last_oom_timestamp_seconds{{{PROCESS}}}": "_x100 1500.25x20"}
    labels = f'{{{PROCESS}, x_from="900000", x_to="1561000"}}'
    check(tmp_path, series, scope.fill(annotation["expr"]), {labels: 1500250})


def test_only_exporters_that_cannot_be_scraped_count_as_down(tmp_path: Path) -> None:
    series = {
        'up{instance="a:9844", job="gpumem"}': "1x99 0x20",
        'gpumem_exporter_build_info{instance="a:9844", job="gpumem"}': "1x99 stale",
        'up{instance="b:9844", job="gpumem"}': "1x200",
        'gpumem_exporter_build_info{instance="b:9844", job="gpumem"}': "1x200",
        'up{instance="a:9100", job="node"}': "0x200",
    }
    check(tmp_path, series, expression("exporter", "Exporters down"), {"{}": 1})
    check(tmp_path, series, expression("fleet", "Down", "C"), {"{}": 1})


# --- Beside dcgm-exporter, whose series have these labels

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
