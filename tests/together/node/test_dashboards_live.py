"""Every query of every dashboard on a real Prometheus that scrapes the demo and an emulated node with real torch.

The demo is scraped twice, as two nodes with equal pids, which the queries must not mix up. One of the two has a label
`cluster`, and the others have none.
"""

from __future__ import annotations

import json
import signal
import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from tests.emulation.node import MIB, EmulatedNode
from tests.emulation.torch_process import TorchProcess
from tests.support.ports import free_port
from tests.support.servers.exporter_process import ExporterProcess
from tests.support.servers.running_prometheus import RunningPrometheus
from tests.support.truth.panel_frames import merged, table_of, transformed
from tests.support.truth.panel_queries import (
    Prometheus,
    Scope,
    load_dashboard,
    panel_of,
    queries,
    resolve,
)
from tests.support.waiting import wait_for

NAMES = ("exporter", "fleet", "node", "oom", "workload")
RANGE_SECONDS = 60
DEMO, ALSO_DEMO, EMULATED = "demo", "demo-again", "emulated"
ASKED_BYTES = 1 << 40
PLANNED_BYTES = 1 << 30
WORKLOADS = {
    DEMO: ("demo-asr-varlen", "demo-rag-indexer-leak", "demo-sleeping-engine", "demo-llm-server"),
    EMULATED: ("train",),
}
"""The workloads whose dashboards are tested. Of the demo's, one has phases and components, one leaks, one sleeps, and
one has a key-value cache."""

pytestmark = pytest.mark.timeout(240)

POLICY = """
rules:
  - name: look
    workloads: ["*"]
    when: {reserved_bytes: {over: 1MiB}}
    do: {action: empty_cache}
    dry_run: true
"""
# One rank keeps a tensor of each step, so that its memory grows; the other one does not.
TRAINING = """
import threading, time
import gpumem_client as client
import gpumem_toolkit as toolkit

def work():
    kept = []
    model = torch.nn.Linear(64, 64, device=device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    watching = toolkit.watch(model, optimizer)
    while True:
        with client.phase("forward"):
            batch = [torch.empty(16 << 20, dtype=torch.uint8, device=device) for _ in range(4)]
        if leaks and len(kept) < 400:
            kept.append(torch.empty(3 << 20, dtype=torch.uint8, device=device))
        del batch
        client.step()
        time.sleep(0.1)

threading.Thread(target=work, daemon=True).start()
"""
RUN_OUT = f"""
try:
    torch.empty({ASKED_BYTES}, dtype=torch.uint8, device=device)
except torch.OutOfMemoryError:
    pass
"""


@dataclass
class Scraped:
    """The running programs, and the places of the queries that had no result yet."""

    prometheus: Prometheus
    node: EmulatedNode
    processes: Mapping[str, TorchProcess]
    unanswered: set[str] = field(default_factory=set)

    def scope(self, dashboard: Mapping[str, Any], node: str, **variables: str) -> Scope:
        """Return the scope of a dashboard for the last minute of a node."""
        chosen = {"node": node, **variables}
        if dashboard["uid"] == "gpumem-workload":
            chosen.setdefault("workload", WORKLOADS.get(node, WORKLOADS[DEMO])[0])
        bare = Scope(time.time(), RANGE_SECONDS, 1.0, RANGE_SECONDS, chosen)
        return Scope(bare.end, RANGE_SECONDS, 1.0, RANGE_SECONDS, resolve(dashboard, self.prometheus, bare))

    def value(self, expression: str, scope: Scope) -> float:
        """Return the value of an instant query with one series."""
        (value,) = self.values(expression, scope)
        return value

    def values(self, expression: str, scope: Scope) -> list[float]:
        """Return the values of the series of an instant query."""
        return [float(series["values"][0][1]) for series in self.prometheus.instant(scope.fill(expression), scope.end)]

    def rows(self, dashboard: str, title: str, node: str) -> list[dict[str, Any]]:
        """Return the rows of a table by the headings of its columns."""
        document = load_dashboard(dashboard)
        panel = panel_of(document, title)
        scope = self.scope(document, node)
        frames = [
            table_of(self.prometheus.instant(scope.fill(target["expr"]), scope.end), f"Value #{target['refId']}")
            for target in panel["targets"]
        ]
        columns, rows = transformed(merged(frames), panel["transformations"])
        return [{heading: row[name] for name, heading in columns if name in row} for row in rows]


