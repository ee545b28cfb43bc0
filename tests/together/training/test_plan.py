"""`gpumem-plan`: its output, and its numbers against hand arithmetic."""

from __future__ import annotations

import importlib.util
import json
import re
from pathlib import Path
from typing import Any

import pytest

from tests.emulation.fixtures import MakeNode
from tests.emulation.torch_process import TorchProcess
from tests.support.golden import assert_golden
from tests.support.torch_release import with_the_planners_kernels

MIB = 1 << 20
MODEL = """
import types, torch
from torch import nn

def make():
    return nn.Sequential(*(nn.Sequential(nn.Linear(512, 512), nn.GELU()) for _ in range(4)))

def tied():
    layer = nn.TransformerEncoderLayer(64, 4, 128, batch_first=True)
    model = nn.Sequential(nn.TransformerEncoder(layer, 3), nn.Linear(64, 64))
    model[1].weight = model[0].layers[0].self_attn.out_proj.weight
    return model

def by_values():
    rates = [x.item() for x in torch.linspace(0, 0.1, 3)]
    return nn.Sequential(nn.Linear(8, 8), *(nn.Dropout(rate) for rate in rates))

def converted():
    model = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Linear(8, 8)).half().to("cpu")
    model[2].weight = model[0].weight
    adapter = nn.Linear(8, 2).to(model[0].weight.dtype)
    return nn.Sequential(model, adapter).bfloat16()

class Reading(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(512, 512)

    def forward(self, x):
        return self.layer(x) if x.sum() > 0 else x  # line 30

def sparse():
    return nn.Embedding(512, 8, sparse=True)

class Recurrent(nn.LSTM):
    def __init__(self):
        super().__init__(512, 64)

def broken():
    raise RuntimeError("no weights here")  # line 40

def of_width(width):
    return nn.Linear(512, width)

def out_of_range(count):
    return torch.full((count,), 1e30)

class Truncated(nn.Module):
    def __init__(self):
        super().__init__()
        rates = [x.item() for x in torch.linspace(0, 0.1, 3)]
        self.weight = nn.Parameter(nn.init.trunc_normal_(out_of_range(8192)))

    def forward(self, x):
        return x.sum() * self.weight

class Sampled(nn.Module):
    def __init__(self):
        super().__init__()
        values = out_of_range(8192)
        while (values > 2).any():  # line 61
            values.normal_()

class OnCuda(Reading):
    def forward(self, x):
        return self.layer(x.to("cuda"))

class Kernel(Reading):
    def forward(self, x):
        import triton

        @triton.jit
        def doubled(x):
            pass

        doubled[(1,)](self.layer(x))

class Flexible(Reading):
    def forward(self, x):
        from torch.nn.attention.flex_attention import flex_attention

        x = self.layer(x).view(-1, 4, 8, 16)
        return flex_attention(x, x, x)

class Quantized(Reading):
    def forward(self, x):
        import bitsandbytes

        return bitsandbytes.quantize(x)

class Unlabeled(Reading):
    def forward(self, x):
        return types.SimpleNamespace(loss=None, logits=self.layer(x))

class Compiled(Reading):
    def forward(self, x):
        return torch.nn.functional.scaled_dot_product_attention(*[self.layer(x).view(-1, 4, 8, 16)] * 3)

def compiled():
    return torch.compile(Compiled())

def compiled_in_place():
    model = nn.Sequential(Compiled())
    model[0].compile()
    return model
"""

