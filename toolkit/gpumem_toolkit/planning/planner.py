"""Makes a plan: the largest batch that fits, the accumulation, the breakdown, and changes that save memory."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from gpumem_client.wire.errors import ConfigurationError
from gpumem_toolkit.planning.devices import Gpu, parse_gpu, smallest_gpu
from gpumem_toolkit.planning.job import Description, Job, TensorSpec, TransformersJob, parse_tensor, read_arguments
from gpumem_toolkit.planning.plan import Change, Fit, Plan, Target, accumulate
from gpumem_toolkit.planning.planner_process import TIMEOUT_SECONDS, Named, Progress, run_in_worker
from gpumem_toolkit.planning.search import Sizing

_PROFILED_BATCH = 8


def plan(
    make_model: Callable[[], Any] | Description | str | os.PathLike[str],
    inputs: str | Sequence[str] = (),
    gpu: str | Gpu | Sequence[str | Gpu] | None = None,
    *,
    targets: str | Sequence[str] = (),
    training_arguments: Mapping[str, Any] | str | Sequence[str] | None = None,
    sequence: int | None = None,
    target_effective_batch: int | None = None,
    devices: int = 1,
    margin: float = 0.85,
    multiple_of: int = 1,
    batch: int | None = None,
    changes: bool = True,
    profile: bool = False,
    timeout_seconds: float = TIMEOUT_SECONDS,
    **options: Any,
) -> Plan:
    """Plan the training of a model, without a GPU and without the memory that the training needs.

    The model is built in a fresh interpreter, which imports the module or script of `make_model`. A script therefore
    calls `plan` under `if __name__ == "__main__":`. Lambdas, closures and functions of a notebook need cloudpickle.
    Raises ConfigurationError if an argument is invalid, the model fails on tensors without values, or the time limit
    has passed; its cause has the traceback.

    Args:
        make_model: returns the `torch.nn.Module`, or a LightningModule, alone or with its Trainer; `MODULE:NAME` names
            such a function. Or a model of transformers: its config.json, its folder, or its id in the local cache. Or a
            Description.
        inputs: the arguments of the model, such as `float32[B,3,224,224]`. Known for common models of transformers.
        gpu: a size (`80GiB`), a name (`h100-80gb`), a Gpu, or several. Default: this node's smallest GPU.
        targets: the arguments of the loss after the model's output.
        training_arguments: of transformers' Trainer: a dictionary, a JSON file, or the arguments of a script.
        sequence: tokens of a sample, for models of transformers.
        target_effective_batch: samples in one optimizer step, over all devices.
        devices: number of data-parallel processes.
        margin: the part of the device's free memory to plan with.
        multiple_of: batch sizes are multiples of this number.
        batch: samples in one pass. By default the planner chooses.
        changes: False plans no changes that save memory, which takes a third of the time.
        profile: measure on this machine's first GPU instead, with `batch` samples (8 by default) and with half of them.
        timeout_seconds: the time limit of the plan.
        options: loss, optimizer, optimizer_options, precision, attention, convolution, accumulation, checkpointing and
            loop, as `Job` describes them.
    """
    if find_spec("torch") is None:
        raise ConfigurationError("the planner runs the model in PyTorch, which is not installed")
    tensors, model = (_tensors(inputs), _tensors(targets)), _named(make_model)
    options = {name: _named(value) for name, value in options.items()}
    config = isinstance(model, str | os.PathLike)
    if config and tensors[1]:
        raise ConfigurationError("targets are for MODULE:FACTORY: a model of transformers gets its labels as an input")
    if config and profile:
        raise ConfigurationError("a profile needs MODULE:FACTORY, not a config")
    if not config and (training_arguments is not None or sequence is not None):
        raise ConfigurationError("TrainingArguments and the tokens of a sample are for a config of transformers")
    job: Job | TransformersJob
    if config:
        Job(int, (), **options)  # rejects invalid options here
        arguments = {} if training_arguments is None else read_arguments(training_arguments)
        job, source = TransformersJob(os.fspath(model), arguments, sequence, tensors[0], options), "transformers"
    elif isinstance(model, Description):
        job, source = model.job(**options), "description"
    else:
        job, source = Job(model, *tensors, **options), "model"
    given = (gpu,) if isinstance(gpu, str | Gpu) else gpu or (smallest_gpu(),)
    gpus = tuple(parse_gpu(each) if isinstance(each, str) else each for each in given)
    target = Target(target_effective_batch, devices, margin, multiple_of, None if profile else batch)
    measured = (_PROFILED_BATCH if batch is None else batch) if profile else None
    limits: dict[str, Any] = {"uses_cuda": profile, "timeout_seconds": timeout_seconds}
    return run_in_worker(plan_job, job, gpus, target, source=source, changes=changes, profiled_batch=measured, **limits)


def plan_description(description: Description, gpu: str | Gpu | Sequence[str | Gpu] | None, **options: Any) -> Plan:
    """Plan a decoder-only transformer from its description, with the options of `plan`."""
    return plan(description, (), gpu, **options)


def _tensors(texts: str | Sequence[str]) -> tuple[TensorSpec, ...]:
    return tuple(parse_tensor(text) for text in ((texts,) if isinstance(texts, str) else texts))


def _named(value: Any) -> Any:
    """Return the callable that `MODULE:NAME` names, and other values as they are."""
    return Named(value) if isinstance(value, str) and ":" in value and not Path(value).exists() else value


def plan_job(
    given: Job | TransformersJob,
    gpus: Gpu | Sequence[Gpu],
    target: Target,
    *,
    source: str = "model",
    changes: bool = True,
    profiled_batch: int | None = None,
    progress: Progress | None = None,
) -> Plan:
    """Plan a job in this process, whose CPU tensors follow CUDA's rules during the call."""
    progress, gpus = progress or Progress(), (gpus,) if isinstance(gpus, Gpu) else tuple(gpus)
    job, target = _prepared(given, target)
    if profiled_batch is not None:
        from gpumem_toolkit.planning.measured_plan import profile_job  # imports torch: not in the caller

        return profile_job(job, gpus[0], target, batch=profiled_batch, notify=progress.of("measuring the job"))
    limits = [int(gpu.free_bytes * target.margin) for gpu in gpus]
    sizing, largest = _largest(job, limits[0], target, progress)
    batch, accumulation = accumulate(largest, target)
    # A size that fits may need flushes of the cache. A size that does not is computed without a limit, so that the plan
    # shows what it would need.
    peaks, trace = sizing.peaks(batch, gpus[0].free_bytes if batch <= largest else None), sizing.trace(batch)
    at_peak, highest = trace.shares()
    mosts = [largest, *(sizing.largest(limit, target.multiple_of) for limit in limits[1:])]
    fits = [_fit(sizing, batch, *each) for each in zip(gpus, limits, mosts, strict=True)]
    planned = _changes(sizing, batch, job.accumulation, fits, target, progress) if changes else ()
    return Plan(
        source="lightning" if job.loop == "lightning" else source,
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
        highest=highest,
        changes=tuple(planned),
        notes=trace.notes,
        on=tuple(fits),
    )