@pytest.fixture(scope="module")
def scraped(tmp_path_factory: pytest.TempPathFactory, emulation: Path) -> Iterator[Scraped]:
    folder = tmp_path_factory.mktemp("dashboards")
    ports = {DEMO: free_port(), EMULATED: free_port()}
    for name in ("node", "demo", "exporter"):
        (folder / name).mkdir()
    plan = folder / "plan.json"
    plan.write_text(json.dumps({"reserved_peak_bytes": PLANNED_BYTES}))
    policy = ("--policy.file", str(folder / "policy.yml"))
    Path(policy[1]).write_text(POLICY)
    with ExitStack() as stack:

        def start(name: str, port: int, *flags: str, **options: Any) -> ExporterProcess:
            address = ("--web.listen-address", f"127.0.0.1:{port}")
            exporter = ExporterProcess(folder / name, *policy, *address, *flags, **options)
            stack.callback(exporter.close)
            stack.callback(lambda: print(exporter.log()[-4000:]))
            return exporter

        node = stack.enter_context(EmulatedNode(folder / "node"))
        flags = ("--report.interval", "0.2", "--collect.interval", "0.2", "--report.expiry", "3")
        exporters = [start("exporter", ports[EMULATED], *flags, environment=node.environment())]
        processes: dict[str, TorchProcess] = {}
        for name, rank in (("leaks", "0"), ("steady", "1"), ("stopped", "")):
            own = {"GPUMEM_EXPORTER_URL": exporters[0].url, "GPUMEM_RANK": rank, "GPUMEM_PLAN": str(plan)}
            processes[name] = stack.enter_context(TorchProcess(node, own))
        exporters.append(start("demo", ports[DEMO], "--demo"))
        targets = {name: f"127.0.0.1:{port}" for name, port in ports.items()}
        targets[ALSO_DEMO] = targets[DEMO]
        running = RunningPrometheus(folder / "prometheus", targets, clusters={ALSO_DEMO: "second"})
        found = Scraped(Prometheus(stack.enter_context(running).url), node, processes)
        _begin_to_work(node, processes)
        _wait_for_scrapes(found)
        _make_things_happen(found, exporters, processes)
        _ask_until_all_is_answered(found)
        yield found


def _begin_to_work(node: EmulatedNode, processes: Mapping[str, TorchProcess]) -> None:
    node.set_utilization(0, 80)
    node.set_process(999_999, 1, 700 * MIB)  # without a reporter
    for name, device, workload in (("leaks", 0, "train"), ("steady", 1, "train"), ("stopped", 1, "notebook")):
        processes[name].call("start_client", workload=workload)
        processes[name].call("random_heap", device=device, seed=device)
    for name, device in (("leaks", 0), ("steady", 1)):
        processes[name].exec(TRAINING, device=f"cuda:{device}", leaks=name == "leaks")


def _wait_for_scrapes(found: Scraped) -> None:
    def reporting() -> bool:
        # A post-mortem evaluates the time before the error in steps of five seconds.
        scraped = "count by (instance) (count_over_time(gpumem_reporter_up[1m]) > 7)"
        series = found.prometheus.instant(scraped, time.time())
        counts = {one["metric"]["instance"]: float(one["values"][0][1]) for one in series}
        return counts.get(EMULATED) == 3 and counts.get(DEMO, 0) > 5 and counts.get(ALSO_DEMO, 0) > 5

    wait_for(reporting, "some scrapes of every node", 60.0)