# One process runs all scenes, and plans in the same process, because importing torch takes most of the time.
# test_plan_worker.py shows that a worker returns the same plan.
SCENES = """
import contextlib, io, os, pathlib, pickle, sys
os.chdir(folder)
sys.path.insert(0, folder)
import mine
import gpumem_toolkit as toolkit
from gpumem_toolkit.planning.command import main
from gpumem_toolkit.planning import planner, simulation
from gpumem_toolkit.planning.job import OPTIMIZERS, Job, parse_tensor
from gpumem_toolkit.planning.worker import Progress

def in_this_process(*call, uses_cuda=False, timeout_seconds, **options):
    function, *arguments = pickle.loads(pickle.dumps(call))
    return function(*arguments, progress=Progress(), **options)

planner.run_in_worker = in_this_process
result = {}

def run(scene, *words):
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        code = main(words)
    result[scene] = code, out.getvalue(), err.getvalue()

one = "float32[B,512]"
job, small = ("mine:make", "--input", one), ("--gpu", "1GiB")
applied = ("--apply", "config.yaml", "--map", "loader.batch=batch", "--map", "accumulation=accumulation")
target = ("--target", one, "--target-effective-batch", "65536")
run("applied", *job, *small, "--no-changes", *applied, *target, "--json")
result["config"] = pathlib.Path("config.yaml").read_text()
run("restored", "--restore", "config.yaml")
result["config again"] = pathlib.Path("config.yaml").read_text()
run("table", *job, "--gpu", "2GiB", "--devices", "4")
run("same as JSON", *job, "--gpu", "2GiB", "--devices", "4", "--no-changes", "--json")
run("no module", "nowhere:make", *small, "--input", one)
run("broken", "mine:broken", *small, "--input", one)
run("factory's argument", "mine:of_width", *small, "--input", one)
run("sampled", "mine:Sampled", *small, "--input", one)
for scene in ("OnCuda", "Kernel", "Flexible", "Quantized", "Unlabeled"):
    run(scene, "mine:" + scene, *small, "--input", one)
run("compiled", "mine:compiled", *small, "--input", one, "--no-changes")
run("no input", "mine:make", *small)
run("fixed", *job, "--gpu", "2GiB", "--no-changes", "--json", "--batch", "64", "--accumulation", "16")
run("fixed, too large", *job, "--gpu", "2GiB", "--no-changes", "--json", "--batch", "1000000")
run("fixed and a target", *job, *small, "--batch", "64", "--target-effective-batch", "128")
run("batch", *job, *small, "--batch", "0")
run("reads a value", "mine:Reading", *small, "--input", one)
run("sparse", "mine:sparse", *small, "--input", "int64[B,4]", "--loss", "mean", "--optimizer", "sparseadam")
run("recurrent", "mine:Recurrent", *small, "--input", "float32[B,8,512]")
run("other argument", "mine:make", *small, "--input", "tokens=" + one)
run("wrong input", "mine:make", *small, "--input", "float32[B,511]")
run("option", *job, *small, "--optimizer-option", "momentum=1")
run("no map", *job, *small, "--apply", "x.yaml")
run("no CUDA", *job, *small, "--profile")
run("too small", *job, "--gpu", "769MiB", "--no-changes")

sequences = dict(inputs="float32[B,16,64]", gpu="1GiB", changes=False)
plans = [
    toolkit.plan(mine.tied, **sequences),
    toolkit.plan(mine.tied, precision="pure-bf16", **sequences),
    toolkit.plan(mine.by_values, "float32[B,8]", "1GiB", optimizer="sgd", changes=False),
]
inputs = dict(inputs=one, gpu="1GiB", optimizer="sgd", changes=False)
result["truncated"] = toolkit.plan(mine.Truncated, **inputs).breakdown["parameters"]
result["notes"] = [toolkit.plan(make, **inputs).notes for make in (mine.compiled, mine.compiled_in_place, mine.make)]
result["frames of Dynamo"] = dict(torch._dynamo.utils.counters["frames"])
converted = toolkit.plan(mine.converted, "bfloat16[B,8]", "1GiB", optimizer="sgd", changes=False)
result["converted"] = converted.breakdown["parameters"]

def traced(optimizer, loop="trainer", **options):
    job = Job(mine.make, [parse_tensor(one)], loss="mean", optimizer=optimizer, optimizer_options=options, loop=loop)
    return simulation.trace_job(job, 1024)

result["loops"] = [sum(traced("sgd", loop).peak().values()) for loop in ("script", "trainer")]
described = {"described": {"bytes": 2}, "lbfgs": {"history_size": 3}}
stateful = set(OPTIMIZERS) - {"none", "sparseadam", "muon"}
result["states"] = {name: traced(name, **described.get(name, {})).highs()["optimizer"] for name in sorted(stateful)}
numbers = sum(p.numel() for p in mine.tied().parameters())
result["parameters"] = [numbers, *(plan.breakdown["parameters"] for plan in plans)]
"""
PROFILE = """
import contextlib, io, sys
from gpumem_toolkit.planning.command import main
sys.path.insert(0, folder)
out, err = io.StringIO(), io.StringIO()
with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
    code = main(words)
result = code, out.getvalue(), err.getvalue()
"""
# Stands in for the package, which needs a GPU.
QUANTIZATION = """
def quantize(x):
    return x.data_ptr() + "no text"
"""
_NEEDS_TRITON = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="triton is not installed")
CONFIG = "loader:\n  batch: 8   # a device\naccumulation: 1\n"
PARAMETERS = 4 * 4 * (512 * 512 + 512)  # bytes of mine.make()


