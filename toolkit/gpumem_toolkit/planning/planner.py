"""Makes a plan: the largest batch that fits, the accumulation, the breakdown, and changes that save memory."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from gpumem_client.wire.errors import ConfigurationError
from gpumem_toolkit.planning.devices import Gpu, parse_gpu, smallest_gpu
from gpumem_toolkit.planning.job import Description, Job, TensorSpec, TransformersJob, parse_tensor, read_arguments
from gpumem_toolkit.planning.plan import Change, Fit, Plan, Target, accumulate
from gpumem_toolkit.planning.search import Sizing
from gpumem_toolkit.planning.worker import TIMEOUT_SECONDS, Progress, run_in_worker


def plan(
    make_model: Callable[[], Any] | str | os.PathLike[str],
    inputs: str | Sequence[str] = (),
    gpu: str | Gpu | Sequence[str | Gpu] | None = None,
    *,
    targets: str | Sequence[str] = (),
    training_arguments: Mapping[str, Any] | str | None = None,
    sequence: int | None = None,
    **options: Any,
) -> Plan:
    """Plan the training of a model, without a GPU and without the memory that the training needs.

    The model is built in a fresh interpreter, which imports the module or script of `make_model`. A script therefore
    calls `plan` under `if __name__ == "__main__":`. Lambdas, closures and functions of a notebook need cloudpickle.
    Raises ConfigurationError if an argument is invalid, the model fails on tensors without values, or the time limit
    has passed; its cause has the traceback.

    Args:
        make_model: returns the `torch.nn.Module`, or a LightningModule, alone or with its Trainer. Or a model of
            transformers: its config.json, its folder, or its id in the local cache.
        inputs: the arguments of the model, such as `float32[B,3,224,224]`. Known for common models of transformers.
        gpu: a size (`80GiB`), a name (`h100-80gb`), a Gpu, or several. Default: this node's smallest GPU.
        targets: the arguments of the loss after the model's output.
        training_arguments: of transformers' Trainer: a dictionary or a JSON file.
        sequence: tokens of a sample, for models of transformers.
        options: loss, optimizer, optimizer_options, precision, attention, convolution, accumulation, checkpointing and
            loop, as `Job` describes them, and the options of `plan_description`.
    """
    tensors = _tensors(inputs), _tensors(targets)
    if callable(make_model):
        if training_arguments is not None or sequence is not None:
            raise ConfigurationError("training_arguments and sequence are for a config of transformers")
        return _plan(partial(Job, make_model, *tensors), gpu, "model", **options)
    if tensors[1]:
        raise ConfigurationError("targets are for a callable: a model of transformers gets its labels as an input")
    arguments = {} if training_arguments is None else read_arguments(training_arguments)
    return _plan(
        partial(config_job, os.fspath(make_model), arguments, sequence, tensors[0]), gpu, "transformers", **options
    )


def config_job(
    path: str, arguments: Mapping[str, Any], sequence: int | None, inputs: Sequence[TensorSpec], **options: Any
) -> TransformersJob:
    """Return the job of a config, with options that override its TrainingArguments."""
    Job(int, (), **options)  # rejects invalid options here
    return TransformersJob(path, arguments, sequence, inputs, options)


def plan_description(description: Description, gpu: str | Gpu | Sequence[str | Gpu] | None, **options: Any) -> Plan:
    """Plan a decoder-only transformer from its description. Takes `gpu`, and raises errors, as `plan` does.

    Takes the options of `Job`, and

    - target_effective_batch: samples in one optimizer step, over all devices.
    - batch: samples in one pass. By default the planner chooses, a multiple of `multiple_of`.
    - devices: number of data-parallel processes.
    - margin: the part of the device's free memory to plan with, 0.85 by default.
    - changes: False plans no changes that save memory, which takes a third of the time.
    - timeout_seconds: the time limit of the plan, 600 by default.
    """
    return _plan(description.job, gpu, "description", **options)


def _plan(
    make_job: Callable[..., Job | TransformersJob],
    gpu: str | Gpu | Sequence[str | Gpu] | None,
    source: str,
    *,
    target_effective_batch: int | None = None,
    devices: int = 1,
    margin: float = 0.85,
    multiple_of: int = 1,
    batch: int | None = None,
    changes: bool = True,
    timeout_seconds: float = TIMEOUT_SECONDS,
    **options: Any,
) -> Plan:
    job, given = make_job(**options), (gpu,) if isinstance(gpu, str | Gpu) else gpu or (smallest_gpu(),)
    gpus = tuple(parse_gpu(each) if isinstance(each, str) else each for each in given)
    target = Target(target_effective_batch, devices, margin, multiple_of, batch)
    return plan_in_worker(job, gpus, target, source=source, changes=changes, timeout_seconds=timeout_seconds)


def plan_in_worker(job: Job | TransformersJob, gpus: Sequence[Gpu], target: Target, **options: Any) -> Plan:
    """Run `plan_job` in a fresh interpreter, with its options and the options of `run_in_worker`."""
    if isinstance(job, Job):
        _check(job, target)
    return run_in_worker(plan_job, job, gpus, target, **options)


def profile_in_worker(job: Job, gpu: Gpu, target: Target, **options: Any) -> Plan:
    """Run `profile.profile_job` in a fresh interpreter, which uses the first GPU."""
    _check(job, target)
    return run_in_worker(_profile, job, gpu, target, uses_cuda=True, **options)


def _check(job: Job, target: Target) -> None:
    if target.effective_batch is not None and (target.batch is not None or job.accumulation > 1):
        raise ConfigurationError("a target effective batch determines batch and accumulation: give either it or them")


def _profile(job: Job, gpu: Gpu, target: Target, *, batch: int, progress: Progress) -> Plan:
    from gpumem_toolkit.planning.measured import profile_job  # these import torch, which the caller does not need
    from gpumem_toolkit.planning.sources import lightning_job

    return profile_job(lightning_job(job), gpu, target, batch=batch, notify=progress.of("measuring the job"))


def plan_job(
    given: Job | TransformersJob,
    gpus: Gpu | Sequence[Gpu],
    target: Target,
    *,
    source: str = "model",
    changes: bool = True,
    progress: Progress | None = None,
) -> Plan:
    """Plan a job in this process, whose CPU tensors follow CUDA's rules during the call."""
    progress, gpus = progress or Progress(), (gpus,) if isinstance(gpus, Gpu) else tuple(gpus)
    job, target = _prepared(given, target)
    source = "lightning" if job.loop == "lightning" else source
    limits = [int(gpu.free_bytes * target.margin) for gpu in gpus]
    sizing, largest = _largest(job, limits[0], target, progress)
    batch, accumulation = accumulate(largest, target)
    # A size that fits may need flushes of the cache. A size that does not is computed without a limit, so that the plan
    # shows what it would need.
    peaks, trace = sizing.peaks(batch, gpus[0].free_bytes if batch <= largest else None), sizing.trace(batch)
    at_peak = trace.peak()
    mosts = [largest, *(sizing.largest(limit, target.multiple_of) for limit in limits[1:])]
    fits = [_fit(sizing, batch, *each) for each in zip(gpus, limits, mosts, strict=True)]
    planned = _changes(sizing, batch, job.accumulation, fits, target, progress) if changes else ()
    return Plan(
        source=source,
        gpu=gpus[0],
        margin=target.margin,
        largest_batch=largest,
        batch=batch,
        accumulation=job.accumulation if target.effective_batch is None else accumulation,
        target_effective_batch=target.effective_batch,
        devices=target.devices,
        allocated_peak_bytes=peaks.allocated_bytes,
        reserved_peak_bytes=peaks.reserved_bytes,
        breakdown={**at_peak, "overhead": max(0, peaks.reserved_bytes - sum(at_peak.values()))},
        highest=trace.highs(),
        changes=tuple(planned),
        notes=trace.notes,
        on=tuple(fits),
    )


