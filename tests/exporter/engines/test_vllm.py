"""Each adapter against a server that speaks the engine's documented interface, in processes of their own.

The answers are recorded from vllm 0.32.0 (entrypoints/serve/dev/sleep/api_router.py), sglang 0.5.23
(srt/entrypoints/http_server.py, v1_loads.py, utils/auth.py), TensorRT-LLM (docs/source/features/sleep-wakeup.md),
ollama (docs/api.md) and llama.cpp (tools/server/README.md, server-models.cpp).
"""

from __future__ import annotations

import hashlib
import hmac
import json
import os
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from gpumem_client.wire.procfs import start_time_ticks
from gpumem_client.wire.protocol import DeviceSample
from gpumem_client.wire.reason_codes import ReasonCode
from gpumem_exporter.actions.engines import Activity, EngineRefusedError
from gpumem_exporter.actions.selection import OutsideTarget
from gpumem_exporter.core.place import HERE
from gpumem_exporter.core.samples import ProcessKey, ReportingProcess
from gpumem_exporter.engines import adapter
from gpumem_exporter.engines.adapter import Engine
from gpumem_exporter.engines.control import EngineControl
from tests.support.builders import report
from tests.support.engine_servers import Served, engine_servers
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


def find(served: Served, title: str, *samples: DeviceSample, pid: int | None = None) -> Engine:
    """Find the engine of the process on the device, as the exporter does."""
    pid = served.worker if pid is None else pid
    reporter = None
    if samples:
        key = ProcessKey(0, pid, os.getuid(), HERE)
        reporter = ReportingProcess(key, pid, report(pid, devices=samples), 0.0, 0.0)
    target = OutsideTarget(
        pid, "", "", pid, start_time_ticks(f"/proc/{pid}"), (), title=title, owner_uid=os.getuid(), reporter=reporter
    )
    return EngineControl().find(target)


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


def test_sglang_is_released_with_its_key_and_resumed_with_what_was_released(serve: Any) -> None:
    quiet = {"num_running_reqs": 0, "num_waiting_reqs": 0}
    loads = [200, {"loads": [{"num_running_reqs": 1, "num_waiting_reqs": 2}, quiet]}]
    idle = [200, {"loads": [quiet, quiet]}]
    answers = {
        "GET /v1/loads?include=core": [loads, loads, idle],
        "POST /abort_request": [200, ""],
        "POST /release_memory_occupation": [200, "null"],
        "POST /resume_memory_occupation": [200, "null"],
    }
    served = serve("sglang", answers, "--api-key", "user", "--admin-api-key=admin")
    awake = DeviceSample("GPU-1", unmapped_bytes=0)
    engine = find(served, "sglang::scheduler_TP0", awake)
    assert engine.activity() == Activity(asleep=False, requests=3)
    engine.release("weights", True)
    asked = served.requests(5)
    assert [request[1] for request in asked][1:] == [
        *("/abort_request", "/v1/loads?include=core", "/v1/loads?include=core", "/release_memory_occupation")
    ]
    assert json.loads(asked[-1][2]) == {"tags": ["kv_cache"]}
    assert {request[3]["authorization"] for request in asked} == {"Bearer admin"}
    engine = find(served, "sglang::scheduler_TP0", DeviceSample("GPU-1", unmapped_bytes=9))
    assert engine.activity().asleep
    engine.resume()
    assert json.loads(served.requests(2)[1][2]) == {"tags": ["kv_cache"]}
    # To resume what is not released ends SGLang's scheduler.
    refused(engine.resume, ReasonCode.ENGINE_NOT_ENABLED)
    refused(find(served, "sglang::scheduler").activity, ReasonCode.ENGINE_NOT_ENABLED)


