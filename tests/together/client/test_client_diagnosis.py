"""Out-of-memory errors of real training code on the emulated node: following the first advice helps."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.emulation.fixtures import StartTorch
from tests.emulation.node import GIB, EmulatedNode
from tests.support.servers.recording_exporter import RecordingExporter
from tests.support.torch_release import since_torch
from tests.support.waiting import wait_for

STAGES = {
    "forward": ("smaller_batch", "forward"),
    "backward": ("smaller_batch", "backward"),
    "optimizer": ("optimizer_state", "optimizer"),
    "data_transfer": ("pieces", "data transfer"),
    "fragmentation": ("expandable_segments", ""),
    "other_process": ("other_process", "forward"),
    "leak": ("leak", "backward"),
    "huge_request": ("split_request", ""),
}

MEASURED = ("forward", "backward", "leak")
"""The scripts whose block has run before its error."""


@since_torch((2, 15), "the sizes of the staged scripts fit the workspaces of torch 2.15")
def test_following_the_first_advice_makes_each_of_eight_staged_scripts_pass(
    node: EmulatedNode, start_torch: StartTorch
) -> None:
    process = start_torch(PYTORCH_CUDA_ALLOC_CONF=None, PYTORCH_ALLOC_CONF=None)
    process.exec("from tests.programs import staged_ooms")
    for name, (kind, phase) in STAGES.items():
        if name == "other_process":
            node.set_process(4242, 0, 6 * GIB)
        ended = process.exec(f"result = staged_ooms.run({name!r})")
        assert ended["error"] == "OutOfMemoryError", name
        note, said = ended["note"], process.exec("result = staged_ooms.last()")
        assert (said["kind"], said["phase"]) == (kind, phase), f"{name}: {note}"
        assert said["enough"] is (True if name in MEASURED else None), f"{name}: {note}"
        assert "tests/programs/staged_ooms.py" in said["place"]
        assert f"1. {said['text']}" in note
        if name == "leak":
            assert "history" in note
        if name == "other_process":
            assert re.search(r"\b4242\b.*\b6\.0 GiB", note)
            node.set_process(4242, 0, 0)
        followed = process.exec(f"result = staged_ooms.run({name!r}, follow=True)")
        assert followed["error"] is None, f"{name}: {note}"
        assert followed["left"] == 0


FRAGMENTED = """
large = [torch.empty(460 << 20, dtype=torch.uint8, device="cuda") for _ in range(6)]
del large
kept = []
for _ in range(6):
    moment = torch.empty(400 << 20, dtype=torch.uint8, device="cuda")
    kept += [torch.empty(60 << 20, dtype=torch.uint8, device="cuda"), moment]
del kept[1::2], moment
"""


def test_advice_does_not_propose_expandable_segments_beside_a_mem_pool(start_torch: StartTorch) -> None:
    process = start_torch(PYTORCH_CUDA_ALLOC_CONF=None, PYTORCH_ALLOC_CONF=None)
    process.exec("import gpumem_toolkit as toolkit")
    process.exec("graphs_pool = torch.cuda.graph_pool_handle()" + FRAGMENTED)
    ask = "result = toolkit.recommend_allocator_settings().line"
    assert process.exec(ask) == "expandable_segments:True", "a pool of CUDA graphs is no conflict"
    process.exec("pool = torch.cuda.MemPool()")
    assert process.exec(ask) == ""
    process.exec("import gc; gc.freeze()")
    assert process.exec(ask) == "", "the pool is hidden from the garbage collector"


GUARDED = """
import gc, sys
import gpumem_toolkit as toolkit
seen = {}
MIB = 1 << 20

@toolkit.oom_guard(batch_size=lambda n: n, free_frames=True)
def step(n):
    held = torch.empty(n * MIB, dtype=torch.uint8, device="cuda")
    more = torch.empty(n * MIB, dtype=torch.uint8, device="cuda")
    return None

class Mine(Exception):
    pass

torch.empty(1, device="cuda")
before = dict(torch.cuda.memory_stats())
step(1000)
try:
    step(5000)
except torch.OutOfMemoryError as error:
    seen["type"], seen["args"], seen["text"] = type(error) is torch.OutOfMemoryError, len(error.args), str(error)
    seen["notes"] = error.__notes__
    # the error and its frames still exist here
    seen["allocated"], seen["reserved"] = torch.cuda.memory_allocated(), torch.cuda.memory_reserved()
