"""Memory profiles of real torch: the bytes add up, the right lines and owners are named, and nothing is left behind."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.emulation.fixtures import StartTorch
from tests.emulation.torch_process import TorchProcess
from tests.support.servers.recording_exporter import RecordingExporter
from tests.support.waiting import wait_for

TRAIN = """
from tests.programs.profiled import *
import gpumem_client, sys
training = Training()
training.step()
gpumem_client.start()
"""
PROFILED = "tests/programs/profiled.py"


@pytest.fixture
def exporter(tmp_path: Path) -> Iterator[RecordingExporter]:
    with RecordingExporter(tmp_path / "e.sock", interval_seconds=0.05) as exporter:
        yield exporter


Start = Callable[..., TorchProcess]


@pytest.fixture
def start(start_torch: StartTorch, exporter: RecordingExporter) -> Start:
    def start_process(code: str, *, fresh: bool = False, **environment: str) -> TorchProcess:
        process = start_torch(GPUMEM_EXPORTER_URL=exporter.url, fresh=fresh, **environment)
        process.exec(code)
        return process

    return start_process


def command(exporter: RecordingExporter, id: str, **options: Any) -> None:
    exporter.commands.append({"id": id, "action": "profile", "deadline_seconds": 60, **options})


def result(exporter: RecordingExporter, id: str) -> dict[str, Any]:
    return wait_for(lambda: exporter.result(id), f"the result of {id}")


def profile(exporter: RecordingExporter, id: str) -> dict[str, Any]:
    """Return the profile of a command, whose rows add up to its devices."""
    ended = result(exporter, id)
    assert (ended["outcome"], ended.get("profile")) == ("done", f"kept-{id}"), ended
    return checked(exporter.profiles[-1])


def checked(taken: dict[str, Any]) -> dict[str, Any]:
    for number, device in enumerate(taken["devices"]):
        rows = [row for row in taken["rows"] if row[0] == number]
        assert sum(row[4] for row in rows) == device["allocated_bytes"]
        if device["peak_bytes"] is not None:
            assert sum(row[6] for row in rows) == device["peak_bytes"]
    return taken


def held(taken: dict[str, Any], column: int = 4) -> dict[tuple[str, str], int]:
    """Return the bytes by kind and name of their owner, and by the innermost frame of this test's programs."""
    found: dict[tuple[str, str], int] = {}
    for row in taken["rows"]:
        keys = [] if row[3] is None else [tuple(taken["owners"][row[3]][:2])]
        if row[2] is not None:
            frames = [taken["frames"][number] for number in taken["stacks"][row[2]]]
            frame = next((frame for frame in frames if frame[1].endswith(PROFILED)), frames[0])
            keys.append(("stack", f"{frame[0]}:{frame[2]}"))
        for key in keys:
            found[key] = found.get(key, 0) + (row[column] or 0)
    return found


def line_of(text: str) -> int:
    return 1 + next(number for number, line in enumerate(Path(PROFILED).read_text().splitlines()) if text in line)


def test_a_training_loop_is_profiled_and_stays_as_it_is(start: Start, exporter: RecordingExporter) -> None:
    process = start(TRAIN)
    wait_for(lambda: exporter.reports, "a report")
    process.exec("before = set(sys.modules)")
    model_bytes = process.exec("result = sum(-(-p.nbytes // 512) * 512 for p in training.model.parameters())")

    command(exporter, "live")
    live = profile(exporter, "live")
    assert live["devices"][0]["allocated_bytes"] == process.exec("result = torch.cuda.memory_allocated()")
    assert any("gradients" in note for note in live["notes"]), "no step ended"
    process.exec("import time; loop = Loop(lambda: (training.optimizer.step(), time.sleep(0.1)))")
    command(exporter, "stepping", search_seconds=10)
    owners = held(profile(exporter, "stepping"))
    process.exec("loop.stop()")
    assert owners["parameters", "layers.0.up.weight"] == 256 * 1024 * 4
    assert owners["gradients", "layers.0.up.weight"] == 256 * 1024 * 4
    kinds = {kind: sum(size for (each, _), size in owners.items() if each == kind) for kind, _ in owners}
    assert kinds["parameters"] == kinds["gradients"] == model_bytes
    assert 2 * model_bytes <= kinds["optimizer_state"] < 2.1 * model_bytes
    assert any("losses" in name for kind, name in owners if kind == "tensors")

    command(exporter, "first", duration_seconds=60)
    process.exec("wait_for_recording()")
    command(exporter, "second")
    assert result(exporter, "second")["reason_code"] == "queue_full"
    exporter.cancelled.append("first")
    assert result(exporter, "first")["reason_code"] == "cancelled"
    process.exec("wait_for_recording(False)")

    command(exporter, "short", duration_seconds=60)
    (peak, _) = process.exec("result = recorded(lambda: [training.step() for _ in range(20)])")
    short = profile(exporter, "short")
    assert short["devices"][0]["peak_bytes"] == peak
    assert short["devices"][0]["allocated_bytes"] == process.exec("result = torch.cuda.memory_allocated()")
    at_peak = held(short, 6)
    assert at_peak["stack", f"forward:{line_of('self.down(torch.relu')}"] > 0
    assert ("unseen", "") not in at_peak
    assert at_peak["parameters", "layers.0.up.weight"] == 256 * 1024 * 4

    command(exporter, "stopped", duration_seconds=60)
    process.exec("wait_for_recording(); gpumem_client.stop(); wait_for_recording(False)")
    added = set(process.exec("result = sorted({name.partition('.')[0] for name in set(sys.modules) - before})"))
    assert added <= {"gpumem_client", *sys.stdlib_module_names}
    assert process.finish() == 0
    assert not process.stderr()