def _prepared(given: Job | TransformersJob, target: Target) -> tuple[Job, Target]:
    """Return the job and the target with the batch size of the TrainingArguments, unless another one is requested."""
    from gpumem_toolkit.planning.sources import lightning_job, transformers_job  # imports torch: not in the caller

    if isinstance(given, Job):
        job = lightning_job(given)
        _check(job, target)
        return job, target
    job, batch = transformers_job(given)
    if target.effective_batch is not None:
        return replace(job, accumulation=1), target
    return job, target if target.batch is not None else replace(target, batch=batch)


def _fit(sizing: Sizing, batch: int, gpu: Gpu, limit_bytes: int, largest: int) -> Fit:
    within = sizing.peaks(batch, limit_bytes)
    used = sizing.peaks(batch) if within.out_of_memory else within
    return Fit(gpu, not within.out_of_memory, limit_bytes - used.reserved_bytes, largest)


def _largest(job: Job, limit_bytes: int, target: Target, progress: Progress) -> tuple[Sizing, int]:
    """Return the largest batch size within a limit, and the sizing of the job that reaches the target with it."""
    # Gradients that stay between passes leave less memory. More than two passes need the same memory as two.
    sizing = Sizing(replace(job, accumulation=min(2, job.accumulation)), progress.of("the job"))
    largest = sizing.largest(limit_bytes, target.multiple_of)
    if target.effective_batch is None or largest * target.devices >= target.effective_batch:
        return sizing, largest
    sizing = Sizing(replace(job, accumulation=2), progress.of("the job with accumulation"))
    return sizing, sizing.largest(limit_bytes, target.multiple_of)


