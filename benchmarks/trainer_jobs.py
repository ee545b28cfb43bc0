"""Trainings with transformers, trl, Lightning and accelerate, for `benchmarks.trainers`.

Each is a function that trains without or with the callback, and returns a `Training`.
"""

from __future__ import annotations

import contextlib
import logging
import os
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import accelerate
import datasets
import lightning
import torch
import torch.distributed as dist
import transformers
import trl
from torch import Tensor, nn

from gpumem_client.phases.observed import process_observed
from gpumem_toolkit.integrations import accelerate as for_accelerate
from gpumem_toolkit.integrations import lightning as for_lightning
from gpumem_toolkit.integrations import transformers as for_transformers

MIB = 1 << 20
STEPS = 12
Measured = Callable[[], "contextlib.AbstractContextManager[None]"]


@dataclass
class Training:
    """What a training has computed."""

    losses: list[float] = field(default_factory=list)
    seconds: float = 0.0
    """CPU time of the steps, without the preparation."""
    error: str = ""
    text: str = ""
    """The explanation of the error."""
    logged: set[str] = field(default_factory=set)
    """Names of values that reached the trainer's logger."""
    phases: set[str] = field(default_factory=set)


JOBS: dict[str, tuple[Callable[[bool], Training], bool]] = {}
_NO_RESULT = "no result"
_VALUES = {"gpumem/allocated_peak_bytes", "gpumem/reserved_bytes", "gpumem/non_torch_bytes", "gpumem/alloc_retries"}


def _job(*, timed: bool = False) -> Callable[[Callable[[bool], Training]], None]:
    def add(train: Callable[[bool], Training]) -> None:
        JOBS[train.__name__] = train, timed

    return add


