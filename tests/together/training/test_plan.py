"""`gpumem-plan`: its output, and its numbers against hand arithmetic."""

from __future__ import annotations

import importlib.util
import json
import re
from pathlib import Path
from typing import Any

import pytest

from gpumem_toolkit.planning.devices import CONTEXT_BYTES, DEFAULT_OVERHEAD_BYTES
from tests.emulation.fixtures import MakeNode
from tests.emulation.torch_process import TorchProcess
from tests.support.torch_release import with_the_planners_kernels
from tests.support.truth.golden import assert_golden

MIB = 1 << 20
PROGRAM = "planned_models"
PARAMETERS = 4 * 4 * (512 * 512 + 512)  # bytes of the model of `make`
CONFIG = "loader:\n  batch: 8   # a device\naccumulation: 1\n"
ONE = "float32[B,512]"
NEEDS_TRANSFORMERS = pytest.mark.skipif(
    importlib.util.find_spec("transformers") is None, reason="transformers is not installed"
)
NEEDS_TRITON = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="triton is not installed")


def gpumem_plan(
    process: TorchProcess, *words: str, model: str = "make", in_worker: bool = False
) -> tuple[int, str, str]:
    """Run the command for a model of the program."""
    factory = model if ":" in model else f"tests.programs.{PROGRAM}:{model}"
    code, out, err = process.call_program(PROGRAM, "command", words=[factory, *words], in_worker=in_worker)
    return code, out, err


def planned(process: TorchProcess, *words: str, code: int = 0, in_worker: bool = False) -> Any:
    """Return the plan of the usual model as JSON."""
    ended, out, err = gpumem_plan(process, "--input", ONE, "--json", *words, in_worker=in_worker)
    assert ended == code, err
    return json.loads(out)


def test_a_plan_is_written_into_a_file(process: TorchProcess, tmp_path: Path) -> None:
    config = tmp_path / "config.yaml"
    config.write_text(CONFIG)
    applied = ("--apply", str(config), "--map", "loader.batch=batch", "--map", "accumulation=accumulation")
    target = ("--target", ONE, "--target-effective-batch", "65536")
    plan = planned(process, "--gpu", "1408MiB", "--no-changes", *applied, *target)
    assert plan["batch"] * plan["accumulation"] == 65536
    assert config.read_text() == CONFIG.replace("8 ", f"{plan['batch']} ").replace(": 1", f": {plan['accumulation']}")
    assert plan["reserved_peak_bytes"] <= 256 * MIB, "1408 MiB less 1152 MiB"
    assert plan["breakdown_bytes"]["parameters"] == plan["highest_bytes"]["gradients"] == PARAMETERS
    assert plan["highest_bytes"]["optimizer"] == 2 * PARAMETERS


def test_the_table_names_changes_and_says_if_a_job_does_not_fit(process: TorchProcess) -> None:
    """Numbers are left out; other tests check them."""
    fits = gpumem_plan(process, "--input", ONE, "--gpu", "2GiB,1300MiB", "--devices", "4")
    too_small = gpumem_plan(process, "--input", ONE, "--gpu", "1153MiB", "--no-changes")
    assert [(code, err) for code, _, err in (fits, too_small)] == [(0, ""), (1, "")]
    text = re.sub(r"\b\d[\d.]*( ([KMG]i)?B)?", "#", f"{fits[1]}\n{too_small[1]}")
    assert_golden("plan.txt", re.sub(" +", " ", text))


@pytest.mark.parametrize(
    ("model", "words"),
    [
        ("Grouped", ""),
        pytest.param("Asserting", "", marks=NEEDS_TRANSFORMERS),
        ("make", "--optimizer adamw --optimizer-option capturable=true"),
    ],
)
def test_models_that_count_values_and_optimizers_of_graphs_can_be_planned(
    process: TorchProcess, model: str, words: str
) -> None:
    code, _, err = gpumem_plan(process, "--input", ONE, "--gpu", "2GiB", "--no-changes", *words.split(), model=model)
    assert (code, err) == (0, "")


