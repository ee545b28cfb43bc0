"""Memory-hours by owner: a real Prometheus over six hours of scrapes, beside the integral of the scrapes.

The scrapes are written as blocks, and each rule is evaluated over them each minute. Not by promtool: it evaluates a
group at a second of each minute that depends on the path of the file, and leaves out an evaluation in the last second
of each two hours. Blocks have no markers of the ends of series, so Prometheus looks back only one scrape.
"""

from __future__ import annotations

import math
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from random import Random

import pytest
import yaml

from tests.support.panel_queries import Prometheus, expression, letter_of
from tests.support.paths import REPOSITORY
from tests.support.running_command import run_tool
from tests.support.running_prometheus import RunningPrometheus

GIB = 1 << 30
SCRAPE_SECONDS = 15.0
DURATION_SECONDS = 6 * 3600
OWNER = ("cluster", "user", "k8s_namespace", "workload", "slurm_account")
EVERY_OWNER = f"sum by ({', '.join(OWNER)}) (sum_over_time(%s[7h])) / 60"


@dataclass(frozen=True)
class Process:
    """A process on one device, with its bytes by seconds since its start."""

    node: str
    pid: int
    labels: Mapping[str, str]
    start: float
    end: float
    used: Callable[[float], float]
    idle: Callable[[float], float] | None = None
    """None if it does not report."""
    listed: bool = True
    """Whether the driver has its bytes; otherwise its reserved bytes count."""

    @property
    def cluster(self) -> str:
        return self.node.partition("/")[0]

    @property
    def owner(self) -> tuple[str, ...]:
        return (self.cluster, *(self.labels.get(name, "") for name in OWNER[1:]))


def steps(seconds: float) -> float:
    return (30 + 10 * math.sin(seconds / 200)) * GIB


ANN = {"user": "ann", "k8s_namespace": "ml", "workload": "train", "slurm_account": "vision"}
PROCESSES = (
    Process("east/a", 7, ANN, 0, 5.5 * 3600, steps, lambda seconds: 4 * GIB),
    # Another rank, the same owner; a restart in between.
    Process("east/b", 7, ANN, 600, 4000, steps, lambda seconds: 0.0),
    Process("east/b", 8, ANN, 4300, 20_000, steps, lambda seconds: seconds / 20_000 * 8 * GIB),
    # An equal name on an equal node of another cluster.
    Process("west/a", 7, ANN, 3000, 9000, lambda seconds: 20 * GIB, lambda seconds: 2 * GIB),
    # A process of a minute and a half beside one that runs on a node until the node goes away.
    Process("west/b", 1, {"user": "bob"}, 100, 190, lambda seconds: 70 * GIB),
    Process("west/b", 2, {"user": "bob"}, 500, DURATION_SECONDS, lambda seconds: 11 * GIB),
    # The driver has no value, as on some MIG devices.
    Process("east/a", 9, {"user": "carol", "workload": "chat"}, 7000, 9000, steps, lambda seconds: GIB, listed=False),
)
GONE = {"west/b": 10_000.0}
"""The nodes that go away, with the time."""


@dataclass
class Scrapes:
    """The samples by series, and their integral by owner in byte-hours."""

    series: dict[str, dict[str, list[str]]]
    held: dict[tuple[str, ...], float]
    reported: dict[tuple[str, ...], float]
    idle: dict[tuple[str, ...], float]

    def text(self) -> str:
        lines = []
        for name, of_labels in self.series.items():
            lines.append(f"# TYPE {name} gauge")
            lines += [f"{name}{{{labels}}} {sample}" for labels, samples in of_labels.items() for sample in samples]
        return "\n".join([*lines, "# EOF", ""])


def scraped(from_unix_seconds: float) -> Scrapes:
    """Scrape each node every 15 s, each at times of its own that vary by half a second."""
    rng = Random(0)
    found = Scrapes({}, defaultdict(float), defaultdict(float), defaultdict(float))
    for node in sorted({process.node for process in PROCESSES}):
        phase = rng.uniform(0, SCRAPE_SECONDS)
        ends = GONE.get(node, DURATION_SECONDS)
        for number in range(int(ends / SCRAPE_SECONDS)):
            at = phase + number * SCRAPE_SECONDS + rng.uniform(-0.5, 0.5)
            for process in PROCESSES:
                if process.node == node and process.start <= at < process.end:
                    _scrape(found, process, at - process.start, f"{from_unix_seconds + at:.3f}")
    return found


