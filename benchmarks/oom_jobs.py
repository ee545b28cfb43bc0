"""Jobs with the libraries that people use which run out of memory on a device of 2 GiB, for `benchmarks.ooms`.

Each is a function of the kind of advice that it follows, empty at first. It follows only advice that is written for it.
"""

from __future__ import annotations

import contextlib
import copy
import itertools
import os
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import accelerate
import lightning
import timm
import torch
import torchmetrics
import transformers
from torch import Tensor, nn
from torch.nn import functional
from transformers.initialization import no_init_weights

import gpumem_toolkit as toolkit

MIB = 1 << 20
HIDDEN = 512
CACHED = {"hidden_size": 256, "intermediate_size": 256, "num_hidden_layers": 8}


class Guarded(NamedTuple):
    """A job, the cause of its error, and the kinds of advice that remove the cause."""

    cause: str
    right: tuple[str, ...]
    run: Callable[[str, Callable[..., Any]], None]
    """Receives the advice to follow and `oom_guard`."""


JOBS: dict[str, Guarded] = {}


def _job(cause: str, *right: str) -> Callable[[Callable[[str, Callable[..., Any]], None]], None]:
    def add(run: Callable[[str, Callable[..., Any]], None]) -> None:
        JOBS[run.__name__] = Guarded(cause, right, run)

    return add


def _llama(**options: Any) -> Any:
    sizes = {
        "hidden_size": HIDDEN,
        "intermediate_size": 4 * HIDDEN,
        "num_hidden_layers": 4,
        "num_attention_heads": 8,
        "num_key_value_heads": 8,
        "vocab_size": 1000,
        "max_position_embeddings": 1 << 20,
    }
    with no_init_weights():
        return transformers.LlamaForCausalLM(transformers.LlamaConfig(**{**sizes, **options}))


def _tokens(batch: int, length: int) -> Tensor:
    return torch.zeros(batch, length, dtype=torch.int64, device="cuda")


@contextlib.contextmanager
def _folder() -> Iterator[str]:
    with tempfile.TemporaryDirectory(prefix="gpumem-oom-") as folder:
        yield folder


def _arguments(folder: str, **options: Any) -> Any:
    usual = {"report_to": "none", "disable_tqdm": True, "save_strategy": "no", "logging_strategy": "no"}
    return transformers.TrainingArguments(output_dir=folder, **{**usual, **options})


class _Texts(torch.utils.data.Dataset[dict[str, Tensor]]):
    def __init__(self, count: int, length: int) -> None:
        self.count, self.length = count, length

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        tokens = torch.zeros(self.length, dtype=torch.int64)
        return {"input_ids": tokens, "labels": tokens}


@_job("a model of 1.6 GiB in float32 (transformers)", "half_precision")
def model_too_large(advice: str, guard: Callable[..., Any]) -> None:
    with torch.device("meta"):
        model = _llama(hidden_size=4096, intermediate_size=11008, num_hidden_layers=2)
    model.to_empty(device="cpu")
    with guard():
        (model.to(torch.bfloat16) if advice == "half_precision" else model).cuda()


@_job("a checkpoint of 0.8 GiB in bfloat16, loaded in float32 (transformers)", "load_dtype")
def loaded_in_float32(advice: str, guard: Callable[..., Any]) -> None:
    with _folder() as folder:
        with torch.device("meta"):
            model = _llama(hidden_size=4096, intermediate_size=11008, num_hidden_layers=2)
        model.to_empty(device="cpu").to(torch.bfloat16).save_pretrained(folder)
        del model
        dtype = "bfloat16" if advice == "load_dtype" else "float32"
        with guard():
            transformers.LlamaForCausalLM.from_pretrained(folder, dtype=dtype, device_map="cuda")


@_job("logits kept in compute_loss (transformers Trainer)", "leak")
def kept_logits(advice: str, guard: Callable[..., Any]) -> None:
    kept: list[Any] = []

    class Keeping(transformers.Trainer):
        def compute_loss(self, model: Any, inputs: Any, return_outputs: bool = False, **_: Any) -> Any:
            output = model(**inputs)
            kept.append(output.logits.detach().mean().item() if advice == "leak" else output.logits.detach())
            return (output.loss, output) if return_outputs else output.loss

    with _folder() as folder:
        arguments = _arguments(folder, max_steps=90, per_device_train_batch_size=8)
        trainer = Keeping(_llama(vocab_size=8000, num_hidden_layers=1), arguments, train_dataset=_Texts(1000, 128))
        step = guard(batch_size=8)(trainer.training_step)
        trainer.training_step = step
        trainer.train()


