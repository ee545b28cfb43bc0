"""What the dashboards' queries make of given series, by Prometheus' own engine: verdicts, joins, times."""

from __future__ import annotations

import json
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from gpumem_dashboards.queries import Scope, all_panels

from tests.support.paths import REPOSITORY

pytestmark = pytest.mark.tools

FOLDER = REPOSITORY / "grafana" / "dashboards"
GIB = 1 << 30
EPOCH_HAPPENED = 1500
"""promtool's time begins at nought; the error is at 25 minutes, and it is asked at 30."""
ASKED_AT = 1800

ON = 'instance="a:9844", gpu="0", uuid="GPU-0"'
DIED = f'{ON}, pid="7", workload="train", rank="0"'
OTHER = f'{ON}, pid="8", workload="notebook", rank=""'


@dataclass(frozen=True)
class Oom:
    """An error's figures in GiB, and what another process on its device could have given back."""

    asked: float
    free: float
    limit: float
    tensors: float
    reclaimable: float | None = 0.0
    fragmented: float | None = 0.0
    others_cache: float = 0.0

    @property
    def reserved(self) -> float:
        return self.tensors + (self.reclaimable or 0.0) + (self.fragmented or 0.0)

    def series(self) -> dict[str, str]:
        figures = {
            "requested": self.asked,
            "device_free": self.free,
            "limit": self.limit,
            "allocated": self.tensors,
            "reserved": self.reserved,
            "reclaimable": self.reclaimable,
            "fragmented": self.fragmented,
        }
        made = {f"gpumem_last_oom_timestamp_seconds{{{DIED}}}": f"_x100 {EPOCH_HAPPENED}x20"}
        for name, value in figures.items():
            if value is not None:
                made[f"gpumem_last_oom_{name}_bytes{{{DIED}}}"] = f"_x100 {round(value * GIB)}x20"
        # Before the error; afterwards it has given all of it back, and more must not count.
        cache = round(self.others_cache * GIB)
        made[f"gpumem_torch_reclaimable_bytes{{{OTHER}}}"] = f"{cache}x100 0x20"
        made[f"gpumem_torch_reclaimable_bytes{{{DIED}}}"] = f"{100 * GIB}x100"
        return made


def expression(dashboard: str, title: str, letter: str = "A", range_seconds: int = 1800, **variables: str) -> str:
    """A panel's query with everything filled in."""
    document = json.loads((FOLDER / f"{dashboard}.json").read_text())
    (panel,) = (panel for panel in all_panels(document) if panel["title"] == title)
    (target,) = (target for target in panel["targets"] if target["refId"] == letter)
    standing = {variable["name"]: ".*" for variable in document["templating"]["list"]} | variables
    return Scope(ASKED_AT, range_seconds, scrape_seconds=15, variables=standing).fill(target["expr"])


def letter_of(dashboard: str, title: str, heading: str) -> str:
    """The query behind a table's column."""
    document = json.loads((FOLDER / f"{dashboard}.json").read_text())
    (panel,) = (panel for panel in all_panels(document) if panel["title"] == title)
    (organize,) = (change for change in panel["transformations"] if change["id"] == "organize")
    (name,) = (name for name, shown in organize["options"]["renameByName"].items() if shown == heading)
    return str(name).removeprefix("Value #")


def check(tmp_path: Path, series: dict[str, str], asked: str, expected: dict[str, float]) -> None:
    """The expression gives exactly these series at half an hour, of samples every 15 seconds."""
    promtool = shutil.which("promtool")
    assert promtool, "promtool is not on PATH: run the tests by `sh tests/run.sh`, which brings it"
    samples = [{"labels": labels, "value": value} for labels, value in expected.items()]
    test: dict[str, Any] = {
        "interval": "15s",
        "input_series": [{"series": name, "values": values} for name, values in series.items()],
        "promql_expr_test": [{"expr": asked, "eval_time": f"{ASKED_AT}s", "exp_samples": samples}],
    }
    path = tmp_path / "test.json"
    path.write_text(json.dumps({"evaluation_interval": "15s", "tests": [test]}))
    told = subprocess.run([promtool, "test", "rules", str(path)], capture_output=True, text=True, check=False)
    assert told.returncode == 0, told.stdout + told.stderr


