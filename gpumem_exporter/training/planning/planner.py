"""Puts a plan together: the largest batch that fits, the accumulation, the breakdown and what else could be done."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from gpumem_exporter.errors import ConfigurationError
from gpumem_exporter.training.planning.description import Description
from gpumem_exporter.training.planning.devices import Gpu, parse_gpu
from gpumem_exporter.training.planning.inputs import TensorSpec, parse_tensor
from gpumem_exporter.training.planning.job import Job
from gpumem_exporter.training.planning.plan import Change, Plan, accumulate
from gpumem_exporter.training.planning.search import Sizing

__all__ = ["DEFAULT_MARGIN", "plan", "plan_description", "plan_job"]

DEFAULT_MARGIN = 0.85


def plan(
    make_model: Callable[[], Any],
    inputs: str | Sequence[str],
    gpu: str | Gpu,
    *,
    targets: str | Sequence[str] = (),
    loss: str | Callable[..., Any] = "auto",
    optimizer: str | Callable[..., Any] = "adamw",
    optimizer_options: Mapping[str, Any] | None = None,
    precision: str = "fp32",
    attention: str = "auto",
    convolution: str = "cudnn",
    target_effective_batch: int | None = None,
    devices: int = 1,
    margin: float = DEFAULT_MARGIN,
    changes: bool = True,
) -> Plan:
    """Plan the training of a model, without a GPU and without taking memory.

    Args:
        make_model: returns the `torch.nn.Module`; it is called with fake tensors in force.
        inputs: what the model is called with, as `float32[B,3,224,224]`.
        gpu: a size (`80GiB`), a name (`h100-80gb`), or a Gpu.
        targets: what the loss is called with after the model's output.
        loss: see `job.Job`, as for the next five.
        optimizer: its name, or a callable of the parameters.
        optimizer_options: keyword arguments of it.
        precision: of parameters and computation.
        attention: which kernel.
        convolution: cudnn or native.
        target_effective_batch: samples in one optimizer step, over all devices.
        devices: data-parallel processes.
        margin: which part of the device's free memory may be planned with.
        changes: also work out what else could be done; takes a few times as long.

    Not thread-safe, and nothing else may compute on CPU tensors meanwhile.

    Raises:
        ConfigurationError: an argument is wrong, or the model fails on tensors without values.
    """
    job = Job(
        make_model,
        _tensors(inputs),
        _tensors(targets),
        loss=loss,
        optimizer=optimizer,
        optimizer_options=optimizer_options or {},
        precision=precision,
        attention=attention,
        convolution=convolution,
    )
    on = parse_gpu(gpu) if isinstance(gpu, str) else gpu
    return plan_job(
        job, on, target_effective_batch=target_effective_batch, devices=devices, margin=margin, changes=changes
    )


def plan_description(description: Description, gpu: str | Gpu, **options: Any) -> Plan:
    """Plan a decoder-only transformer by its measures; `options` are those of `plan_job`, and of Job.

    Raises:
        ConfigurationError: a measure is wrong.
    """
    on = parse_gpu(gpu) if isinstance(gpu, str) else gpu
    asked = ("target_effective_batch", "devices", "margin", "multiple_of", "changes")
    chosen = {name: options.pop(name) for name in asked if name in options}
    return plan_job(description.job(**options), on, source="description", **chosen)


def plan_job(
    job: Job,
    gpu: Gpu,
    *,
    source: str = "model",
    target_effective_batch: int | None = None,
    devices: int = 1,
    margin: float = DEFAULT_MARGIN,
    multiple_of: int = 1,
    changes: bool = True,
) -> Plan:
    """The same for a job.

    Raises:
        ConfigurationError: as `plan`.
    """
    _check(target_effective_batch, devices, margin, multiple_of)
    limit_bytes = int(gpu.free_bytes * margin)
    sizing = Sizing(job)
    largest = sizing.largest(limit_bytes, multiple_of)
    if target_effective_batch is not None and job.accumulation == 1 and largest * devices < target_effective_batch:
        # Gradients that stay from pass to pass leave less room; beyond two passes nothing changes.
        job = job.changed(accumulation=2)
        sizing = Sizing(job)
        largest = sizing.largest(limit_bytes, multiple_of)
    batch, accumulation = accumulate(largest, target_effective_batch, devices)
    if target_effective_batch is None:
        accumulation = job.accumulation
    peaks, trace = sizing.peaks(batch, gpu.free_bytes if largest else None), sizing.trace(batch)
    shares = trace.peak()
    breakdown = {**shares, "overhead": max(0, peaks.reserved_bytes - sum(shares.values()))}
    others = tuple(_changes(sizing, batch, limit_bytes, max(2, devices), multiple_of)) if changes else ()
    return Plan(
        source=source,
        gpu=gpu,
        margin=margin,
        largest_batch=largest,
        batch=batch,
        accumulation=accumulation,
        target_effective_batch=target_effective_batch,
        devices=devices,
        allocated_peak_bytes=peaks.allocated_bytes,
        reserved_peak_bytes=peaks.reserved_bytes,
        breakdown=breakdown,
        highest=trace.highs(),
        changes=others,
    )


def _check(target_effective_batch: int | None, devices: int, margin: float, multiple_of: int) -> None:
    """Refuse what no plan can be made with.

    Raises:
        ConfigurationError: says what would be right.
    """
    if not 0 < margin <= 1:
        raise ConfigurationError(f"margin {margin}; it is a part of the free memory, above 0 and at most 1")
    for name, value in (("devices", devices), ("multiple of", multiple_of), ("target", target_effective_batch)):
        if value is not None and value < 1:
            raise ConfigurationError(f"{name} {value}; it must be at least 1")


def _tensors(texts: str | Sequence[str]) -> tuple[TensorSpec, ...]:
    return tuple(parse_tensor(text) for text in ((texts,) if isinstance(texts, str) else texts))


def _changes(base: Sizing, batch: int, limit_bytes: int, shards: int, multiple_of: int) -> Iterator[Change]:
    """What else could be done, each alone."""
    job = base.job
    asked = []
    if not job.checkpointing:
        asked.append(("checkpointing", Sizing(job.changed(checkpointing=True)), "forward once more in backward"))
    if job.precision == "fp32":
        asked.append(("bf16 autocast", Sizing(job.changed(precision="bf16")), "parameters and optimizer stay fp32"))
    if not job.frozen:
        note = "only the last layer is trained; an adapter costs its own few parameters more"
        asked.append(("freezing", Sizing(job.changed(frozen=True)), note))
    note = "parameters, gradients and optimizer state; the one layer that is gathered comes on top"
    asked.append((f"sharding over {shards}", base.sharded(shards), note))
    for name, sizing, note in asked:
        try:
            yield Change(name, sizing.peaks(batch).reserved_bytes, sizing.largest(limit_bytes, multiple_of), note)
        except ConfigurationError as error:
            yield Change(name, None, None, str(error))
