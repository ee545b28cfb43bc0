"""Training and inference loops of third-party libraries, with and without a leak, for `benchmarks.library_leaks`.

Each loop calls `watch.step()` after each step, and ends when it returns True.
"""

from __future__ import annotations

import gc
import json
import os
import queue
import random
import subprocess
import sys
import tempfile
import threading
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import accelerate
import lightning
import timm
import torch
import torchmetrics
import transformers
from torch import Tensor, nn

import gpumem_client
import gpumem_toolkit as toolkit

MIB = 1 << 20
STEPS = 220
PROFILED = (40, 140)
"""The steps after which profiles are taken."""


@dataclass
class Watch:
    """The leak detector and the profiles of a loop."""

    profiles: bool
    folder: Path
    leaks: list[Any] = field(default_factory=list)
    steps: int = 0
    reported: int | None = None

    def step(self, *, optimizer: bool = True) -> bool:
        """End a step, which is not the step of an optimizer unless `optimizer`. Returns whether the loop ends."""
        self.steps += 1
        if not optimizer:
            gpumem_client.step()
        if self.leaks and self.reported is None:
            self.reported = self.steps
        if self.profiles and self.steps in PROFILED:
            file = str(self.folder / f"{self.steps}.json")
            self._command("take", str(os.getpid()), "--search", "5", "--format", "json", "-o", file)
        return self.steps >= STEPS or (self.profiles and self.steps >= PROFILED[-1] and self.reported is not None)

    def difference(self) -> str:
        """Return the owner of the top row of `profile diff`."""
        files = [str(self.folder / f"{step}.json") for step in PROFILED]
        document = json.loads(self._command("diff", *files, "--format", "json"))
        return str(next((row["owner"] for row in document["owners"] if row["change_bytes"] > 0), "no owner"))

    def _command(self, *words: str) -> str:
        command = [sys.executable, "-m", "gpumem_exporter", "profile", *words]
        return subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True, timeout=90).stdout


class Loop(NamedTuple):
    """A loop, and a regular expression for the name of what leaks; empty without a leak."""

    what: str
    named: str
    run: Callable[[Watch], None]


JOBS: dict[str, Loop] = {}


def _loop(what: str, named: str = "") -> Callable[[Callable[[Watch], None]], None]:
    def add(run: Callable[[Watch], None]) -> None:
        JOBS[run.__name__] = Loop(what, named, run)

    return add


def _empty(mebibytes: float = 1) -> Tensor:
    return torch.empty(int(mebibytes * MIB), dtype=torch.uint8, device="cuda")


def _language_model() -> Any:
    config = transformers.GPT2Config(n_embd=64, n_layer=2, n_head=2, vocab_size=1000, n_positions=2048)
    return transformers.GPT2LMHeadModel(config)


class _Texts(torch.utils.data.Dataset[dict[str, Tensor]]):
    def __len__(self) -> int:
        return 4000

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        tokens = torch.zeros(64, dtype=torch.int64)
        return {"input_ids": tokens, "labels": tokens}


class _Ends(transformers.TrainerCallback):
    def __init__(self, watch: Watch) -> None:
        self.watch = watch

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:  # noqa: ARG002 - as in its class
        control.should_training_stop = self.watch.step()


def _trainer(watch: Watch, kind: Any = transformers.Trainer, **options: Any) -> None:
    usual = {
        "report_to": "none",
        "disable_tqdm": True,
        "save_strategy": "no",
        "logging_strategy": "no",
        "max_steps": STEPS,
    }
    arguments = transformers.TrainingArguments(
        output_dir=str(watch.folder), per_device_train_batch_size=4, **{**usual, **options}
    )
    made = kind(
        _language_model(), arguments, train_dataset=_Texts(), eval_dataset=torch.utils.data.Subset(_Texts(), range(16))
    )
    made.add_callback(_Ends(watch))
    made.train()


class _LightningEnds(lightning.Callback):
    def __init__(self, watch: Watch) -> None:
        self.watch = watch

    def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
        trainer.should_stop = self.watch.step()