VERDICTS = {
    "another process held it for an instant": (1, Oom(asked=2, free=3, limit=80, tensors=60)),
    "the others' cache holds it": (2, Oom(asked=8, free=2, limit=80, tensors=40, others_cache=10)),
    "its own pools hold it": (2, Oom(asked=8, free=2, limit=80, tensors=40, reclaimable=7)),
    "pieces hold it": (3, Oom(asked=8, free=2, limit=80, tensors=60, fragmented=10)),
    "the others' cache would not lift its limit": (
        3,
        Oom(asked=8, free=2, limit=50, tensors=30, fragmented=18, others_cache=20),
    ),
    "pieces below a limit, on a device with room": (3, Oom(asked=8, free=30, limit=50, tensors=30, fragmented=18)),
    "others hold it": (4, Oom(asked=8, free=2, limit=80, tensors=30, fragmented=3, others_cache=1)),
    "its limit alone": (5, Oom(asked=8, free=30, limit=40, tensors=38)),
    "too large for the device": (6, Oom(asked=8, free=2, limit=80, tensors=75)),
    "too large for the device, whatever is not known": (
        6,
        Oom(asked=8, free=2, limit=80, tensors=75, reclaimable=None, fragmented=None),
    ),
    "not enough is known": (0, Oom(asked=8, free=2, limit=80, tensors=60, reclaimable=None, fragmented=None)),
}


@pytest.mark.parametrize("case", VERDICTS)
def test_the_verdict_names_the_cheapest_thing_that_would_have_made_room(case: str, tmp_path: Path) -> None:
    verdict, oom = VERDICTS[case]
    asked = expression("oom", "What the figures say", node="a:9844", pid="7")
    check(tmp_path, oom.series(), asked, {f"{{{DIED}}}": verdict})
    document = json.loads((FOLDER / "oom.json").read_text())
    (panel,) = (panel for panel in all_panels(document) if panel["title"] == "What the figures say")
    assert panel["fieldConfig"]["defaults"]["mappings"][0]["options"][str(verdict)]["text"]


def test_every_verdict_has_its_words_and_no_other() -> None:
    document = json.loads((FOLDER / "oom.json").read_text())
    (panel,) = (panel for panel in all_panels(document) if panel["title"] == "What the figures say")
    words = panel["fieldConfig"]["defaults"]["mappings"][0]["options"]
    assert {int(value) for value in words} == {verdict for verdict, _ in VERDICTS.values()}
    assert len({word["text"] for word in words.values()}) == len(words)


def test_the_ledger_of_the_moment_is_the_last_before_the_error_and_not_the_last_there_is(tmp_path: Path) -> None:
    series = {
        f"gpumem_last_oom_timestamp_seconds{{{DIED}}}": f"_x100 {EPOCH_HAPPENED}x20",
        f'gpumem_ledger_bytes{{{ON}, category="torch_allocated"}}': "5x98 70x1 3x40",
        'gpumem_ledger_bytes{instance="b:9844", gpu="0", uuid="GPU-0", category="torch_allocated"}': "9x200",
    }
    asked = expression("oom", "The ledger at that moment", "A", node="a:9844", pid="7")
    check(tmp_path, series, asked, {'{gpu="0"}': 70})