def _make_things_happen(
    found: Scraped, exporters: list[ExporterProcess], processes: Mapping[str, TorchProcess]
) -> None:
    processes["leaks"].exec(RUN_OUT, device="cuda:0")
    processes["stopped"].signal(signal.SIGSTOP)
    _clear(exporters)
    # A histogram starts with the first action, and its rate with the second one.
    counted = "count by (instance) (gpumem_action_duration_seconds_count)"
    wait_for(lambda: len(found.prometheus.instant(counted, time.time())) >= len(exporters), "the first actions", 60.0)
    _clear(exporters)


def _clear(exporters: list[ExporterProcess]) -> None:
    for exporter, workload in zip(exporters, ("train", "demo-asr-varlen"), strict=True):
        exporter.act("empty_cache", target={"workload": workload}, wait_seconds=20)


def _ask_until_all_is_answered(found: Scraped) -> None:
    """Ask each query about each node until it has a result: some states are on one of the nodes only."""
    missing = {query.where: (name, query) for name in NAMES for query in queries(load_dashboard(name))}
    end = time.monotonic() + 60

    def ask() -> bool:
        for name in NAMES:
            for node, workload in _workloads(name):
                scope = found.scope(load_dashboard(name), node, **workload)
                for where, (of_name, query) in list(missing.items()):
                    if of_name == name and found.prometheus.ask(query, scope):
                        del missing[where]
        return not missing or time.monotonic() > end

    wait_for(ask, "answers", 120.0)
    found.unanswered.update(missing)


def _workloads(name: str) -> list[tuple[str, dict[str, str]]]:
    """Return each node with the variables of its dashboard."""
    if name != "workload":
        return [(EMULATED, {}), (DEMO, {})]
    return [(node, {"workload": workload}) for node, workloads in WORKLOADS.items() for workload in workloads]


def test_every_query_has_a_result(scraped: Scraped) -> None:
    assert scraped.unanswered == set()


def test_no_query_mixes_nodes_with_equal_pids(scraped: Scraped) -> None:
    """Prometheus rejects joins that are not unique; groups without the node lose rows."""
    for name in NAMES:
        dashboard = load_dashboard(name)
        several = any(v["name"] == "node" and v.get("multi") for v in dashboard["templating"]["list"])
        scope = scraped.scope(dashboard, ".*" if several else DEMO)
        for query in queries(dashboard):
            scraped.prometheus.ask(query, scope)


@pytest.mark.parametrize("node", [DEMO, EMULATED])
def test_the_categories_of_each_device_add_up_to_its_total(scraped: Scraped, node: str) -> None:
    dashboard = load_dashboard("node")
    *categories, total = (target["expr"] for target in panel_of(dashboard, "Ledger of GPU $gpu")["targets"])
    assert len(categories) == 8
    for gpu in range(8 if node == DEMO else 2):
        scope = scraped.scope(dashboard, node, gpu=str(gpu))
        whole = scraped.value(total, scope)
        shown = [value for category in categories for value in scraped.values(category, scope)]
        assert sum(shown) == whole > 0


def test_the_table_of_processes_equals_the_books_of_the_node(scraped: Scraped) -> None:
    rows = {(row["GPU"], row["pid"]): row for row in scraped.rows("node", "Processes", EMULATED)}
    books = scraped.node.books()
    on_devices = {(str(gpu), str(pid)) for gpu in (0, 1) for pid in books[gpu].processes}
    assert rows.keys() == on_devices
    stopped = rows["1", str(scraped.processes["stopped"].pid)]
    assert stopped["Used"] == books[1].processes[scraped.processes["stopped"].pid]
    assert (stopped["Workload"], stopped["Reports"]) == ("notebook", "false")
    assert rows["1", "999999"]["Used"] == 700 * MIB
    steady = rows["1", str(scraped.processes["steady"].pid)]
    assert (steady["Workload"], steady["Rank"], steady["Reports"]) == ("train", "1", "true")
    assert steady["Reserved"] == steady["Allocated"] + steady["Reclaimable"] + steady["Fragmented"]
    assert steady["Used"] == steady["Reserved"] + steady["Non-torch"]