class _Classifier(lightning.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(1024, 1024)

    def training_step(self, batch: Any, _: int) -> Any:
        output = self.layer(batch[0])
        self.after(output)
        return output.square().mean()

    def after(self, output: Tensor) -> None:
        """See subclasses."""

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters())


def _fit(watch: Watch, module: Any, *, batches: int = STEPS) -> None:
    data = torch.utils.data.TensorDataset(torch.zeros(batches * 256, 1024))
    lightning.Trainer(
        max_steps=STEPS,
        min_steps=1,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=[_LightningEnds(watch)],
    ).fit(module, torch.utils.data.DataLoader(data, batch_size=256))


def _training(model: nn.Module, watch: Watch, batch: Callable[[], Tensor], after: Callable[[], object]) -> None:
    """Train with accelerate, and call `after` in each step."""
    accelerator = accelerate.Accelerator()
    model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters()))
    ended = False
    while not ended:
        output = model(batch())
        accelerator.backward(output.square().mean())
        optimizer.step()
        optimizer.zero_grad()
        after()
        ended = watch.step()


def _small_training(watch: Watch, after: Callable[[], object]) -> None:
    _training(nn.Linear(256, 256), watch, lambda: torch.empty(64, 256, device="cuda"), after)


def _images(count: int = 2, size: int = 64) -> Tensor:
    return torch.empty(count, 3, size, size, device="cuda")


def _serving(watch: Watch, request: Callable[[], None]) -> None:
    ended = False
    while not ended:
        request()
        ended = watch.step(optimizer=False)


@_loop("logits kept in compute_loss (transformers Trainer)", r"\bstore\b")
def trainer_logits(watch: Watch) -> None:
    store: dict[str, list[Tensor]] = {"logits": []}

    class Keeping(transformers.Trainer):
        def compute_loss(self, model: Any, inputs: Any, return_outputs: bool = False, **_: Any) -> Any:
            output = model(**inputs)
            store["logits"].append(output.logits.detach())
            return (output.loss, output) if return_outputs else output.loss

    _trainer(watch, Keeping)


@_loop("a metric that is never reset (Lightning, torchmetrics)", r"\bCatMetric\b")
def metric_never_reset(watch: Watch) -> None:
    class Measuring(_Classifier):
        def __init__(self) -> None:
            super().__init__()
            self.predictions = torchmetrics.CatMetric()

        def after(self, output: Tensor) -> None:
            self.predictions.update(output.detach())

    _fit(watch, Measuring())


@_loop("outputs of training_step (Lightning)", r"\bkept_outputs\b")
def lightning_outputs(watch: Watch) -> None:
    class Collecting(_Classifier):
        def __init__(self) -> None:
            super().__init__()
            self.kept_outputs: list[Tensor] = []

        def after(self, output: Tensor) -> None:
            self.kept_outputs.append(output.detach().clone())

    _fit(watch, Collecting())


@_loop("a key-value cache for each session (transformers)", r"\bsessions\b|\bDynamicCache\b")
def sessions(watch: Watch) -> None:
    model, sessions = _language_model().cuda().eval(), dict[int, Any]()

    @torch.inference_mode()
    def request() -> None:
        made = transformers.DynamicCache(config=model.config)
        model(torch.zeros(4, 256, dtype=torch.int64, device="cuda"), past_key_values=made, logits_to_keep=1)
        sessions[watch.steps] = made

    _serving(watch, request)


@_loop("features of a forward hook (timm)", r"\bfeats\b")
def forward_hook(watch: Watch) -> None:
    model, feats = timm.create_model("resnet18").cuda(), list[Tensor]()
    model.layer2.register_forward_hook(lambda *arguments: feats.append(arguments[2].detach()))
    _training(model, watch, lambda: _images(8), lambda: None)


@_loop("register_hook in each step (timm)", r"\bmask\b|hook")
def gradient_hooks(watch: Watch) -> None:
    model = timm.create_model("resnet18").cuda()

    def add_hook() -> None:
        mask = _empty()
        model.fc.weight.register_hook(lambda gradient: gradient * mask[0])

    _training(model, watch, _images, add_hook)


