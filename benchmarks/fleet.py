"""What the shipped rules and dashboards cost a Prometheus that scrapes N nodes. Needs Prometheus on PATH.

    python -m benchmarks.fleet 400 [--minutes 10] [--nodes-of-user 40] [--json]

One exporter of the demo (8 GPUs, 14 to 16 processes) runs. A server answers the scrapes of all nodes with its latest
page, with UUIDs, workloads and users of their own for each node. Prometheus scrapes each node every 15 s and evaluates
the shipped rules. CPU times are from the scheduler, so they hold on a busy machine, too.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import json
import multiprocessing
import os
import re
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml

from benchmarks.claims import Options, Progress, Row, show
from benchmarks.place import cpu_seconds, resident_bytes
from tests.support.paths import REPOSITORY
from tests.support.ports import free_port
from tests.support.servers.exporter_process import ExporterProcess
from tests.support.servers.running_prometheus import running
from tests.support.truth.panel_queries import Prometheus, Scope, load_dashboard, queries, resolve
from tests.support.waiting import wait_for

INTERVAL_SECONDS = 15
CORES, SPARE = 2, 0.5
"""The claim: scrapes and rules take at most this share of these cores in each interval."""
DASHBOARDS = ("fleet", "usage")
KEPT = "(owner|slurm_job|ray_job|pod|namespace|cluster|node|device):.+|gpumem_device_.+|gpumem_nvml_up|up|ALERTS"
"""The series that docs/sizing.md sends to a global store."""
LEVELS = ("process|rank", "workload", "device|node", "slurm_job|ray_job|pod|namespace|cluster", "owner")
"""The levels of recording rules, by the number of their series."""
SHOWN = 8
"""The number of slowest rules and panels that are printed."""


def main() -> int:
    options = Options(__doc__, real_gpu=False)
    options.parser.add_argument("nodes", type=int, help="the number of nodes")
    options.amount("--minutes", 10.0, 2.0, "minutes of scrapes before the measurement ends; half of them are a warm-up")
    options.amount("--nodes-of-user", 40, 40, "nodes whose jobs have the same names and users")
    given = options.read()
    progress = Progress("fleet", 3)
    with (
        tempfile.TemporaryDirectory(prefix="gpumem-fleet-") as folder,
        contextlib.redirect_stdout(sys.stderr),  # the log of Prometheus
        contextlib.ExitStack() as stack,
    ):
        rows = measured(given.nodes, given.minutes, given.nodes_of_user, Path(folder), progress, stack)
    return show("fleet", rows, as_json=given.json)


def measured(
    nodes: int, minutes: float, nodes_of_user: int, folder: Path, progress: Progress, stack: contextlib.ExitStack
) -> list[Row]:
    """Let Prometheus scrape the nodes, and return its costs."""
    progress.part(f"{minutes:g} minutes of {nodes} nodes")
    exporter = ExporterProcess(folder, "--demo", fresh=True)
    stack.callback(exporter.close)
    port, own = free_port(), free_port()
    server = multiprocessing.get_context("spawn").Process(target=serve, args=(exporter.tcp_url, port, nodes_of_user))
    server.start()
    stack.callback(server.join)
    stack.callback(server.kill)
    page = wait_for(functools.partial(_first_page, f"http://127.0.0.1:{port}/0"), "the page of a node")
    file = folder / "prometheus.yml"
    file.write_text(yaml.safe_dump(configuration(nodes, port)))
    command = ["prometheus", f"--config.file={file}", f"--storage.tsdb.path={folder / 'data'}"]
    log = stack.enter_context(running([*command, f"--web.listen-address=127.0.0.1:{own}"], folder / "log"))
    wait_for(lambda: "Server is ready to receive web requests" in log(), "Prometheus")
    pid = _pid_of(own)
    progress.sleep(30 * minutes)
    used, started = cpu_seconds(pid), time.monotonic()
    progress.sleep(30 * minutes)
    share = (cpu_seconds(pid) - used) / (time.monotonic() - started)
    url = f"http://127.0.0.1:{own}"
    api = Prometheus(url, timeout_seconds=600.0)
    head = json.loads(_get(f"{url}/api/v1/status/tsdb"))["data"]["headStats"]
    up = len([one for one in api.instant("up == 1", time.time()) if one])
    own_metrics = _get(f"{url}/metrics").decode()
    missed = sum(
        map(float, re.findall(r"^prometheus_rule_group_iterations_missed_total\{.*\} (.*)", own_metrics, re.MULTILINE))
    )
    progress.part("rules")
    rows = [
        Row("nodes that were scraped", up, "", beside=f"of {nodes}"),
        Row("series of a node", len(re.findall(rb"^[^#]", page, re.MULTILINE)), "", beside=f"{len(page):,} bytes"),
        Row("series in memory, with the results of rules", head["numSeries"], ""),
        Row(
            f"CPU of Prometheus in an interval of {INTERVAL_SECONDS} s",
            share * INTERVAL_SECONDS,
            "s",
            beside=f"{CORES} cores, {SPARE:.0%} to spare",
            limit=CORES * INTERVAL_SECONDS * SPARE,
        ),
        Row("evaluations that were missed", missed, "", limit=1),
        Row("RSS of Prometheus", resident_bytes(pid) / 2**20, "MiB"),
    ]
    for names in (*(f"({level}):.+" for level in LEVELS), KEPT):
        found = api.instant(f'count({{__name__=~"{names}"}})', time.time())
        rows.append(Row(f"series {names}", float(found[0]["values"][0][1]) if found else 0, ""))
    rows += rules(json.loads(_get(f"{url}/api/v1/rules"))["data"]["groups"])
    progress.part("panels")
    return rows + panels(api, pid, 60 * minutes)


def configuration(nodes: int, port: int) -> dict[str, Any]:
    """Return the configuration of Prometheus: a target for each node, by its path, and the shipped rules."""
    targets = [
        {"targets": [f"127.0.0.1:{port}"], "labels": {"__metrics_path__": f"/{node}", "instance": f"node-{node}:9844"}}
        for node in range(nodes)
    ]
    interval = f"{INTERVAL_SECONDS}s"
    return {
        "global": {"scrape_interval": interval, "scrape_timeout": interval, "evaluation_interval": interval},
        "rule_files": [str(REPOSITORY / "deploy" / "prometheus" / "rules" / "*.yml")],
        "scrape_configs": [{"job_name": "gpumem", "static_configs": targets}],
    }


def rules(groups: list[dict[str, Any]]) -> list[Row]:
    """Return the evaluation time of each group, and of the slowest rules."""
    rows = [
        Row(f"group {group['name']}", 1e3 * group["evaluationTime"], "ms", beside=f"every {group['interval']:g} s")
        for group in groups
    ]
    every = [(rule["evaluationTime"], rule["name"], rule.get("health")) for group in groups for rule in group["rules"]]
    rows += [
        Row(f"rule {name}", 1e3 * seconds, "ms", beside=health) for seconds, name, health in sorted(every)[-SHOWN:]
    ]
    return [*rows, Row("rules with an error", sum(health == "err" for _, _, health in every), "", limit=1)]


def panels(api: Prometheus, pid: int, range_seconds: float) -> list[Row]:
    """Return the time of the slowest queries of each dashboard, all of whose queries are asked once."""
    rows = []
    for name in DASHBOARDS:
        dashboard = load_dashboard(name)
        scope = Scope(time.time(), range_seconds=int(range_seconds))
        scope = Scope(scope.end, scope.range_seconds, variables=resolve(dashboard, api, scope))
        used, taken = cpu_seconds(pid), []
        for query in queries(dashboard):
            started = time.perf_counter()
            api.ask(query, scope)
            taken.append((time.perf_counter() - started, query.where))
        cpu = cpu_seconds(pid) - used
        total = sum(seconds for seconds, _ in taken)
        rows.append(
            Row(f"dashboard {name}: CPU of all queries", cpu, "s", beside=f"{len(taken)} queries, {total:.1f} s")
        )
        rows += [Row(f"query {where}", 1e3 * seconds, "ms") for seconds, where in sorted(taken)[-SHOWN:]]
    return rows


def serve(exporter: str, port: int, nodes_of_user: int) -> None:
    """Answer scrapes of nodes with the exporter's latest page, until the process is killed."""
    asyncio.run(_serve(exporter, port, nodes_of_user))