@pytest.fixture(scope="module")
def scenes(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    folder = tmp_path_factory.mktemp("plan")
    (folder / "config.yaml").write_text(CONFIG)
    (folder / "mine.py").write_text(MODEL)
    (folder / "bitsandbytes.py").write_text(QUANTIZATION)
    with TorchProcess(None) as process:
        results: dict[str, Any] = process.exec(SCENES, folder=str(folder), timeout_seconds=110)
    return results


@pytest.mark.slow
def test_a_plan_is_written_into_a_file_and_the_file_is_restored(scenes: dict[str, Any]) -> None:
    code, out, err = scenes["applied"]
    assert code == 0, err
    plan = json.loads(out)
    assert plan["batch"] * plan["accumulation"] == 65536
    expected = CONFIG.replace("8 ", f"{plan['batch']} ").replace(": 1", f": {plan['accumulation']}")
    assert scenes["config"] == expected
    assert f"+  batch: {plan['batch']}   # a device" in err, "the change is shown"
    code, out, err = scenes["restored"]
    assert (code, out.count("\n"), err) == (0, 1, "")
    assert "config.yaml" in out
    assert scenes["config again"] == CONFIG


def test_the_breakdown_equals_hand_arithmetic(scenes: dict[str, Any]) -> None:
    plan = json.loads(scenes["applied"][1])
    assert plan["reserved_peak_bytes"] <= 256 * MIB, "1 GiB less 768 MiB"
    assert plan["breakdown_bytes"]["parameters"] == plan["highest_bytes"]["gradients"] == PARAMETERS
    assert plan["highest_bytes"]["optimizer"] == 2 * PARAMETERS


def test_the_table_names_changes_and_says_if_a_job_does_not_fit(scenes: dict[str, Any]) -> None:
    """Numbers are left out; other tests check them."""
    assert [scenes[scene][0] for scene in ("table", "too small")] == [0, 1]
    assert [scenes[scene][2] for scene in ("table", "too small")] == ["", ""]
    text = "\n".join(scenes[scene][1] for scene in ("table", "too small"))
    assert_golden("plan.txt", re.sub(" +", " ", re.sub(r"\b\d[\d.]*( ([KMG]i)?B)?", "#", text)))


@pytest.mark.parametrize(
    ("scene", "expected"),
    [
        ("no module", "'nowhere'"),
        ("broken", "model factory fails: RuntimeError: no weights here"),
        ("broken", "mine.py:40"),
        ("factory's argument", "'width'"),
        ("sampled", "mine.py:61"),
        ("OnCuda", "x.to(self.weight.device)"),
        pytest.param("Kernel", "Triton kernel doubled", marks=_NEEDS_TRITON),
        ("Flexible", "FlexAttention"),
        ("Quantized", "bitsandbytes"),
        ("Unlabeled", "--input labels="),
        ("fixed and a target", "target effective batch"),
        ("batch", "invalid batch 0"),
        ("no input", "--input"),
        ("reads a value", "mine.py:30; plan from measured steps instead: --profile"),
        ("sparse", "sparse=False"),
        ("recurrent", "torch.lstm runs in cuDNN"),
        ("recurrent", "--convolution native"),
        ("other argument", "--input NAME=TENSOR"),
        ("wrong input", "RuntimeError"),
        ("option", "momentum"),
        ("no map", "--map"),
        ("no CUDA", "CUDA"),
    ],
)
def test_errors_are_one_line(scenes: dict[str, Any], scene: str, expected: str) -> None:
    code, out, err = scenes[scene]
    assert (code, out, err.count("\n")) == (2, "", 1)
    assert err.startswith("gpumem-plan: ")
    assert expected in err


def test_models_that_copy_tie_or_read_values_can_be_planned(scenes: dict[str, Any]) -> None:
    numbers, tied, pure, valued = scenes["parameters"]
    assert (tied, pure, valued) == (4 * numbers, 2 * numbers, 4 * 72)


def test_a_factory_that_samples_until_values_are_in_range_ends(scenes: dict[str, Any]) -> None:
    assert scenes["truncated"] == 4 * 8192


def test_a_requested_batch_is_planned_with_its_accumulation(scenes: dict[str, Any]) -> None:
    fixed, best = (json.loads(scenes[scene][1]) for scene in ("fixed", "same as JSON"))
    assert (fixed["batch"], fixed["accumulation"], fixed["effective_batch"]) == (64, 16, 1024)
    assert fixed["fits"] is True
    assert 64 < fixed["largest_batch"] < best["largest_batch"], "gradients live during the forward pass"
    code, out, _ = scenes["fixed, too large"]
    assert (code, json.loads(out)["fits"], json.loads(out)["batch"]) == (1, False, 1000000)


def test_a_compiled_model_is_planned_as_eager_and_the_plan_says_so(scenes: dict[str, Any]) -> None:
    whole, in_place, plain = scenes["notes"]
    assert "torch.compile" in whole[0]
    assert in_place == whole
    assert plain == []
    assert "torch.compile" in scenes["compiled"][1]
    assert scenes["frames of Dynamo"] == {}, "Dynamo has not seen the planner's functions"


def test_a_factory_may_convert_the_model(scenes: dict[str, Any]) -> None:
    assert scenes["converted"] == 2 * (8 * 8 + 8 + 2 * 8 + 8 + 8 * 2 + 2), "tied parameters stay tied"


def test_a_script_keeps_the_output_during_backward_and_a_trainer_does_not(scenes: dict[str, Any]) -> None:
    script, trainer = scenes["loops"]
    assert script - trainer == 1024 * 512 * 4


def test_the_states_of_optimizers_have_their_documented_sizes(scenes: dict[str, Any]) -> None:
    states = scenes["states"]
    assert states["adam"] == states["radam"] == 2 * PARAMETERS
    assert states["rmsprop"] == states["adagrad"] == PARAMETERS
    assert states["sgd"] == 0
    assert states["described"] == PARAMETERS // 2
    assert states["lbfgs"] == (2 * 3 + 3) * PARAMETERS
    factored = 4 * 4 * (512 + 512 + 512)  # a row and a column of each weight, and each bias
    assert states["adafactor"] == factored
    weights, scales, biases = 2 * 4 * 512 * 512, 2 * 4 * 4 * 1024, 2 * 4 * 4 * 512
    assert states["adam8bit"] == weights + scales + biases


@with_the_planners_kernels
def test_a_profile_is_measured_on_the_device(tmp_path: Path, make_node: MakeNode, scenes: dict[str, Any]) -> None:
    node = make_node(devices=1, total_bytes=2 << 30)
    (tmp_path / "mine.py").write_text(MODEL)
    words = ("mine:make", "--input", "float32[B,512]", "--json", "--profile", "--batch", "32768")
    with TorchProcess(node) as process:
        code, out, err = process.exec(PROFILE, folder=str(tmp_path), words=words, timeout_seconds=110)
    assert code == 0, err
    measured = json.loads(out)
    assert measured["gpu"]["total_bytes"] == (2 << 30) - 256 * MIB, "without what the driver reserves"
    assert measured["breakdown_bytes"]["parameters"] == measured["breakdown_bytes"]["gradients"] == PARAMETERS
    planned = json.loads(scenes["same as JSON"][1])["largest_batch"]
    # The cache at the measured sizes counts as needed at other sizes, so that the profile predicts fewer samples.
    assert 0.85 * planned < measured["largest_batch"] <= planned