@_loop("exceptions that are kept (accelerate)", r"\bactivations\b|\berrors\b")
def kept_exceptions(watch: Watch) -> None:
    errors = list[Exception]()

    def risky() -> None:
        activations = _empty()
        raise ValueError(f"loss is not finite: {len(activations)}")

    def after() -> None:
        try:
            risky()
        except ValueError as error:
            errors.append(error)

    _small_training(watch, after)


@_loop("functools.cache (accelerate)", r"\bcausal_mask\b")
def cached_function(watch: Watch) -> None:
    @cache
    def causal_mask(length: int) -> Tensor:
        return _empty(1 + length / 1000)

    _small_training(watch, lambda: causal_mask(watch.steps))


@_loop("a queue that nobody empties (accelerate)", r"\bprefetched\b")
def prefetch_queue(watch: Watch) -> None:
    prefetched: queue.Queue[Tensor] = queue.Queue()
    _small_training(watch, lambda: prefetched.put(_empty()))


@_loop("copies of the weights (timm)", r"\bbest\b")
def state_copies(watch: Watch) -> None:
    model, best = nn.Linear(512, 512), list[dict[str, Tensor]]()
    _training(
        model,
        watch,
        lambda: torch.empty(64, 512, device="cuda"),
        lambda: best.append({name: value.clone() for name, value in model.state_dict().items()}),
    )


@_loop("cycles while gc is disabled (accelerate)", r"\bContext\b")
def cycles(watch: Watch) -> None:
    class Context:
        def __init__(self) -> None:
            self.me, self.logits = self, _empty()

    gc.disable()
    _small_training(watch, Context)


@_loop("grad_fn of each loss (accelerate)", r"\bnodes\b")
def graph_nodes(watch: Watch) -> None:
    nodes, layer = list[Any](), nn.Linear(256, 1024).cuda()
    _small_training(watch, lambda: nodes.append(layer(torch.empty(256, 256, device="cuda")).relu().mean().grad_fn))


@_loop("a list in a thread (accelerate)", r"\bpending\b")
def thread_local(watch: Watch) -> None:
    work: queue.Queue[Tensor] = queue.Queue(maxsize=1)

    def writer() -> None:
        pending = []
        while True:
            pending.append(work.get())

    threading.Thread(target=writer, daemon=True).start()
    _small_training(watch, lambda: work.put(_empty()))


@_loop("generators that stay open (transformers)", r"\bhidden\b|\bstream\b|\bstreams\b")
def open_generators(watch: Watch) -> None:
    model, streams = _language_model().cuda().eval(), list[Iterator[Tensor]]()

    def stream() -> Iterator[Tensor]:
        with torch.inference_mode():
            hidden = model.transformer(torch.zeros(8, 512, dtype=torch.int64, device="cuda")).last_hidden_state
        yield hidden[0]
        yield hidden[1]

    def request() -> None:
        streams.append(stream())
        next(streams[-1])

    _serving(watch, request)


@dataclass
class Transition:
    """An experience of an agent."""

    observation: Tensor


@_loop("dataclasses in a deque without a limit (accelerate)", r"\bTransition\b")
def replay_without_limit(watch: Watch) -> None:
    replay: deque[Transition] = deque()
    _small_training(watch, lambda: replay.append(Transition(_empty())))


@_loop("embeddings of each subgraph (torch_geometric)", r"\bembeddings\b")
def subgraph_cache(watch: Watch) -> None:
    import torch_geometric.nn  # initializes the driver: after the fork

    model, embeddings = torch_geometric.nn.SAGEConv(64, 256).cuda(), dict[int, Tensor]()
    optimizer, ended = torch.optim.Adam(model.parameters()), False
    while not ended:
        edges = torch.zeros(2, 5000, dtype=torch.int64, device="cuda")
        output = model(torch.empty(1000, 64, device="cuda"), edges)
        output.mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        embeddings[watch.steps] = output.detach()
        ended = watch.step()


