"""A server that speaks vLLM's interface, in processes of its own.

The answers are recorded from vllm 0.32.0, entrypoints/serve/dev/sleep/api_router.py.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from gpumem_client.wire.procfs import start_time_ticks
from gpumem_client.wire.protocol import EngineState
from gpumem_client.wire.reason_codes import ReasonCode
from gpumem_exporter.actions.selection import SelectedProcess
from gpumem_exporter.core.container import HERE
from gpumem_exporter.core.readings import ProcessFacts
from gpumem_exporter.core.samples import ProcessKey, ReportingProcess
from gpumem_exporter.features.engines import vllm
from gpumem_exporter.features.engines.engine_control import EngineControl
from gpumem_exporter.features.engines.vllm import Activity, EngineRefusedError, Vllm
from tests.support.builders.builders import report
from tests.support.servers.engine_servers import Served, engine_servers
from tests.support.waiting import wait_for

VLLM_METRICS = """# HELP vllm:num_requests_running Number of requests in model execution batches.
vllm:num_requests_running{engine="0",model_name="chat"} 1.0
vllm:num_requests_running{engine="1",model_name="chat"} 2.0
vllm:num_requests_waiting{engine="0",model_name="chat"} 4.0
vllm:num_requests_waiting_by_reason{engine="0",reason="capacity"} 4.0
"""
AWAKE, ASLEEP = [200, {"is_sleeping": False}], [200, {"is_sleeping": True}]


@pytest.fixture
def serve() -> Iterator[Any]:
    """Start a server: `serve("vllm", answers, *options)`."""
    with engine_servers() as start:
        yield start


def find(served: Served, title: str, *, pid: int | None = None, engine: str = "") -> Vllm:
    """Find the engine of the process on the device, as the exporter does."""
    pid = served.worker if pid is None else pid
    reporter, ticks = None, start_time_ticks(f"/proc/{pid}")
    if engine:
        key = ProcessKey(0, pid, os.getuid(), HERE)
        sent = report(pid, engine=EngineState(engine), start_time_ticks=ticks)
        reporter = ReportingProcess(key, pid, sent, 0.0, 0.0)
    facts = ProcessFacts(pid, ticks, command=title, uid=os.getuid())
    return EngineControl().find(SelectedProcess(pid, reporter, facts=facts))


def refused(engine: Any, code: ReasonCode) -> str:
    with pytest.raises(EngineRefusedError) as caught:
        engine()
    assert caught.value.code == code, caught.value
    return str(caught.value)


def test_vllm_sleeps_and_wakes_through_its_routes(serve: Any) -> None:
    answers = {
        "GET /is_sleeping": AWAKE,
        "GET /metrics": [[200, VLLM_METRICS], [200, "vllm:num_requests_running 0\n"]],
        "POST /sleep?level=1&mode=wait": [200, {"status": "sleeping", "level": 1}],
        "POST /sleep?level=0&mode=abort": [200, {"status": "sleeping", "level": 0}],
        "POST /release_kv_cache_memory": [404, {"detail": "Not Found"}],
        "POST /wake_up?tags=scheduling": [200, {"status": "awake", "tags": ["scheduling"]}],
        "POST /wake_up": [200, {"status": "awake", "tags": None}],
    }
    served = serve("vllm", answers, "serve", "model", "--enable-sleep-mode")
    engine = find(served, "VLLM::EngineCore")
    assert engine.activity() == Activity(asleep=False, requests=7)
    engine.release(None, False)
    engine.resume()
    assert [request[1] for request in served.requests(4)] == [
        *("/is_sleeping", "/metrics", "/sleep?level=1&mode=wait", "/wake_up")
    ]
    # An older vLLM cannot keep the weights: its requests must not wait forever.
    refused(lambda: engine.release("weights", True), ReasonCode.ENGINE_NOT_ENABLED)
    assert [request[1] for request in served.requests(3)][-1] == "/wake_up?tags=scheduling"
    assert engine.activity() == Activity(asleep=False, requests=None), "missing metrics are no idle engine"
    without_flags = find(serve("vllm", {}, "serve", "model"), "VLLM::Worker_TP0")
    assert "--enable-sleep-mode" in refused(without_flags.activity, ReasonCode.ENGINE_NOT_ENABLED)


@pytest.mark.parametrize(
    ("answer", "code"),
    [
        ([200, "huge"], ReasonCode.ENGINE_FAILED),
        ([200, "hang"], ReasonCode.ENGINE_FAILED),
        ([302, "redirect"], ReasonCode.ENGINE_FAILED),
        ([200, {"is_sleeping": "maybe"}], ReasonCode.ENGINE_FAILED),
        ([200, "[" * 100_000], ReasonCode.ENGINE_FAILED),
        ([401, {"error": "Unauthorized"}], ReasonCode.ENGINE_DENIED),
        ([500, "broken\n" * 1000], ReasonCode.ENGINE_FAILED),
    ],
)
def test_a_wrong_answer_is_a_result(
    serve: Any, monkeypatch: pytest.MonkeyPatch, answer: list[object], code: ReasonCode
) -> None:
    monkeypatch.setattr(vllm, "QUESTION_SECONDS", 1.0)
    served = serve("vllm", {"GET /is_sleeping": answer}, "--enable-sleep-mode")
    assert len(refused(find(served, "VLLM::EngineCore").activity, code)) < 500


def test_the_use_of_vllms_cache_is_the_only_sample_of_its_metric(serve: Any) -> None:
    first, second = (f'vllm:kv_cache_usage_perc{{engine="{engine}",model_name="a}} 9"}}' for engine in "01")
    answers = [
        f"# TYPE vllm:kv_cache_usage_perc gauge\nvllm:kv_cache_usage_perc_sum 0.9\n{first} 0.25\n",
        *("vllm:kv_cache_usage_perc 0\n", f"{first} 1.0 1700000000000\n"),
        *(f"{first} 0.25\n{second} 0.5\n", f"{first} 0.25\n{second} x\n"),
        *(f"{first} {value}\n" for value in ("1.01", "-0.1", "NaN", "+Inf", "", "x")),
        VLLM_METRICS,
    ]
    served = serve("vllm", {"GET /metrics": [[200, text] for text in answers]})
    engine = find(served, "VLLM::Worker_TP0")
    assert [engine.cache_use() for _ in answers] == [0.25, 0.0, 1.0, *[None] * 9]
    assert {tuple(request[3]) for request in served.requests(len(answers))} == {("host", "accept-encoding")}


def test_only_the_port_of_the_process_or_its_parent_is_taken(serve: Any) -> None:
    served, other = serve("vllm", {}), serve("vllm", {})
    assert find(served, "VLLM::EngineCore").listener.address[1] == served.port
    assert find(other, "VLLM::EngineCore").listener.address[1] == other.port
    refused(lambda: find(served, "VLLM::EngineCore", pid=os.getpid()), ReasonCode.ENGINE_UNREACHABLE)
    refused(lambda: find(served, "python train.py"), ReasonCode.NO_ENGINE)


@pytest.mark.parametrize(
    ("title", "engine"),
    [
        *((title, "") for title in ("sglang::scheduler_TP0", "trtllm-serve", "ollama runner", "llama-server")),
        ("VLLM::EngineCore", "sglang"),  # what its reporter has found counts
    ],
)
def test_another_engine_gets_no_request(serve: Any, title: str, engine: str) -> None:
    served = serve("vllm", {"GET /is_sleeping": AWAKE})
    assert "sleep and wake act on no other engine" in refused(
        lambda: find(served, title, engine=engine), ReasonCode.NO_ENGINE
    )


@pytest.mark.skipif(os.geteuid() != 0, reason="needs another user")
def test_a_parent_of_another_user_is_not_the_server(serve: Any) -> None:
    served = serve("vllm", {}, CHILD_UID="1001")
    wait_for(lambda: Path(f"/proc/{served.worker}").stat().st_uid == 1001, "the user of the child")
    refused(lambda: find(served, "VLLM::EngineCore"), ReasonCode.ENGINE_UNREACHABLE)


def test_a_port_that_another_process_took_over_gets_nothing(serve: Any) -> None:
    served = serve("vllm", {}, "--enable-sleep-mode")
    engine = find(served, "VLLM::EngineCore")
    served.popen.kill()
    served.popen.wait()
    with socket.socket() as taken:
        taken.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        taken.bind(("127.0.0.1", served.port))
        taken.listen()
        taken.settimeout(10)
        refused(engine.activity, ReasonCode.ENGINE_UNREACHABLE)
        connection, _ = taken.accept()
        with connection:
            connection.settimeout(10)
            assert connection.recv(1) == b""  # closed without a byte