def test_the_largest_process_of_each_node_is_its_own_though_pids_are_the_same(tmp_path: Path) -> None:
    series = {}
    for node, workload, used in (("a:9844", "train", 40), ("b:9844", "serve", 50)):
        here = f'instance="{node}"'
        device = f'{here}, gpu="0", uuid="GPU-{node}"'
        series[f'gpumem_process_memory_used_bytes{{{device}, pid="7"}}'] = f"{used}x200"
        series[f'gpumem_process_memory_used_bytes{{{device}, pid="9"}}'] = "1x200"
        labels = f'workload="{workload}", rank="0", user="u", command="c", k8s_pod=""'
        series[f'gpumem_process_info{{{here}, pid="7", {labels}}}'] = "1x200"
        series[f'gpumem_process_info{{{here}, pid="9", workload="small", user="u", command="c"}}'] = "1x200"
    title = "Devices, the most pressed first"
    asked = expression("fleet", title, letter_of("fleet", title, "It holds"))
    expected = {
        '{instance="a:9844", gpu="0", uuid="GPU-a:9844", pid="7", workload="train", user="u", command="c"}': 40,
        '{instance="b:9844", gpu="0", uuid="GPU-b:9844", pid="7", workload="serve", user="u", command="c"}': 50,
    }
    check(tmp_path, series, asked, expected)


PRESSED = {
    "for ten minutes, and the minute before in which it rose": ("20x79 95x80", 660.0),
    "never": ("20x200", 0.0),
    "not any more": ("95x79 20x80", 0.0),
    "all the time": ("95x200", 1800.0),
}


@pytest.mark.parametrize("case", PRESSED)
def test_above_ninety_per_cent_says_since_when(case: str, tmp_path: Path) -> None:
    used, seconds = PRESSED[case]
    free = " ".join(f"{100 - int(part.split('x')[0])}x{part.split('x')[1]}" for part in used.split())
    series = {
        f'gpumem_ledger_bytes{{{ON}, category="torch_allocated"}}': used,
        f'gpumem_ledger_bytes{{{ON}, category="torch_reclaimable"}}': "0x200",
        f'gpumem_ledger_bytes{{{ON}, category="driver_reserved"}}': "1000x200",
        f'gpumem_ledger_bytes{{{ON}, category="free"}}': free,
    }
    title = "Devices, the most pressed first"
    asked = expression("fleet", title, letter_of("fleet", title, "Above 90 % for"))
    check(tmp_path, series, asked, {f"{{{ON}}}": seconds})


def test_cache_that_a_clear_gives_back_is_no_pressure(tmp_path: Path) -> None:
    series = {
        f'gpumem_ledger_bytes{{{ON}, category="torch_allocated"}}': "30x200",
        f'gpumem_ledger_bytes{{{ON}, category="torch_reclaimable"}}': "65x200",
        f'gpumem_ledger_bytes{{{ON}, category="unattributed"}}': "-5x200",
        f'gpumem_ledger_bytes{{{ON}, category="driver_reserved"}}': "3x200",
        f'gpumem_ledger_bytes{{{ON}, category="free"}}': "10x200",
    }
    title = "Devices, the most pressed first"
    asked = expression("fleet", title, letter_of("fleet", title, "Pressure"))
    check(tmp_path, series, asked, {f"{{{ON}}}": 0.25})


def test_time_to_full_follows_the_floor_of_the_steps_and_counts_the_cache_as_room(tmp_path: Path) -> None:
    # A sawtooth of steps of a minute whose floor rises by a byte a second; 5,400 bytes are left.
    teeth = " ".join(f"{60 * minute + tooth}" for minute in range(130) for tooth in (0, 900, 900, 900))
    series = {
        f"gpumem_torch_allocated_bytes{{{DIED}}}": teeth,
        f"gpumem_torch_reclaimable_bytes{{{DIED}}}": "1400x200",
        f"gpumem_device_memory_free_bytes{{{ON}}}": "4000x200",
    }
    asked = expression("workload", "Time to full", range_seconds=900, workload="train")
    check(tmp_path, series, f"round({asked})", {"{}": 5400})
    slope = expression("workload", "Leak slope", range_seconds=900, workload="train")
    check(tmp_path, series, f"round({slope}, 0.001)", {"{}": 1})