@_loop("transformers Trainer")
def clean_trainer(watch: Watch) -> None:
    _trainer(watch)


@_loop("transformers Trainer with accumulation and evaluations")
def clean_evaluations(watch: Watch) -> None:
    _trainer(watch, gradient_accumulation_steps=2, eval_strategy="steps", eval_steps=50)


@_loop("Lightning with a metric that is reset in each epoch")
def clean_metric(watch: Watch) -> None:
    class Measuring(_Classifier):
        def __init__(self) -> None:
            super().__init__()
            self.predictions = torchmetrics.CatMetric()

        def after(self, output: Tensor) -> None:
            self.predictions.update(output.detach())

        def on_train_epoch_end(self) -> None:
            self.predictions.reset()

    _fit(watch, Measuring(), batches=25)


@_loop("accelerate with batches of many lengths")
def clean_lengths(watch: Watch) -> None:
    rng = random.Random(1)
    _training(
        nn.Linear(256, 256),
        watch,
        lambda: torch.empty(rng.randrange(64, 8192), 256, device="cuda"),
        lambda: None,
    )


@_loop("timm with an average of the weights")
def clean_average(watch: Watch) -> None:
    model = timm.create_model("resnet18").cuda()
    average = timm.utils.ModelEmaV3(model)
    _training(model, watch, _images, lambda: average.update(model))


@_loop("torch_geometric with graphs of many sizes")
def clean_graphs(watch: Watch) -> None:
    import torch_geometric.nn  # initializes the driver: after the fork

    model, rng = torch_geometric.nn.SAGEConv(64, 256).cuda(), random.Random(2)
    optimizer, ended = torch.optim.Adam(model.parameters()), False
    while not ended:
        edges = torch.zeros(2, rng.randrange(1000, 9000), dtype=torch.int64, device="cuda")
        model(torch.empty(1000, 64, device="cuda"), edges).mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        ended = watch.step()


@_loop("sequences that grow from 16 to 256 in 120 steps (accelerate)")
def clean_curriculum(watch: Watch) -> None:
    model = nn.TransformerEncoderLayer(256, 4, batch_first=True)
    _training(
        model,
        watch,
        lambda: torch.empty(16, min(256, 16 + 2 * watch.steps), 256, device="cuda"),
        lambda: None,
    )


@_loop("images that grow from 32 to 250 (timm)")
def clean_progressive(watch: Watch) -> None:
    model = timm.create_model("resnet18").cuda()
    _training(model, watch, lambda: _images(4, min(250, 32 + watch.steps)), lambda: None)


@_loop("a replay buffer that is full after 120 steps (accelerate)")
def clean_replay(watch: Watch) -> None:
    replay: deque[Transition] = deque(maxlen=120)
    _small_training(watch, lambda: replay.append(Transition(_empty())))


@_loop("a key-value cache that starts again after 40 tokens (transformers)")
def clean_decoding(watch: Watch) -> None:
    model = _language_model().cuda().eval()
    state = transformers.DynamicCache(config=model.config)

    @torch.inference_mode()
    def request() -> None:
        nonlocal state
        if watch.steps % 40 == 0:
            state = transformers.DynamicCache(config=model.config)
        model(torch.zeros(64, 8, dtype=torch.int64, device="cuda"), past_key_values=state)

    _serving(watch, request)


def run(name: str) -> dict[str, Any]:
    """Run a loop. Returns the step of the report, what it names, and what `profile diff` names."""
    torch.backends.cudnn.enabled = False  # the emulated node does not have it
    loop = JOBS[name]
    with tempfile.TemporaryDirectory(prefix="gpumem-leak-") as folder:
        watch = Watch(bool(loop.named), Path(folder))
        gpumem_client.start()
        detector = toolkit.leak_detector(on_leak=watch.leaks.append)
        loop.run(watch)
        found = {"leaks": len(detector.leaks), "reported": watch.reported, "steps": watch.steps}
        suspects = list(watch.leaks[0].suspects) if watch.leaks else []
        return {**found, "suspects": suspects, "difference": watch.difference() if watch.profiles else ""}