def run(name: str, pairs: int) -> dict[str, Any]:
    """Compare a training without and with the callback."""
    torch.set_num_threads(1)
    logging.getLogger("gpumem_toolkit").setLevel(logging.CRITICAL)
    train, timed = JOBS[name]
    if not name.endswith("two_ranks"):  # a forked rank cannot use CUDA that its parent has initialized
        torch.empty(MIB, dtype=torch.uint8, device="cuda")  # as a training on a GPU does
    without, with_ = train(False), train(True)
    wrong = [] if (without.losses == with_.losses and without.losses) or without.error else ["losses"]
    wrong += [] if without.error == with_.error else [f"{with_.error} instead of {without.error}"]
    wrong += [f"no {each}" for each in (set() if with_.error else _VALUES - with_.logged)]
    wrong += ["no explanation"] if with_.error and "gpumem: out of memory" not in with_.text else []
    wrong += ["a rank failed"] if _NO_RESULT in (without.error, with_.error) else []
    wrong += ["an explanation without the callback"] if without.text else []
    found: dict[str, Any] = {"differences": wrong, "text": with_.text}
    found["checked"] = with_.error or f"{len(with_.losses)} losses; phases {', '.join(sorted(with_.phases))}"
    if timed:
        ratios, times = [], []
        for turn in range(pairs):
            seconds = {measured: train(measured).seconds for measured in ((False, True) if turn % 2 else (True, False))}
            ratios.append(seconds[True] / seconds[False])
            times.append(seconds[True])
        found |= {"ratios": ratios, "step_ms": 1e3 * sorted(times)[len(times) // 2] / STEPS}
    return found


@contextlib.contextmanager
def _folder() -> Iterator[str]:
    with tempfile.TemporaryDirectory(prefix="gpumem-trainers-") as folder:
        yield folder


class _Texts(torch.utils.data.Dataset[dict[str, Tensor]]):
    def __len__(self) -> int:
        return 192

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        tokens = torch.arange(64) * (index + 1) % 1000
        return {"input_ids": tokens, "labels": tokens}


def _gpt2() -> Any:
    torch.manual_seed(0)
    config = transformers.GPT2Config(n_embd=128, n_layer=2, n_head=4, vocab_size=1000, n_positions=256)
    config.bos_token_id = config.eos_token_id = 1
    return transformers.GPT2LMHeadModel(config)


class _OutOfMemory(nn.Module):
    """A model that runs out of device memory in its fourth call."""

    def __init__(self) -> None:
        super().__init__()
        self.model, self.calls = _gpt2(), 0

    def forward(self, input_ids: Tensor, labels: Tensor) -> Any:
        self.calls += 1
        if self.calls == 4:
            torch.empty(1 << 40, dtype=torch.uint8, device="cuda")
        return self.model(input_ids=input_ids, labels=labels)


class _Clock(transformers.TrainerCallback):
    def __init__(self) -> None:
        self.seconds = 0.0

    def on_train_begin(self, *_: Any, **__: Any) -> None:
        self.seconds = -time.process_time()

    def on_train_end(self, *_: Any, **__: Any) -> None:
        self.seconds += time.process_time()


def _options(folder: str, **options: Any) -> dict[str, Any]:
    usual = {"report_to": "none", "disable_tqdm": True, "use_cpu": True, "max_steps": STEPS, "logging_steps": 4}
    return {
        "output_dir": folder,
        "per_device_train_batch_size": 8,
        "save_strategy": "no",
        "seed": 1,
        **usual,
        **options,
    }


def _callbacks(measured: bool, *more: Any) -> list[Any]:
    return [*more, for_transformers.GpuMemCallback()] if measured else list(more)


def _result(trainer: Any, seconds: float = 0.0) -> Training:
    history = trainer.state.log_history
    losses = [row[name] for row in history for name in ("loss", "eval_loss", "train_loss") if name in row]
    names = {name for row in history for name in row}
    return Training(losses, seconds, logged=names, phases=set(process_observed().phases(0)))


def _failed(error: BaseException) -> Training:
    return Training(error=f"{type(error).__name__}: {error.args}", text="\n".join(getattr(error, "__notes__", [])))


@_job(timed=True)
def transformers_train(measured: bool) -> Training:
    with _folder() as folder:
        clock = _Clock()
        arguments = transformers.TrainingArguments(**_options(folder))
        trainer = transformers.Trainer(
            _gpt2(), arguments, train_dataset=_Texts(), callbacks=_callbacks(measured, clock)
        )
        trainer.train()
        return _result(trainer, clock.seconds)


@_job()
def transformers_evaluate_save_resume_accumulate(measured: bool) -> Training:
    with _folder() as folder:
        options = _options(
            folder,
            eval_strategy="steps",
            eval_steps=4,
            save_strategy="steps",
            save_steps=4,
            gradient_accumulation_steps=2,
        )
        found = Training()
        for steps, resumed in ((8, False), (STEPS, True)):
            arguments = transformers.TrainingArguments(**{**options, "max_steps": steps})
            data = {"train_dataset": _Texts(), "eval_dataset": _Texts()}
            trainer = transformers.Trainer(_gpt2(), arguments, callbacks=_callbacks(measured), **data)
            trainer.train(resume_from_checkpoint=resumed)
            found = _result(trainer)
        assert sorted(each.name for each in Path(folder).iterdir()) == ["checkpoint-12", "checkpoint-4", "checkpoint-8"]
        return found


@_job()
def transformers_out_of_memory(measured: bool) -> Training:
    with _folder() as folder:
        arguments = transformers.TrainingArguments(**_options(folder))
        trainer = transformers.Trainer(
            _OutOfMemory(), arguments, train_dataset=_Texts(), callbacks=_callbacks(measured)
        )
        try:
            trainer.train()
        except torch.OutOfMemoryError as error:
            assert not {"log", "evaluate"} & vars(trainer).keys()
            return _failed(error)
    return Training()


@_job(timed=True)
def trl_sft(measured: bool) -> Training:
    with _folder() as folder:
        rows = [{"input_ids": _Texts()[index]["input_ids"].tolist()} for index in range(192)]
        clock, words = _Clock(), {f"w{index}": index for index in range(1000)}
        from tokenizers import Tokenizer, models

        tokenizer = transformers.PreTrainedTokenizerFast(
            tokenizer_object=Tokenizer(models.WordLevel(words, unk_token="w0")), pad_token="w1", eos_token="w2"
        )
        arguments = trl.SFTConfig(**_options(folder), bf16=False, gradient_checkpointing=False)
        trainer = trl.SFTTrainer(
            _gpt2(),
            arguments,
            train_dataset=datasets.Dataset.from_list(rows),
            processing_class=tokenizer,
            callbacks=_callbacks(measured, clock),
        )
        trainer.train()
        return _result(trainer, clock.seconds)


class _Module(lightning.LightningModule):
    def __init__(self, model: Any) -> None:
        super().__init__()
        self.model, self.losses = model, list[float]()

    def training_step(self, batch: Any, _index: int) -> Any:
        loss = self.model(**batch).loss
        self.losses.append(loss.item())
        return loss

    def validation_step(self, batch: Any, _index: int) -> None:
        self.losses.append(self.model(**batch).loss.item())

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters())


class _Rows(lightning.pytorch.loggers.CSVLogger):
    names: set[str]

    def log_metrics(self, metrics: Any, step: int | None = None) -> None:  # noqa: ARG002 - as in its class
        self.names = getattr(self, "names", set()) | set(metrics)


def _lightning(measured: bool, model: Any, **options: Any) -> Training:
    with _folder() as folder:
        logger, module = _Rows(folder), _Module(model)
        trainer = lightning.Trainer(
            accelerator="cpu",
            max_steps=STEPS,
            logger=logger,
            log_every_n_steps=4,
            enable_progress_bar=False,
            enable_model_summary=False,
            callbacks=[for_lightning.GpuMemCallback()] if measured else [],
            default_root_dir=folder,
            **options,
        )
        loader = torch.utils.data.DataLoader(_Texts(), batch_size=8)
        seconds = -time.process_time()
        try:
            trainer.fit(module, loader, loader if options.get("limit_val_batches") else None)
        except torch.OutOfMemoryError as error:
            return _failed(error)
        phases = set(process_observed().phases(0))
        return Training(
            module.losses, seconds + time.process_time(), logged=getattr(logger, "names", set()), phases=phases
        )


@_job(timed=True)
def lightning_fit(measured: bool) -> Training:
    return _lightning(measured, _gpt2(), enable_checkpointing=False)


@_job()
def lightning_fit_validate_save(measured: bool) -> Training:
    return _lightning(measured, _gpt2(), limit_val_batches=2, val_check_interval=4)


@_job()
def lightning_out_of_memory(measured: bool) -> Training:
    return _lightning(measured, _OutOfMemory(), enable_checkpointing=False)


class _Recorded(accelerate.tracking.GeneralTracker):
    name, requires_logging_directory = "recorded", False

    def __init__(self) -> None:
        self.names: set[str] = set()
        super().__init__()

    @property
    def tracker(self) -> Any:
        return self

    def log(self, values: dict[str, Any], step: int | None = None, **_: Any) -> None:  # noqa: ARG002 - as in its class
        self.names |= set(values)


def _accelerate(measured: bool, model: Any) -> Training:
    tracker = _Recorded()
    accelerator = accelerate.Accelerator(cpu=True, log_with=[tracker], gradient_accumulation_steps=2)
    accelerator.init_trackers("run")
    optimizer = torch.optim.AdamW(model.parameters())
    loader = torch.utils.data.DataLoader(_Texts(), batch_size=8)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    found, seconds = Training(), -time.process_time()
    try:
        with for_accelerate.watching(accelerator) if measured else contextlib.nullcontext():
            for _step, batch in zip(range(STEPS), loader, strict=False):
                with accelerator.accumulate(model):
                    loss = model(**batch).loss
                    accelerator.backward(loss)
                    optimizer.step()
                    optimizer.zero_grad()
                found.losses.append(loss.item())
            accelerator.log({"loss": found.losses[-1]})
    except torch.OutOfMemoryError as error:
        return _failed(error)
    found.seconds, found.logged = seconds + time.process_time(), tracker.names
    return found


@_job(timed=True)
def accelerate_loop(measured: bool) -> Training:
    return _accelerate(measured, _gpt2())


@_job()
def accelerate_out_of_memory(measured: bool) -> Training:
    return _accelerate(measured, _OutOfMemory())


def _two_ranks(train: Callable[[bool], Training], measured: bool, port: int) -> Training:
    """Run a training in two ranks over gloo, and return the first rank's."""
    receiver, sender = torch.multiprocessing.get_context("fork").Pipe(duplex=False)
    ranks = []
    for rank in range(2):
        pid = os.fork()
        if pid == 0:
            try:
                names = {"RANK": rank, "LOCAL_RANK": rank, "NODE_RANK": 0, "WORLD_SIZE": 2, "MASTER_PORT": port}
                os.environ.update({name: str(value) for name, value in names.items()})
                os.environ.update(MASTER_ADDR="127.0.0.1", GLOO_SOCKET_IFNAME="lo", ACCELERATE_USE_CPU="true")
                torch.empty(MIB, dtype=torch.uint8, device="cuda")
                found = train(measured)
                if rank == 0:
                    sender.send(found)
                if dist.is_initialized():
                    dist.destroy_process_group()
            except BaseException:  # noqa: BLE001 - the process is a fork of the benchmark
                traceback.print_exc()
            os._exit(0)
        ranks.append(pid)
    found = receiver.recv() if receiver.poll(240) else Training(error=_NO_RESULT)
    for pid in ranks:
        os.waitpid(pid, 0)
    assert isinstance(found, Training)
    return found


@_job()
def transformers_two_ranks(measured: bool) -> Training:
    return _two_ranks(JOBS["transformers_train"][0], measured, 29611 + measured)


@_job()
def lightning_two_ranks(measured: bool) -> Training:
    def train(measured: bool) -> Training:
        return _lightning(measured, _gpt2(), enable_checkpointing=False, devices=2, strategy="ddp")

    return _two_ranks(train, measured, 29621 + measured)