def test_a_sawtooth_that_does_not_rise_is_never_full(tmp_path: Path) -> None:
    series = {
        f"gpumem_torch_allocated_bytes{{{DIED}}}": " ".join(["10", "900", "900", "900"] * 40),
        f"gpumem_torch_reclaimable_bytes{{{DIED}}}": "1400x200",
        f"gpumem_device_memory_free_bytes{{{ON}}}": "4000x200",
    }
    check(tmp_path, series, expression("workload", "Time to full", workload="train"), {})


def test_a_floor_that_goes_up_and_down_by_more_than_it_rises_is_never_full(tmp_path: Path) -> None:
    # Two programs take turns every five minutes; at the end it happens to be the larger one's.
    turns = " ".join(" ".join([str(floor)] * 20) for floor in (10, 900) * 4)
    series = {
        f"gpumem_torch_allocated_bytes{{{DIED}}}": turns,
        f"gpumem_torch_reclaimable_bytes{{{DIED}}}": "1400x200",
        f"gpumem_device_memory_free_bytes{{{ON}}}": "4000x200",
        f"gpumem_device_memory_used_bytes{{{ON}}}": turns,
        f'gpumem_ledger_bytes{{{ON}, category="free"}}': "4000x200",
    }
    asked = expression("workload", "Time to full", workload="train")
    check(tmp_path, series, expression("workload", "Leak slope", workload="train") + " > bool 0", {"{}": 1})
    check(tmp_path, series, asked, {})
    title = "Devices, the most pressed first"
    check(tmp_path, series, expression("fleet", title, letter_of("fleet", title, "Full in")), {})


def test_ranks_at_different_points_of_a_step_are_not_unequal(tmp_path: Path) -> None:
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


def test_a_reporter_that_fell_silent_is_listed_with_who_it_is_and_for_how_long(tmp_path: Path) -> None:
    series = {}
    for node, up in (("a:9844", 0), ("b:9844", 1)):
        who = f'instance="{node}", pid="7", workload="train", rank="0"'
        series[f"gpumem_reporter_up{{{who}}}"] = f"{up}x200"
        series[f"gpumem_reporter_last_report_timestamp_seconds{{{who}}}"] = "1500x200"
        series[f'gpumem_process_info{{{who}, command="python t.py", user="ann", k8s_pod="p"}}'] = "1x200"
    asked = expression("fleet", "Reporters that went silent")
    labels = '{instance="a:9844", pid="7", workload="train", rank="0", command="python t.py", user="ann", k8s_pod="p"}'
    check(tmp_path, series, asked, {labels: 300})


def test_an_error_is_marked_at_its_own_moment_with_the_times_of_its_post_mortem(tmp_path: Path) -> None:
    document = json.loads((FOLDER / "fleet.json").read_text())
    (annotation,) = (mark for mark in document["annotations"]["list"] if mark["name"] == "Out of memory")
    scope = Scope(ASKED_AT, variables={"node": ".*", "gpu": ".*", "workload": ".*"})
    series = {f"gpumem_last_oom_timestamp_seconds{{{DIED}}}": "_x100 1500.25x20"}
    labels = f'{{{DIED}, x_from="900000", x_to="1561000"}}'
    check(tmp_path, series, scope.fill(annotation["expr"]), {labels: 1500250})


def test_an_exporter_that_cannot_be_scraped_is_down_and_another_target_is_none_of_ours(tmp_path: Path) -> None:
    series = {
        'up{instance="a:9844", job="gpumem"}': "1x99 0x20",
        'gpumem_exporter_build_info{instance="a:9844", job="gpumem"}': "1x99 stale",
        'up{instance="b:9844", job="gpumem"}': "1x200",
        'gpumem_exporter_build_info{instance="b:9844", job="gpumem"}': "1x200",
        'up{instance="a:9100", job="node"}': "0x200",
    }
    check(tmp_path, series, expression("exporter", "Exporters down"), {"{}": 1})
    check(tmp_path, series, expression("fleet", "Down", "C"), {"{}": 1})


def test_where_nothing_is_known_no_device_is_said_to_be_well(tmp_path: Path) -> None:
    check(tmp_path, {"up": "0x200"}, expression("fleet", "Devices above 90 %"), {})