def test_tensorrt_llm_gets_signed_requests(serve: Any) -> None:
    answers = {
        "GET /memory_status": [[200, {"state": "running", "parked_tags": []}], [200, {"state": "failed"}]],
        "POST /release_memory": [200, {"status": "success"}],
        "POST /resume_memory": [409, {"error": "parking"}],
    }
    served = serve("trtllm-serve", answers, "--enable_sleep_mode", TRTLLM_RUNTIME_CONTROL_API_KEY="secret")
    engine = find(served, "python trtllm-serve")
    assert engine.activity() == Activity(asleep=False, requests=0)
    engine.release("weights", False)
    for method, path, body, headers in served.requests(2):
        prefix = "x-trtllm-runtime-control"
        timestamp, nonce = headers[f"{prefix}-timestamp"], headers[f"{prefix}-nonce"]
        signed = f"trtllm-runtime-control-v1\n{method}\n{path}\n{timestamp}\n{nonce}\n{body}".encode()
        digest = hmac.new(b"secret", signed, hashlib.sha256).hexdigest()
        assert headers[f"{prefix}-auth"] == f"sha256={digest}"
    refused(engine.activity, ReasonCode.ENGINE_BUSY)
    refused(engine.resume, ReasonCode.ENGINE_FAILED)
    unsigned = find(serve("trtllm-serve", {}), "trtllm-serve")
    refused(unsigned.activity, ReasonCode.ENGINE_DENIED)


def test_ollama_unloads_the_model_of_the_process(serve: Any) -> None:
    loaded = [200, {"models": [{"model": "other:latest"}, {"model": "chat:latest"}]}]
    answers = {
        "GET /api/ps": [loaded, loaded, loaded, [200, {"models": [{"model": "other:latest"}]}]],
        "POST /api/show": [[200, {"modelfile": "FROM /blobs/a"}], [200, {"modelfile": "FROM /blobs/b"}]] * 2,
        "POST /api/generate": [200, {"model": "chat:latest", "done": True, "done_reason": "unload"}],
    }
    served = serve("ollama", answers, "runner", "--model", "/blobs/b")
    engine = find(served, "ollama runner")
    assert engine.activity() == Activity(asleep=False, requests=0)
    engine.release(None, False)
    unload = next(request for request in served.requests(9) if request[1] == "/api/generate")
    assert json.loads(unload[2]) == {"model": "chat:latest", "keep_alive": 0, "stream": False}
    refused(lambda: engine.release("weights", False), ReasonCode.ENGINE_NOT_ENABLED)


def test_llama_cpp_unloads_a_model_of_a_router(serve: Any) -> None:
    served = serve(
        "llama-server", {"POST /models/unload": [200, {"success": True}]}, "--alias", "gemma", LLAMA_API_KEY="k"
    )
    engine = find(served, "llama-server")
    assert engine.activity() == Activity(asleep=False, requests=None)
    engine.release(None, True)
    (unload,) = served.requests(1)
    assert (json.loads(unload[2]), unload[3]["authorization"]) == ({"model": "gemma"}, "Bearer k")
    alone = find(served, "llama-server", pid=served.popen.pid)
    refused(alone.activity, ReasonCode.ENGINE_NOT_ENABLED)


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
    monkeypatch.setattr(adapter, "QUESTION_SECONDS", 1.0)
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
    # The key of an engine is for its actions only, and an engine of another kind gets no request.
    assert {tuple(request[3]) for request in served.requests(len(answers))} == {("host", "accept-encoding")}
    assert find(serve("sglang", {}), "sglang::scheduler").cache_use() is None


def test_only_the_port_of_the_process_or_its_parent_is_taken(serve: Any) -> None:
    served, other = serve("vllm", {}), serve("vllm", {})
    assert find(served, "VLLM::EngineCore").listener.address[1] == served.port
    assert find(other, "VLLM::EngineCore").listener.address[1] == other.port
    refused(lambda: find(served, "VLLM::EngineCore", pid=os.getpid()), ReasonCode.ENGINE_UNREACHABLE)
    refused(lambda: find(served, "python train.py"), ReasonCode.NO_ENGINE)


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
