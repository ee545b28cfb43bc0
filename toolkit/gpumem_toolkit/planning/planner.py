"""Makes a plan: the largest batch that fits, the accumulation, the breakdown, and changes that save memory."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from gpumem_client.wire.errors import ConfigurationError
from gpumem_toolkit.planning.devices import Gpu, parse_gpu
from gpumem_toolkit.planning.job import Description, Job, TensorSpec, parse_tensor
from gpumem_toolkit.planning.plan import Change, Plan, Target, accumulate
from gpumem_toolkit.planning.search import Sizing
from gpumem_toolkit.planning.worker import TIMEOUT_SECONDS, Progress, run_in_worker


def plan(
    make_model: Callable[[], Any],
    inputs: str | Sequence[str],
    gpu: str | Gpu,
    *,
    targets: str | Sequence[str] = (),
    **options: Any,
) -> Plan:
    """Plan the training of a model, without a GPU and without the memory that the training needs.

    The model is built in a fresh interpreter, which imports the module or script of `make_model`. A script therefore
    calls `plan` under `if __name__ == "__main__":`. Lambdas, closures and functions of a notebook need cloudpickle.
    Raises ConfigurationError if an argument is invalid, the model fails on tensors without values, or the time limit
    has passed; its cause has the traceback.

    Args:
        make_model: returns the `torch.nn.Module`.
        inputs: the arguments of the model, such as `float32[B,3,224,224]`.
        gpu: a size (`80GiB`), a name (`h100-80gb`), or a Gpu.
        targets: the arguments of the loss after the model's output.
        options: loss, optimizer, optimizer_options, precision, attention, convolution, accumulation, checkpointing and
            loop, as `Job` describes them, and the options of `plan_description`.
    """
    return _plan(partial(Job, make_model, _tensors(inputs), _tensors(targets)), gpu, "model", **options)


def plan_description(description: Description, gpu: str | Gpu, **options: Any) -> Plan:
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
    make_job: Callable[..., Job],
    gpu: str | Gpu,
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
    job, gpu = make_job(**options), parse_gpu(gpu) if isinstance(gpu, str) else gpu
    target = Target(target_effective_batch, devices, margin, multiple_of, batch)
    return plan_in_worker(job, gpu, target, source=source, changes=changes, timeout_seconds=timeout_seconds)


def plan_in_worker(job: Job, gpu: Gpu, target: Target, **options: Any) -> Plan:
    """Run `plan_job` in a fresh interpreter, with its options and the options of `run_in_worker`."""
    _check(job, target)
    return run_in_worker(plan_job, job, gpu, target, **options)


def profile_in_worker(job: Job, gpu: Gpu, target: Target, **options: Any) -> Plan:
    """Run `profile.profile_job` in a fresh interpreter, which uses the first GPU."""
    _check(job, target)
    return run_in_worker(_profile, job, gpu, target, uses_cuda=True, **options)


def _check(job: Job, target: Target) -> None:
    if target.effective_batch is not None and (target.batch is not None or job.accumulation > 1):
        raise ConfigurationError("a target effective batch determines batch and accumulation: give either it or them")


def _profile(job: Job, gpu: Gpu, target: Target, *, batch: int, progress: Progress) -> Plan:
    from gpumem_toolkit.planning.measured import profile_job  # imports torch, which the caller does not need

    return profile_job(job, gpu, target, batch=batch, notify=progress.of("measuring the job"))


def plan_job(
    job: Job, gpu: Gpu, target: Target, *, source: str = "model", changes: bool = True, progress: Progress | None = None
) -> Plan:
    """Plan a job in this process, whose CPU tensors follow CUDA's rules during the call."""
    progress = progress or Progress()
    limit_bytes = int(gpu.free_bytes * target.margin)
    sizing, largest = _largest(job, limit_bytes, target, progress)
    batch, accumulation = accumulate(largest, target)
    # A size that fits may need flushes of the cache. A size that does not is computed without a limit, so that the plan
    # shows what it would need.
    peaks, trace = sizing.peaks(batch, gpu.free_bytes if batch <= largest else None), sizing.trace(batch)
    at_peak = trace.peak()
    return Plan(
        source=source,
        gpu=gpu,
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
        changes=tuple(_changes(sizing, batch, limit_bytes, target, progress)) if changes else (),
        notes=trace.notes,
    )


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


def _changes(base: Sizing, batch: int, limit_bytes: int, target: Target, progress: Progress) -> Iterator[Change]:
    """Plan the job with one change at a time."""
    job, shards = base.job, max(2, target.devices)
    changed: list[tuple[str, Job, str]] = []
    if not job.checkpointing:
        changed.append(("checkpointing", replace(job, checkpointing=True), "repeats forward in backward"))
    if job.precision == "fp32":
        changed.append(("bf16 autocast", replace(job, precision="bf16"), "parameters and optimizer stay fp32"))
    if not job.frozen:
        note = "trains only the last layer; an adapter adds a few parameters"
        changed.append(("freezing", replace(job, frozen=True), note))
    sizings = [(name, Sizing(each, progress.of(name)), note) for name, each, note in changed]
    note = "FSDP2: fully_shard of each repeated block, then of the model"
    sizings.append((f"sharding over {shards}", base.sharded(shards), note))
    for name, sizing, cost in sizings:
        # A change may be impossible, such as checkpointing without repeated blocks. The plan is right without it.
        try:
            largest = sizing.largest(limit_bytes, target.multiple_of, recorded=False)
            yield Change(name, sizing.peaks(batch).reserved_bytes, largest, cost)
        except ConfigurationError as error:
            yield Change(name, None, None, str(error))