@_job("another process has 0.9 GiB (timm)", "other_process")
def other_process(advice: str, guard: Callable[..., Any]) -> None:
    held, ready = os.pipe(), os.pipe()
    if advice != "other_process" and os.fork() == 0:
        hold = torch.empty(400 * MIB, dtype=torch.uint8, device="cuda")
        os.write(ready[1], b"1")
        os.close(held[1])
        os.read(held[0], 1)
        del hold
        os._exit(0)
    if advice != "other_process":
        os.read(ready[0], 1)
    model = timm.create_model("resnet18").cuda()
    with guard():
        model(torch.empty(32, 3, 224, 224, device="cuda")).sum().backward()


@_job("predictions (B, 1) minus targets (B,) (torchmetrics)", "split_request")
def broadcast(advice: str, guard: Callable[..., Any]) -> None:
    model, inputs, targets = nn.Linear(8, 1).cuda(), torch.empty(30_000, 8).cuda(), torch.empty(30_000).cuda()
    metric = torchmetrics.MeanMetric().cuda()
    with guard():
        predicted = model(inputs)
        metric.update((predicted.squeeze(1) if advice == "split_request" else predicted).sub(targets).square().mean())


@_job("messages of 12 million edges (torch_geometric)", "split_request")
def edges(advice: str, guard: Callable[..., Any]) -> None:
    import torch_geometric.nn  # initializes the driver: after the fork

    convolution = torch_geometric.nn.SAGEConv(64, 64).cuda()
    nodes, pairs = torch.empty(100_000, 64).cuda(), torch.zeros(2, 12_000_000, dtype=torch.int64).cuda()
    count = 16 if advice == "split_request" else 1
    with guard(), torch.inference_mode():
        for part in pairs.chunk(count, dim=1):
            convolution(nodes, part)


@_job("decoding an image of 1024 x 1024 (diffusers)", "tiling")
def image_decoding(advice: str, guard: Callable[..., Any]) -> None:
    import diffusers  # initializes the driver: after the fork

    vae = diffusers.AutoencoderKL(
        sample_size=128,
        block_out_channels=(64, 128),
        down_block_types=("DownEncoderBlock2D",) * 2,
        up_block_types=("UpDecoderBlock2D",) * 2,
    ).cuda()
    if advice == "tiling":
        vae.enable_tiling()
    with guard(), torch.inference_mode():
        vae.decode(torch.empty(1, 4, 512, 512, device="cuda"))


@_job("logits of a vocabulary of 128,000 (transformers)", "chunked_loss")
def vocabulary(advice: str, guard: Callable[..., Any]) -> None:
    model = _llama(vocab_size=128_000, num_hidden_layers=1, hidden_size=256).cuda()
    tokens = _tokens(4, 1024)
    with guard():
        if advice == "chunked_loss":
            hidden = model.model(tokens).last_hidden_state.flatten(0, 1)
            for part, targets in zip(hidden.chunk(64), tokens.flatten().chunk(64), strict=True):
                loss = torch.utils.checkpoint.checkpoint(
                    lambda h, t: functional.cross_entropy(model.lm_head(h), t), part, targets, use_reentrant=False
                )
                loss.backward(retain_graph=True)
        else:
            model(input_ids=tokens, labels=tokens).loss.backward()


@_job("eager attention over 8,192 tokens (transformers)", "fused_attention")
def eager_attention(advice: str, guard: Callable[..., Any]) -> None:
    kind = "sdpa" if advice == "fused_attention" else "eager"
    model = _llama(num_hidden_layers=1, intermediate_size=HIDDEN, attn_implementation=kind).cuda()
    tokens = _tokens(2, 8192)
    with guard():
        model(input_ids=tokens, labels=tokens).loss.backward()


@_job("40 losses summed before one backward pass (timm)", "separate_backward")
def summed_losses(advice: str, guard: Callable[..., Any]) -> None:
    model = timm.create_model("resnet18").cuda()
    total: Any = 0.0
    with guard():
        for _ in range(40):
            loss = model(torch.empty(16, 3, 128, 128, device="cuda")).square().mean()
            if advice == "separate_backward":
                (loss / 40).backward()
            else:
                total = total + loss
        if advice != "separate_backward":
            (total / 40).backward()


@_job("decoding 256 sequences with a cache (transformers)", "cache_length")
def decoding(advice: str, guard: Callable[..., Any]) -> None:
    model = _llama(**CACHED).cuda().eval()
    with guard(), torch.inference_mode():
        for batch in [64] * 4 if advice == "cache_length" else [256]:
            cache = transformers.DynamicCache(config=model.config)
            model(_tokens(batch, 300), past_key_values=cache, logits_to_keep=1)
            for _ in range(40):
                model(_tokens(batch, 1), past_key_values=cache)