def _tensors(texts: str | Sequence[str]) -> tuple[TensorSpec, ...]:
    return tuple(parse_tensor(text) for text in ((texts,) if isinstance(texts, str) else texts))


def _changes(
    base: Sizing, batch: int, accumulation: int, fits: Sequence[Fit], target: Target, progress: Progress
) -> Iterator[Change]:
    """Plan the job with one change at a time, the cheapest first."""
    job, shards = base.job, max(2, target.devices)
    changed: list[tuple[str, Job, str]] = []
    if job.precision == "fp32":
        changed.append(("bf16 autocast", replace(job, precision="bf16"), "parameters and optimizer stay fp32"))
    if job.optimizer in ("adam", "adamw"):
        less = replace(job, optimizer=f"{job.optimizer}8bit", optimizer_options={})
        changed.append(("8-bit optimizer", less, "rounds the optimizer state; needs bitsandbytes"))
    if not job.checkpointing:
        changed.append(("checkpointing", replace(job, checkpointing=True), "repeats forward in backward"))
    sizings = [(name, Sizing(each, progress.of(name)), note) for name, each, note in changed]
    note = f"needs {shards} devices; FSDP2: fully_shard of each repeated block, then of the model"
    sizings.append((f"sharding over {shards}", base.sharded(shards), note))
    if not job.frozen:
        frozen = Sizing(replace(job, frozen=True), progress.of("freezing"))
        sizings.append(("freezing", frozen, "trains only the last layer; an adapter adds a few parameters"))
    limits = {fit.gpu.name: int(fit.gpu.free_bytes * target.margin) for fit in fits}
    first = next(iter(limits.values()))

    def change(name: str, sizing: Sizing, size: int, largest: int | None, cost: str) -> Change:
        on = tuple(gpu for gpu, limit in limits.items() if not sizing.peaks(size, limit).out_of_memory)
        return Change(name, sizing.peaks(size).reserved_bytes, largest, cost, on)

    failed = next((fit for fit in fits if not fit.fits), None)
    if failed is not None:
        several = Sizing(replace(job, accumulation=2), progress.of("smaller batches"))
        largest = several.largest(limits[failed.gpu.name], target.multiple_of, recorded=False)
        size, passes = accumulate(largest, Target(batch * accumulation, multiple_of=target.multiple_of))
        if largest:
            name = f"batch {size}, accumulate {passes}"
            yield change(name, several, size, None, "smaller passes, which may use the device less")
    for name, sizing, cost in sizings:
        # A change may be impossible, such as checkpointing without repeated blocks. The plan is right without it.
        try:
            yield change(name, sizing, batch, sizing.largest(first, target.multiple_of, recorded=False), cost)
        except ConfigurationError as error:
            yield Change(name, None, None, str(error))