def _prepared(given: Job | TransformersJob, target: Target) -> tuple[Job, Target]:
    """Return the job and the target with the batch size of the TrainingArguments, unless another one is requested."""
    from gpumem_toolkit.planning.sources import lightning_job, transformers_job  # imports torch: not in the caller

    if isinstance(given, TransformersJob):
        job, batch = transformers_job(given)
        if target.effective_batch is not None:
            return replace(job, accumulation=1), target
        return job, target if target.batch is not None else replace(target, batch=batch)
    job = lightning_job(given)
    if target.effective_batch is not None and job.accumulation > 1:
        raise ConfigurationError("a target effective batch determines the accumulation: give one of them")
    return job, target


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


def _changes(
    base: Sizing, batch: int, accumulation: int, fits: Sequence[Fit], target: Target, progress: Progress
) -> Iterator[Change]:
    """Plan the job with one change at a time, the cheapest first."""
    from gpumem_toolkit.planning.simulation import gathered  # imports torch: not in the caller

    job, shards = base.job, max(2, target.devices)
    limits = {fit.gpu.name: int(fit.gpu.free_bytes * target.margin) for fit in fits}

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
    changed: list[tuple[str, Job, str]] = []
    if job.precision == "fp32":
        changed.append(("bf16 autocast", replace(job, precision="bf16"), "parameters and optimizer stay fp32"))
    if job.optimizer in ("adam", "adamw"):
        less = replace(job, optimizer=f"{job.optimizer}8bit", optimizer_options={})
        changed.append(("8-bit optimizer", less, "rounds the optimizer state; needs bitsandbytes"))
    if not job.checkpointing:
        changed.append(("checkpointing", replace(job, checkpointing=True), "repeats forward in backward"))
    sizings = [(name, Sizing(each, progress.of(name)), cost) for name, each, cost in changed]
    cost = f"needs {shards} devices; FSDP2: fully_shard of each repeated block, then of the model"
    sizings.append((f"sharding over {shards}", base.sharded(shards, gathered(job)), cost))
    for name, sizing, cost in sizings:
        # A change may be impossible, such as checkpointing without repeated blocks. The plan is right without it.
        try:
            largest = sizing.largest(next(iter(limits.values())), target.multiple_of, recorded=False)
            yield change(name, sizing, batch, largest, cost)
        except ConfigurationError as error:
            yield Change(name, None, None, str(error))