@_job("generate() for 512 sequences (transformers)", "cache_length")
def generating(advice: str, guard: Callable[..., Any]) -> None:
    model = _llama(**CACHED).cuda().eval()
    # The library asks a kernel whether all sequences have ended, and kernels compute nothing here.
    more = itertools.cycle([True] * 20 + [False])
    model._has_unfinished_sequences = lambda *_, **__: next(more)
    with guard():
        for batch in [32] * 16 if advice == "cache_length" else [512]:
            model.generate(_tokens(batch, 512), max_new_tokens=20, min_new_tokens=20, do_sample=False, pad_token_id=0)


@_job("predictions of an evaluation (transformers Trainer)", "predictions_on_host")
def evaluation(advice: str, guard: Callable[..., Any]) -> None:
    with _folder() as folder:
        steps = 4 if advice == "predictions_on_host" else None
        arguments = _arguments(folder, per_device_eval_batch_size=8, eval_accumulation_steps=steps)
        model = _llama(vocab_size=12_000, num_hidden_layers=1)
        texts = _Texts(144, 256)
        trainer = transformers.Trainer(model, arguments, eval_dataset=texts, compute_metrics=lambda _: {})
        with guard():
            trainer.evaluate()


@_job("a metric that keeps all predictions (torchmetrics)", "metric_on_host")
def metric(advice: str, guard: Callable[..., Any]) -> None:
    kept = torchmetrics.CatMetric(compute_on_cpu=advice == "metric_on_host").cuda()
    with guard():
        for _ in range(13):
            kept.update(torch.empty(100 * MIB // 4, device="cuda"))
        kept.compute()


@_job("an average of the weights (timm ModelEmaV3)", "host_copy")
def weight_average(advice: str, guard: Callable[..., Any]) -> None:
    model = nn.Sequential(*[nn.Linear(8192, 8192, bias=False, device="meta") for _ in range(4)]).to_empty(device="cpu")
    with guard():
        if advice == "host_copy":
            timm.utils.ModelEmaV3(model)
            model.cuda()
        else:
            timm.utils.ModelEmaV3(model.cuda())


@_job("resuming from a checkpoint of 1 GiB", "host_load")
def resuming(advice: str, guard: Callable[..., Any]) -> None:
    with _folder() as folder:
        model = nn.Sequential(*[nn.Linear(8192, 8192, bias=False, device="meta") for _ in range(4)])
        model = model.to_empty(device="cuda")
        torch.save(model.state_dict(), Path(folder) / "model.pt")
        where = "cpu" if advice == "host_load" else "cuda"
        with guard():
            model.load_state_dict(torch.load(Path(folder) / "model.pt", map_location=where))


@_job("an evaluation that keeps its activations (timm)", "inference_mode")
def validation(advice: str, guard: Callable[..., Any]) -> None:
    model = timm.create_model("resnet18").cuda().eval()
    with guard(), torch.inference_mode() if advice == "inference_mode" else contextlib.nullcontext():
        model(torch.empty(100, 3, 224, 224, device="cuda"))


@_job("a batch that is too large (Lightning)", "smaller_batch", "checkpointing", "accumulation")
def large_batch(advice: str, guard: Callable[..., Any]) -> None:
    size = 8 if advice else 96

    class Module(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.model = timm.create_model("resnet18")

        @guard()
        def training_step(self, batch: Any, _: int) -> Any:
            return self.model(batch[0]).square().mean()

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.parameters(), lr=0.1)

    images = torch.utils.data.TensorDataset(torch.empty(96, 3, 384, 384))
    lightning.Trainer(
        max_steps=1, logger=False, enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False
    ).fit(Module(), torch.utils.data.DataLoader(images, batch_size=size))


@_job("the state of AdamW (accelerate)", "optimizer_state")
def optimizer_state(advice: str, guard: Callable[..., Any]) -> None:
    model = nn.Sequential(*[nn.Linear(4096, 4096, bias=False, device="meta") for _ in range(6)]).to_empty(device="cuda")
    kind = torch.optim.Adafactor if advice == "optimizer_state" else torch.optim.AdamW
    accelerator = accelerate.Accelerator()
    model, optimizer = accelerator.prepare(model, kind(model.parameters()))
    with guard():
        accelerator.backward(model(torch.empty(8, 4096, device="cuda")).sum())
        optimizer.step()


def run(name: str, advice: str) -> dict[str, Any]:
    """Run a job that follows this advice. Returns whether it ran out of memory, and the diagnosis."""
    torch.backends.cudnn.enabled = False  # the emulated node does not have it
    found: list[Any] = []

    def guard(**options: Any) -> Any:
        return toolkit.oom_guard(on_oom=found.append, **options)

    with copy.copy(contextlib.suppress(torch.OutOfMemoryError)):
        JOBS[name].run(advice, guard)
        return {"out_of_memory": False}
    if not found:
        return {"error": "the error has no diagnosis"}
    kinds = [each.kind for each in found[0].advice]
    return {
        "out_of_memory": True,
        "kinds": kinds,
        "enough": [each.enough for each in found[0].advice],
        "text": str(found[0]),
    }