async def _serve(exporter: str, port: int, nodes_of_user: int) -> None:
    latest: dict[str, bytes] = {}

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(ConnectionError, asyncio.IncompleteReadError):
            while True:
                head = await reader.readuntil(b"\r\n\r\n")
                node = int(head.split(b" ", 2)[1][1:])
                body = page_of(latest["page"], node, node // nodes_of_user)
                answered = b"HTTP/1.1 200 OK\r\nContent-Type: text/plain; version=0.0.4\r\n"
                writer.write(answered + b"Content-Length: %d\r\n\r\n" % len(body) + body)
                await writer.drain()
        writer.close()

    latest["page"] = await asyncio.to_thread(_get, f"{exporter}/metrics")
    async with await asyncio.start_server(answer, "127.0.0.1", port, backlog=4096):
        while True:
            await asyncio.sleep(1.0)
            latest["page"] = await asyncio.to_thread(_get, f"{exporter}/metrics")


def page_of(page: bytes, node: int, names: int) -> bytes:
    """Return the page of a node: its own UUIDs, and workloads and users of their own for some nodes."""
    page = page.replace(b'"GPU-', b'"GPU-%04x' % node).replace(b'"MIG-', b'"MIG-%04x' % node)
    page = page.replace(b'workload="demo-', b'workload="%d-' % names)
    return re.sub(rb'user="([a-z]+)"', rb'user="\g<1>%d"' % names, page)


def _first_page(url: str) -> bytes | None:
    try:
        return _get(url)
    except OSError:
        return None


def _get(url: str) -> bytes:
    with urllib.request.urlopen(url, timeout=30) as answer:
        body: bytes = answer.read()
    return body


def _pid_of(port: int) -> int:
    """Return the pid of the Prometheus that this process has started, by its port."""
    for folder in _children(os.getpid()):
        if f"--web.listen-address=127.0.0.1:{port}" in (folder / "cmdline").read_text().split("\0"):
            return int(folder.name)
    raise LookupError(f"no child listens on port {port}")


def _children(pid: int) -> Iterator[Path]:
    for task in Path(f"/proc/{pid}/task").iterdir():
        yield from (Path("/proc") / child for child in (task / "children").read_text().split())


if __name__ == "__main__":
    sys.exit(main())