values = step.gpumem_guard.diagnosis.values
seen["grown"], seen["batch_size"], seen["expected"] = values.grown, values.batch_size, values.batch_growth
after = dict(torch.cuda.memory_stats())
seen["reset"] = [k for k in before if "peak" in k and after[k] < before[k]] + [
    k for k in before if k.split(".")[-1] in ("allocated", "freed") and after[k] < before[k]]

try:
    with toolkit.oom_guard() as outer:
        with toolkit.oom_guard() as inner:
            torch.empty(1 << 40, dtype=torch.uint8, device="cuda")
except torch.OutOfMemoryError as error:
    seen["nested"] = len(error.__notes__), inner.diagnosis is not None, outer.diagnosis is None

try:
    with toolkit.oom_guard() as chained:
        try:
            torch.empty(1 << 40, dtype=torch.uint8, device="cuda")
        except torch.OutOfMemoryError as error:
            raise Mine("wrapped") from error
except Mine as error:
    seen["chained"] = error.args, len(error.__notes__), chained.diagnosis.values.requested

try:
    with toolkit.oom_guard(on_oom=lambda diagnosis: 1 / 0):
        torch.empty(1 << 40, dtype=torch.uint8, device="cuda")
except torch.OutOfMemoryError as error:
    seen["callback"] = len(error.__notes__)

@toolkit.oom_guard()
def keeps():
    held = torch.empty(64 * MIB, dtype=torch.uint8, device="cuda")
    torch.empty(1 << 40, dtype=torch.uint8, device="cuda")
try:
    keeps()
except torch.OutOfMemoryError as error:
    trace = error.__traceback__
    while trace.tb_next:
        trace = trace.tb_next
    seen["kept"] = sorted(trace.tb_frame.f_locals), torch.cuda.memory_allocated()
    del trace

try:
    with toolkit.oom_guard():
        raise ValueError("another")
except ValueError as error:
    seen["other"] = hasattr(error, "__notes__")
result = seen
"""


def test_the_error_keeps_its_frames_unless_free_frames_is_set_and_has_a_note(start_torch: StartTorch) -> None:
    seen = start_torch(PYTORCH_CUDA_ALLOC_CONF=None).exec(GUARDED)
    assert seen["type"]
    assert seen["args"] == 1
    assert "4.88 GiB" in seen["text"]
    (note,) = seen["notes"]
    assert "5000" in note
    assert (seen["allocated"], seen["reserved"]) == (0, 0)
    assert seen["batch_size"] == 5000
    assert abs(seen["grown"] - 5000 * (1 << 20)) < 0.01 * seen["grown"]  # the text has two decimals
    assert seen["expected"] == 2 * 5000 * (1 << 20)
    assert seen["reset"] == []
    assert seen["nested"] == [1, True, True]
    assert seen["chained"] == [["wrapped"], 1, 1 << 40]
    assert seen["callback"] == 1
    assert seen["kept"] == [["held"], 64 << 20]
    assert seen["other"] is False


PHASES = """
import gpumem_client as client
import gpumem_toolkit as toolkit
guard = toolkit.oom_guard()
def fails():
    with client.phase("before"):
        pass
    with client.phase("outer"), client.phase("inner"):
        torch.empty(1 << 40, dtype=torch.uint8, device="cuda")
try:
    guard(fails)()
except torch.OutOfMemoryError as error:
    values = guard.diagnosis.values
    result = values.phase, values.user_phase, error.__notes__[0].splitlines()[0]