def _scrape(found: Scrapes, process: Process, seconds: float, moment: str) -> None:
    cluster, _, instance = process.node.partition("/")
    target = f'cluster="{cluster}",job="gpumem",instance="{instance}:9844",pid="{process.pid}"'
    device = f'{target},gpu="0",uuid="GPU-{instance}"'
    reporter = f'{device},workload="{process.labels.get("workload", "")}",rank=""'
    more = "".join(f',{name}="{value}"' for name, value in process.labels.items())
    used = process.used(seconds)

    def add(name: str, labels: str, value: float) -> None:
        found.series.setdefault(name, {}).setdefault(labels, []).append(f"{value!r} {moment}")

    add("gpumem_process_info", f'{target}{more},reporting="{str(process.idle is not None).lower()}"', 1)
    hours = SCRAPE_SECONDS / 3600
    found.held[process.owner] += used * hours
    if process.listed:
        add("gpumem_process_memory_used_bytes", device, used)
    if process.idle is not None:
        found.reported[process.owner] += used * hours
        found.idle[process.owner] += process.idle(seconds) * hours
        add("gpumem_torch_reserved_bytes", reporter, used - GIB if process.listed else used)
        add("gpumem_torch_idle_cache_bytes", reporter, process.idle(seconds))


def write_blocks(folder: Path, text: str) -> None:
    """Add samples in the OpenMetrics format to the data of a Prometheus."""
    (folder / "samples.txt").write_text(text)
    made = run_tool("promtool", "tsdb", "create-blocks-from", "openmetrics", folder / "samples.txt", folder / "data")
    assert made.returncode == 0, made.stderr


def evaluated(prometheus: Prometheus, first: float, end: float) -> str:
    """Return the samples of the rules, one each minute, in the OpenMetrics format."""
    groups = yaml.safe_load((REPOSITORY / "deploy" / "prometheus" / "rules" / "recording.yml").read_text())["groups"]
    (rules,) = [group["rules"] for group in groups if group["name"] == "gpumem-owners"]
    lines = []
    for rule in rules:
        lines.append(f"# TYPE {rule['record']} gauge")
        for series in prometheus.points(rule["expr"], first, end, 60):
            labels = ",".join(f'{name}="{value}"' for name, value in series["metric"].items())
            lines += [f"{rule['record']}{{{labels}}} {value} {at}" for at, value in series["values"]]
    return "\n".join([*lines, "# EOF", ""])


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Prometheus, Scrapes, float]]:
    """A Prometheus with the scrapes and the series of the rules, the scrapes, and the time of the last one."""
    folder = tmp_path_factory.mktemp("prometheus")
    start = time.time() // 7200 * 7200 - 86_400
    end = start + DURATION_SECONDS
    scrapes = scraped(start)
    write_blocks(folder, scrapes.text())
    lookback = (f"--query.lookback-delta={SCRAPE_SECONDS + 1:.0f}s",)
    with RunningPrometheus(folder, {}, flags=lookback) as prometheus:
        samples = evaluated(Prometheus(prometheus.url), start + 7, end + 120)
    write_blocks(folder, samples)
    with RunningPrometheus(folder, {}, flags=lookback) as prometheus:
        yield Prometheus(prometheus.url), scrapes, end + 120


@pytest.mark.parametrize(
    ("metric", "kind"),
    [
        ("owner:gpumem_process_memory_used_bytes:mean1m", "held"),
        ("owner:gpumem_process_memory_used_bytes:reported_mean1m", "reported"),
        ("owner:gpumem_torch_idle_cache_bytes:mean1m", "idle"),
    ],
)
def test_the_memory_hours_of_each_owner_are_the_integral_of_the_scrapes(
    recorded: tuple[Prometheus, Scrapes, float], metric: str, kind: str
) -> None:
    prometheus, scrapes, end = recorded
    found = {
        tuple(series["metric"].get(name, "") for name in OWNER): float(series["values"][0][1])
        for series in prometheus.instant(EVERY_OWNER % metric, end)
    }
    assert found == pytest.approx(dict(getattr(scrapes, kind)), rel=0.01)
    assert ("west", "bob", "", "", "") in scrapes.held
    assert ("west", "bob", "", "", "") not in scrapes.reported, "unknown is not 0"


def test_the_dashboard_shows_the_same_hours(recorded: tuple[Prometheus, Scrapes, float]) -> None:
    prometheus, scrapes, end = recorded

    def shown(heading: str) -> dict[str, float]:
        query = expression("usage", "Users", letter_of("usage", "Users", heading), range_seconds=7 * 3600)
        return {each["metric"].get("user", ""): float(each["values"][0][1]) for each in prometheus.instant(query, end)}

    def of_users(hours: Mapping[tuple[str, ...], float]) -> dict[str, float]:
        sums: dict[str, float] = defaultdict(float)
        for owner, value in hours.items():
            sums[owner[1]] += value
        return dict(sums)

    held, reported, idle = (of_users(hours) for hours in (scrapes.held, scrapes.reported, scrapes.idle))
    assert shown("Held") == pytest.approx({user: value / GIB for user, value in held.items()}, rel=0.01)
    shares = {user: value / reported[user] for user, value in idle.items()}
    assert shown("Idle cache share") == pytest.approx(shares, rel=0.01)
    assert shown("Held by idle jobs") == dict.fromkeys(held, 0.0), "no activity is known"
    assert shown("Reported").keys() == reported.keys()