def test_an_inference_loop_whose_code_records_itself(start: Start, exporter: RecordingExporter) -> None:
    process = start(
        """
from tests.programs.profiled import *
import gpumem_client, sys
model = Net().cuda().eval()
torch.cuda.memory._record_memory_history(enabled="all", context="all", stacks="python", max_entries=5000)
gpumem_client.start()
def answer():
    with torch.inference_mode():
        cache.append(model(torch.randn(8, 256, device="cuda")))
        del cache[:-100]
cache = []
loop = Loop(answer)
""",
        fresh=True,
    )
    command(exporter, "refused", duration_seconds=1)
    assert result(exporter, "refused")["reason_code"] == "history_recorded"
    command(exporter, "live")
    found = held(profile(exporter, "live"))
    assert found["parameters", "layers.2.down.weight"] == 256 * 1024 * 4
    assert found["buffers", "layers.1.scale"] == 1024
    assert any(kind == "stack" and name.startswith("forward:") for kind, name in found), found
    process.exec("loop.stop()")
    assert process.exec("result = torch._C._cuda_isHistoryEnabled()")
    command(exporter, "still")
    found = held(profile(exporter, "still"))
    assert sum(size for (kind, name), size in found.items() if kind == "tensors" and "cache" in name) == 100 * 8192
    assert not process.exec("result = [name for name in sys.modules if name.startswith('torch._inductor')]")
    process.exec("import types; torch._inductor = types.ModuleType('torch._inductor')")  # as the import takes seconds
    assert process.exec("result = len(torch.cuda.memory._snapshot()['device_traces'][0])") == 5000


def test_a_model_of_transformers(start: Start, exporter: RecordingExporter) -> None:
    process = start(
        """
from tests.programs.profiled import *
from transformers import DynamicCache, GPT2Config, GPT2LMHeadModel
import gpumem_client
torch.set_num_threads(1)
model = GPT2LMHeadModel(GPT2Config(n_layer=2, n_embd=128, n_head=4, vocab_size=500, n_positions=128)).cuda()
optimizer = torch.optim.AdamW(model.parameters())
ids = torch.zeros(4, 64, dtype=torch.long, device="cuda")
def train():
    model(input_ids=ids, labels=ids).loss.backward()
    optimizer.step()
    optimizer.zero_grad()
train()
cache = DynamicCache()
with torch.no_grad():
    model(input_ids=ids, past_key_values=cache)
gpumem_client.start()
"""
    )
    command(exporter, "live")
    live = held(profile(exporter, "live"))
    assert {kind for kind, _ in live} >= {"parameters", "optimizer_state", "kv_cache"}
    assert ("unseen", "") not in live
    assert live["kv_cache", "DynamicCache.layers.0.keys"] == 4 * 4 * 64 * 32 * 4
    command(exporter, "recorded", duration_seconds=60)
    (peak, _) = process.exec("result = recorded(lambda: [train() for _ in range(3)])")
    taken = profile(exporter, "recorded")
    assert taken["devices"][0]["peak_bytes"] == peak
    assert any("modeling_gpt2.py" in file for _, file, _ in taken["frames"])


@pytest.mark.parametrize("settings", ["expandable_segments:True", "max_split_size_mb:21"])
def test_the_bytes_of_a_random_heap_add_up(start: Start, exporter: RecordingExporter, settings: str) -> None:
    process = start(
        "from tests.programs.profiled import *; import gpumem_client; heap = Heap(7); heap.churn(400);"
        "gpumem_client.start()",
        PYTORCH_CUDA_ALLOC_CONF=settings,
    )
    command(exporter, "recorded", duration_seconds=60)
    expected = process.exec("result = recorded(heap.replace_half)")
    taken = profile(exporter, "recorded")
    assert [device["peak_bytes"] for device in taken["devices"]] == expected, taken["notes"]
    allocated = process.exec("result = [torch.cuda.memory_allocated(index) for index in range(2)]")
    assert [device["allocated_bytes"] for device in taken["devices"]] == allocated
    assert {row[1] for row in taken["rows"]} == {"default", "private"}
    assert taken["pause_seconds"] > 0
    reserved = process.exec("result = [torch.cuda.memory_reserved(index) for index in range(2)]")
    command(exporter, "live")
    live = profile(exporter, "live")
    assert [device["reserved_bytes"] for device in live["devices"]] == reserved