"""


def test_a_diagnosis_has_the_phase_of_the_error_although_the_error_has_ended_it(start_torch: StartTorch) -> None:
    phase, user_phase, note = start_torch().exec(PHASES)
    assert (phase, user_phase) == ("inner", "inner")
    assert " in inner" in note


def test_with_a_reporter_the_values_are_exact_to_the_byte(
    node: EmulatedNode, start_torch: StartTorch, tmp_path: Path
) -> None:
    with RecordingExporter(tmp_path / "exporter.sock") as exporter:
        process = start_torch(GPUMEM_EXPORTER_URL=exporter.url, PYTORCH_CUDA_ALLOC_CONF=None)
        process.call("start_client")
        process.call("alloc", nbytes=(1 << 30) + 12345, device=1)
        wait_for(lambda: exporter.reports, "the first report")
        values = process.exec(
            "import gpumem_toolkit as toolkit\n"
            "import dataclasses\n"
            "try:\n"
            "    with toolkit.oom_guard() as guard:\n"
            "        torch.empty((9 << 30) + 7, dtype=torch.uint8, device='cuda:1')\n"
            "except torch.OutOfMemoryError:\n"
            "    result = dataclasses.asdict(guard.diagnosis.values)\n"
        )
        book = node.books()[1]
        stats = process.call("stats", device=1)
    assert values["device"] == 1
    assert values["free"] == book.free_bytes
    assert values["allocated"] == stats["allocated_bytes.all.current"]
    assert values["reserved"] == stats["reserved_bytes.all.current"]
    assert values["requested"] == (9 << 30) + (2 << 20), "rounded up to the requested segment"


CAUSES = """
import copy
import gpumem_toolkit as toolkit
MIB = 1 << 20

class Wide(torch.nn.Module):
    def forward(self, x, other=None):
        return x.repeat(1 << 20, 64)

class Deep(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.wide = torch.nn.Linear(64, 64), Wide()
    def forward(self, x, other=None):
        return self.wide(self.first(x), other)

model, x = Deep().cuda(), torch.empty(32, 64, device="cuda")

@torch.no_grad()
def decorated():
    return model(x)

def within():
    with torch.inference_mode():
        return model(x)

def summed():
    total = 0
    for _ in range(5):
        total = total + model.first(x).mean()
    return model(x) if total is not None else None

def evaluated():
    return copy.deepcopy(model).eval()(x)

result = {}
for name, function in {
    "trained": lambda: model(x), "decorated": decorated, "within": within, "summed": summed, "evaluated": evaluated,
    "agreeing": lambda: model(x, x[:, :1]), "differing": lambda: model(x, x[:8]),
}.items():
    guard = toolkit.oom_guard()
    try:
        guard(function)()
    except torch.OutOfMemoryError:
        values = guard.diagnosis.values
        kinds = [advice.kind for advice in guard.diagnosis.advice]
        result[name] = [values.phase, values.gradients, values.batch_size, kinds]
"""


def test_the_frames_and_the_live_tensors_show_what_is_kept_for_a_backward_pass(start_torch: StartTorch) -> None:
    seen = start_torch(PYTORCH_CUDA_ALLOC_CONF=None, PYTORCH_ALLOC_CONF=None).exec(CAUSES)
    for name in ("trained", "summed", "evaluated", "agreeing", "differing"):
        phase, gradients, _, kinds = seen[name]
        assert (phase, gradients) == ("forward", True), name
        assert "checkpointing" in kinds
    for name in ("decorated", "within"):
        phase, gradients, _, kinds = seen[name]
        assert (phase, gradients) == ("forward", False), name
        assert not {"checkpointing", "offload", "mixed_precision", "accumulation"} & set(kinds)
    assert "separate_backward" in seen["summed"][3]
    assert "separate_backward" not in seen["trained"][3]
    assert seen["evaluated"][3][0] == "inference_mode"
    assert [seen[name][2] for name in ("trained", "agreeing", "differing")] == [None, 32, None]


RAISED_BY_A_LIBRARY = """
import gpumem_toolkit as toolkit
guard = toolkit.oom_guard(clean=False)
try:
    with guard:
        held = torch.empty(40 << 20, dtype=torch.uint8, device="cuda")
        del held
        raise RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`")
except RuntimeError:
    before = torch.cuda.memory_reserved()
    torch.cuda.empty_cache()
result = guard.diagnosis.values.reclaimable, before - torch.cuda.memory_reserved()
"""


@pytest.mark.parametrize("settings", ["expandable_segments:False", "expandable_segments:True"])
def test_an_error_of_a_library_shows_what_a_clear_would_release(start_torch: StartTorch, settings: str) -> None:
    process = start_torch(PYTORCH_CUDA_ALLOC_CONF=settings)
    process.exec("kept = torch.empty(3 << 20, dtype=torch.uint8, device='cuda')")
    shown, released = process.exec(RAISED_BY_A_LIBRARY)
    assert shown == released > 0
