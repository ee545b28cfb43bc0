"""Models to plan, the command that plans them, and numbers of plans against hand arithmetic.

The functions run in a process with torch. `plan` plans in that process, because a new one would import torch again.
test_plan_worker.py shows that a worker returns the same plan.
"""

from __future__ import annotations

import contextlib
import io
import pickle
import sys
import types
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional

import gpumem_toolkit as toolkit
from gpumem_client.wire.errors import ConfigurationError
from gpumem_toolkit.planning import planner, simulation
from gpumem_toolkit.planning.command import main
from gpumem_toolkit.planning.job import CHOICES, Job, parse_tensor
from gpumem_toolkit.planning.planner_process import Progress

INPUT = "float32[B,512]"


def make():
    return nn.Sequential(*(nn.Sequential(nn.Linear(512, 512), nn.GELU()) for _ in range(4)))


def tied():
    layer = nn.TransformerEncoderLayer(64, 4, 128, batch_first=True)
    model = nn.Sequential(nn.TransformerEncoder(layer, 2), nn.Linear(64, 64))
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
        return self.layer(x) if x.sum() > 0 else x


def sparse():
    return nn.Embedding(512, 8, sparse=True)


class Recurrent(nn.LSTM):
    def __init__(self):
        super().__init__(512, 64)


def broken():
    raise RuntimeError("no weights here")


def of_width(width):
    return nn.Linear(512, width)


def out_of_range(count):
    return torch.full((count,), 1e30)


class Grouped(nn.Linear):
    def __init__(self):
        super().__init__(512, int(torch.unique(torch.tensor([8, 8, 16])).sum()))


class Asserting(Reading):
    def forward(self, x):
        from transformers.utils.import_utils import torch_compilable_check

        torch_compilable_check(x.sum() == 0, "the number of image tokens is wrong")
        return self.layer(x)


class Truncated(nn.Module):
    def __init__(self):
        super().__init__()
        self.rates = [x.item() for x in torch.linspace(0, 0.1, 3)]
        self.weight = nn.Parameter(nn.init.trunc_normal_(out_of_range(8192)))

    def forward(self, x):
        return x.sum() * self.weight


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

        return flex_attention(*[self.layer(x).view(-1, 4, 8, 16)] * 3)


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


PARAMETERS = 4 * sum(parameter.numel() for parameter in make().parameters())


def in_this_process(*call: Any, uses_cuda: bool = False, timeout_seconds: float, **options: Any) -> Any:
    function, *arguments = pickle.loads(pickle.dumps(call))
    return function(*arguments, progress=Progress(), **options)


def command(words: list[str], *, in_worker: bool = False) -> tuple[int, str, str]:
    """Return the exit code of `gpumem-plan` and what it prints."""
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err), pytest.MonkeyPatch.context() as patch:
        if not in_worker:
            patch.setattr(planner, "run_in_worker", in_this_process)
        code = main(words)
    return code, out.getvalue(), err.getvalue()


def plan(make_model: Any, inputs: str = INPUT, **options: Any) -> toolkit.Plan:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(planner, "run_in_worker", in_this_process)
        return toolkit.plan(make_model, inputs, "2GiB", **{"optimizer": "sgd", "changes": False, **options})


def models_that_copy_tie_convert_or_read_values_can_be_planned() -> None:
    numbers = sum(parameter.numel() for parameter in tied().parameters())
    for make_model, inputs, options, expected in (
        (tied, "float32[B,16,64]", {}, 4 * numbers),
        (tied, "float32[B,16,64]", {"precision": "pure-bf16"}, 2 * numbers),
        (by_values, "float32[B,8]", {}, 4 * 72),
        (Truncated, INPUT, {}, 4 * 8192),
        (converted, "bfloat16[B,8]", {}, 2 * (8 * 8 + 8 + 2 * 8 + 8 + 8 * 2 + 2)),  # tied parameters stay tied
    ):
        assert plan(make_model, inputs, **options).breakdown["parameters"] == expected, make_model


def a_compiled_model_is_planned_as_eager_and_the_plan_says_so() -> None:
    whole, in_place, plain = (plan(each).notes for each in (compiled, compiled_in_place, make))
    assert "torch.compile" in whole[0]
    assert in_place == whole
    assert plain == ()
    assert not torch._dynamo.utils.counters["frames"], "Dynamo has not seen the planner's functions"


def traced(optimizer: str, loop: str = "trainer", **options: Any) -> Any:
    job = Job(make, [parse_tensor(INPUT)], loss="mean", optimizer=optimizer, optimizer_options=options, loop=loop)
    return simulation.trace_job(job, 1024)


def a_script_keeps_the_output_during_backward_and_a_trainer_does_not() -> None:
    script, trainer = (sum(traced("sgd", loop).shares()[0].values()) for loop in ("script", "trainer"))
    assert script - trainer == 1024 * 512 * 4