@pytest.mark.parametrize(
    ("model", "words", "expected"),
    [
        ("nowhere:make", "", "'nowhere'"),
        ("broken", "", r"model factory fails: RuntimeError: no weights here.*planned_models\.py:\d+"),
        ("of_width", "", "'width'"),
        ("OnCuda", "", r"x\.to\(self\.weight\.device\)"),
        pytest.param("Kernel", "", "Triton kernel doubled", marks=NEEDS_TRITON),
        ("Flexible", "", "FlexAttention"),
        ("Unlabeled", "", "--input labels="),
        ("Reading", "", r"planned_models\.py:\d+; plan from measured steps instead: --profile"),
        ("sparse", "--input int64[B,4] --loss mean --optimizer sgd", "sparse=False"),
        ("Recurrent", "--input float32[B,8,512]", r"torch\.lstm runs in cuDNN.*--convolution native"),
        ("make", "--batch 64 --target-effective-batch 128", "target effective batch"),
        ("make", "--batch 0", "invalid batch 0"),
        ("make", "--input tokens=float32[B,512]", "--input NAME=TENSOR"),
        ("make", "--input float32[B,511]", "RuntimeError"),
        ("make", "--optimizer-option momentum=1", "momentum"),
        ("make", "--apply x.yaml", "--map"),
        ("make", "--profile", "CUDA"),
    ],
)
def test_errors_are_one_line(process: TorchProcess, model: str, words: str, expected: str) -> None:
    given = words.split()
    inputs = [] if "--input" in given else ["--input", ONE]
    code, out, err = gpumem_plan(process, "--gpu", "1GiB", *inputs, *given, model=model)
    assert (code, out, err.count("\n")) == (2, "", 1)
    assert err.startswith("gpumem-plan: ")
    assert re.search(expected, err)


@pytest.fixture(scope="module")
def best(process: TorchProcess) -> Any:
    """The plan of the largest batch."""
    return planned(process, "--gpu", "2GiB", "--no-changes")


def test_a_requested_batch_is_planned_with_its_accumulation(process: TorchProcess, best: Any) -> None:
    sizes = ("--gpu", "2GiB", "--no-changes")
    fixed = planned(process, *sizes, "--batch", "64", "--accumulation", "16")
    assert (fixed["batch"], fixed["accumulation"], fixed["effective_batch"]) == (64, 16, 1024)
    assert fixed["fits"] is True
    assert 64 < fixed["largest_batch"] < best["largest_batch"], "gradients live during the forward pass"
    too_large = planned(process, *sizes, "--batch", "1000000", code=1)
    assert (too_large["fits"], too_large["batch"]) == (False, 1000000)


@pytest.mark.parametrize(
    "scenario",
    [
        "models_that_copy_tie_convert_or_read_values_can_be_planned",
        "a_compiled_model_is_planned_as_eager_and_the_plan_says_so",
        "a_script_keeps_the_output_during_backward_and_a_trainer_does_not",
        "the_states_of_optimizers_have_their_documented_sizes",
        "a_lightning_module_is_planned_in_the_loop_of_its_trainer",
        "a_config_is_planned_with_its_training_arguments",
    ],
)
def test_a_plan(process: TorchProcess, scenario: str) -> None:
    process.call_program(PROGRAM, scenario)


@with_the_planners_kernels
def test_a_profile_is_measured_on_the_device(best: Any, make_node: MakeNode) -> None:
    assumed = {"reserved_bytes": DEFAULT_OVERHEAD_BYTES - CONTEXT_BYTES, "context_bytes": CONTEXT_BYTES}
    with TorchProcess(make_node(devices=1, total_bytes=2 << 30, **assumed)) as process:
        measured = planned(process, "--profile", "--batch", "32768", in_worker=True)
    assert measured["gpu"]["total_bytes"] == (2 << 30) - assumed["reserved_bytes"], "without what the driver reserves"
    assert measured["breakdown_bytes"]["parameters"] == measured["breakdown_bytes"]["gradients"] == PARAMETERS
    # The cache at the measured sizes counts as needed at other sizes, so that the profile predicts fewer samples.
    assert 0.85 * best["largest_batch"] < measured["largest_batch"] <= best["largest_batch"]
