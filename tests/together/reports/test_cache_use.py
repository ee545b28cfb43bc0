"""The exporter reads the use of a cache from the metrics of the server above the process, and from no other server."""

from __future__ import annotations

import subprocess

from gpumem_client.wire.procfs import pid_namespace, start_time_ticks
from gpumem_client.wire.protocol import DeviceSample, EngineState
from tests.conftest import StartExporter
from tests.emulation.node import MIB, EmulatedNode
from tests.support.builders import report
from tests.support.engine_servers import engine_servers
from tests.support.exporter_process import QUICK
from tests.support.waiting import wait_until_equal

METRICS = '# TYPE vllm:kv_cache_usage_perc gauge\nvllm:kv_cache_usage_perc{engine="0",model_name="chat"} 0.25\n'


def test_a_worker_has_the_use_that_the_server_above_it_shows(node: EmulatedNode, start_exporter: StartExporter) -> None:
    exporter = start_exporter(node, *QUICK)
    uuid = node.books().devices[0].uuid
    sample = DeviceSample(uuid, allocated_bytes=96 * MIB, component_bytes={"kv_cache": 64 * MIB, "other": 32 * MIB})
    sequence = 0

    def used(*pids: int) -> list[list[float]]:
        """Report for processes, and return what the exporter then shows."""
        nonlocal sequence
        sequence += 1
        for pid in pids:
            ticks = start_time_ticks(f"/proc/{pid}")
            changes = {"start_time_ticks": ticks, "pid_namespace": pid_namespace(), "session_started_seconds": 0.0}
            sent = report(pid, devices=(sample,), sequence=sequence, engine=EngineState("vllm"), **changes)
            exporter.report(sent)
        metrics = exporter.metrics()
        return [metrics.values("gpumem_engine_kv_cache_bytes", pid=str(pid), state="used") for pid in pids]

    with engine_servers() as serve, subprocess.Popen(["cat"], stdin=subprocess.PIPE) as other:
        served = serve("vllm", {"GET /metrics": [200, METRICS]}, "serve", "model", "--tensor-parallel-size", "2")
        # The other process has the same user, and reports and is searched first, but is not below the server.
        wait_until_equal(lambda: used(other.pid, served.worker), [[], [16.0 * MIB]], "the use of the cache")
        assert [request[:2] for request in served.requests(1)] == [("GET", "/metrics")]