def the_states_of_optimizers_have_their_documented_sizes() -> None:
    stateful = set(CHOICES["optimizer"]) - {"none", "muon"}
    states = {name: traced(name).shares()[1]["optimizer"] for name in stateful}
    assert states["adam"] == states["radam"] == 2 * PARAMETERS
    assert states["rmsprop"] == states["adagrad"] == PARAMETERS
    assert states["sgd"] == 0
    assert states["adafactor"] == 4 * 4 * (512 + 512 + 512), "a row and a column of each weight, and each bias"
    weights, scales, biases = 2 * 4 * 512 * 512, 2 * 4 * 4 * 1024, 2 * 4 * 4 * 512
    assert states["adam8bit"] == weights + scales + biases


class Module(nn.Module):
    """Has the interface of a LightningModule."""

    automatic_optimization = True

    def __init__(self) -> None:
        super().__init__()
        self.net = make()

    def training_step(self, batch: Any, _index: int) -> dict[str, Any]:
        x, y = batch
        return {"loss": functional.mse_loss(self.net(x), y)}

    def configure_optimizers(self) -> Any:
        return {"optimizer": torch.optim.AdamW(self.parameters())}


def with_trainer() -> tuple[Any, Any]:
    return Module(), SimpleNamespace(precision="bf16-mixed", accumulate_grad_batches=3)


def a_lightning_module_is_planned_in_the_loop_of_its_trainer() -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(sys.modules, "lightning.pytorch", SimpleNamespace(LightningModule=Module))
        alone, trained = (
            plan(make_one, INPUT, targets=INPUT, optimizer="adamw") for make_one in (Module, with_trainer)
        )
        assert (alone.source, alone.accumulation, trained.accumulation) == ("lightning", 1, 3)
        parameters = sum(4 * each.numel() for each in make().parameters())
        # The gradients stay in the next forward pass.
        assert alone.highest["optimizer"] == 2 * alone.highest["gradients"] == 2 * parameters
        assert trained.largest_batch != alone.largest_batch
        patch.setattr(Module, "automatic_optimization", False)
        with pytest.raises(ConfigurationError, match="manual optimization"):
            plan(Module, INPUT, targets=INPUT, optimizer="adamw")
        with pytest.raises(ConfigurationError, match="its own optimizer"):
            plan(Module, INPUT, targets=INPUT)


@dataclass
class Arguments:
    """Some of the TrainingArguments."""

    optim: str = "adamw_torch"
    bf16: bool = False
    fp16: bool = False
    gradient_accumulation_steps: int = 1
    per_device_train_batch_size: int = 8


class TinyForCausalLM(nn.Module):
    """Has the interface of a model of transformers."""

    def __init__(self, config: Any) -> None:
        super().__init__()
        self.config = config
        self.embedding = nn.Embedding(config.vocabulary, 64)

    @classmethod
    def _from_config(cls, config: Any) -> TinyForCausalLM:
        return cls(config)

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor) -> Any:
        logits = functional.linear(self.embedding(input_ids), self.embedding.weight)
        loss = functional.cross_entropy(logits.flatten(0, 1), labels.flatten())
        return SimpleNamespace(loss=loss, logits=logits)


def a_config_is_planned_with_its_training_arguments() -> None:
    config = SimpleNamespace(architectures=["TinyForCausalLM"], vocabulary=1000)

    def from_pretrained(path: str, *, local_files_only: bool) -> Any:
        if path != "tiny" or not local_files_only:
            raise OSError("not here")
        return config

    library = SimpleNamespace(
        AutoConfig=SimpleNamespace(from_pretrained=from_pretrained),
        TrainingArguments=Arguments,
        TinyForCausalLM=TinyForCausalLM,
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(planner, "run_in_worker", in_this_process)
        patch.setitem(sys.modules, "transformers", library)
        given = {"per_device_train_batch_size": 4, "gradient_accumulation_steps": 2, "optim": "sgd"}
        planned = toolkit.plan("tiny", gpu=["2GiB", "1200MiB"], sequence=128, training_arguments=given)
        assert (planned.source, planned.batch, planned.accumulation) == ("transformers", 4, 2)
        assert planned.breakdown["parameters"] == 4 * 64 * 1000
        assert planned.highest["optimizer"] == 0
        assert [fit.gpu.name for fit in planned.on] == ["2GiB", "1200MiB"]
        assert planned.on[0].fits
        larger = toolkit.plan("tiny", gpu="1300MiB", sequence=128, batch=1024, training_arguments=given)
        assert not larger.fits
        assert [each.name for each in larger.changes[1:]] == ["bf16 autocast", "checkpointing", "sharding over 2"]
        free = toolkit.plan("tiny", gpu="2GiB", sequence=128, changes=False)
        assert free.batch == free.largest_batch > 8, "without TrainingArguments the planner chooses"
        with pytest.raises(ConfigurationError, match=r"lion_32bit.*adamw_torch"):
            toolkit.plan("tiny", gpu="2GiB", sequence=128, training_arguments={"optim": "lion_32bit"})
        with pytest.raises(ConfigurationError, match="--sequence"):
            toolkit.plan("tiny", gpu="2GiB")
        with pytest.raises(ConfigurationError, match=r"'none'.*MODULE:FACTORY"):
            toolkit.plan("none", gpu="2GiB")