def test_what_cannot_be_profiled_is_refused(start: Start, exporter: RecordingExporter) -> None:
    process = start(
        """
from gpumem_client.profile import heap_reader
import gpumem_client, gpumem_client.commands.executor
heap_reader.PAUSE_SECONDS_MAX = 0.0
kept = torch.empty(8, device="cuda")
gpumem_client.start()
"""
    )
    command(exporter, "large")
    assert result(exporter, "large")["reason_code"] == "too_many_objects"
    command(exporter, "forced", force=True)
    assert profile(exporter, "forced")["devices"][0]["allocated_bytes"] == 512
    exporter.profile_status = 429
    command(exporter, "lost", force=True)
    assert result(exporter, "lost")["reason_code"] == "profile_not_sent"
    exporter.profile_status = 201
    process.exec("from gpumem_client.profile import heap_reader; heap_reader._ENTRIES_MAX = 16")
    command(exporter, "overwritten", force=True, duration_seconds=60)
    process.exec(
        "from tests.programs.profiled import *; recorded(lambda: [torch.empty(8, device='cuda') for _ in range(30)])"
    )
    overwritten = profile(exporter, "overwritten")
    assert overwritten["devices"][0]["peak_bytes"] is None
    assert overwritten["notes"]
    process.exec(
        "graph = torch.cuda.CUDAGraph(); stream = torch.cuda.Stream(); torch.cuda.set_stream(stream);"
        "graph.capture_begin()"
    )
    command(exporter, "captured", deadline_seconds=0.5, force=True, duration_seconds=1)
    assert result(exporter, "captured")["reason_code"] == "cuda_graph_capture"
    assert process.exec("graph.capture_end(); result = torch._C._cuda_isHistoryEnabled()") is False
    assert process.finish() == 0

    empty = start("import gpumem_client; torch.cuda.init(); gpumem_client.start()", fresh=True)
    command(exporter, "nothing")
    assert result(exporter, "nothing")["reason_code"] == "no_device"
    assert empty.finish() == 0

    start("import gpumem_client; kept = torch.empty(8, device='cuda'); gpumem_client.start()", **ASYNC)
    for name, seconds in (("a", 0), ("b", 1)):
        command(exporter, name, duration_seconds=seconds)
        assert result(exporter, name)["reason_code"] == "not_supported_by_allocator"


ASYNC = {"PYTORCH_CUDA_ALLOC_CONF": "backend:cudaMallocAsync"}


def test_an_error_that_is_caught_gets_one_profile_per_minute(start: Start, exporter: RecordingExporter) -> None:
    process = start(
        """
from tests.programs.profiled import *
import gpumem_client
gpumem_client.start(oom_profile=True)
training = Training()
keep = []
"""
    )
    reported = wait_for(lambda: exporter.reports, "a report")
    process.exec(
        """
for _ in range(3):
    training.step()
    try:
        run_out_of_memory(keep)
    except torch.OutOfMemoryError:
        keep.clear()
"""
    )
    taken = checked(wait_for(lambda: exporter.profiles, "the profile")[0])
    ooms = wait_for(lambda: [oom for report in reported for oom in report.get("ooms", ())][2:], "three errors")
    assert ooms
    (device,) = taken["devices"]
    first = next(oom for report in reported for oom in report.get("ooms", ()))
    assert (taken["cause"], taken["oom_number"]) == ("out_of_memory", first["number"])
    assert device["allocated_bytes"] == first["sample"]["allocated_bytes"]
    found = held(taken)
    assert found["stack", f"run_out_of_memory:{line_of('filling.append')}"] > 6 << 30
    assert found["stack", f"run_out_of_memory:{line_of('keep.append(torch.empty(700')}"] >= 700_000_000
    assert found["parameters", "layers.0.up.weight"] == 256 * 1024 * 4
    assert ("before", "") not in found
    command(exporter, "recorded", duration_seconds=0.3)
    assert profile(exporter, "recorded")["devices"][0]["peak_bytes"] is not None
    assert process.exec("training.step(); result = torch._C._cuda_isHistoryEnabled()")
    assert len(exporter.profiles) == 2
    process.exec("gpumem_client.stop(); wait_for_recording(False)")


def test_an_error_that_ends_the_process_has_an_event_and_a_profile(start: Start, exporter: RecordingExporter) -> None:
    process = start(TRAIN, GPUMEM_OOM_PROFILE="1")
    wait_for(lambda: exporter.reports, "a report")
    assert process.end_with("from tests.programs.profiled import run_out_of_memory\nrun_out_of_memory([])") == 1
    assert "OutOfMemoryError" in process.stderr()
    (taken,) = exporter.profiles
    assert taken["oom_number"] in [oom["number"] for report in exporter.reports for oom in report.get("ooms", ())]
    found = held(checked(taken))
    assert found["stack", f"run_out_of_memory:{line_of('filling.append')}"] > 6 << 30
    assert found["parameters", "layers.0.up.weight"] == 256 * 1024 * 4


def test_an_interpreter_without_the_gil_takes_no_profiles(start: Start, exporter: RecordingExporter) -> None:
    start("import sys\nsys._is_gil_enabled = lambda: False\n" + TRAIN)
    command(exporter, "a")
    assert result(exporter, "a")["outcome"] == "unsupported"
    assert "profile" not in exporter.reports[-1]["actions"]
