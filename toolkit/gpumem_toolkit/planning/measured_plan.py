"""Plans from training steps on this machine's GPU, for models that fail on tensors without values."""

from __future__ import annotations

import gc
from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor

from gpumem_client.wire.errors import ConfigurationError
from gpumem_toolkit.measure.tensor_bytes import Storages
from gpumem_toolkit.planning.devices import Gpu
from gpumem_toolkit.planning.fake_model import DTYPES, checkpoint_blocks
from gpumem_toolkit.planning.job import Job
from gpumem_toolkit.planning.plan import Fit, Plan, Target, accumulate
from gpumem_toolkit.planning.stepping import make_optimizer, train

# The steps of a measurement. The first one creates the optimizer state, which the second one has from its start.
STEPS = 2


def profile_job(job: Job, gpu: Gpu, target: Target, *, batch: int, notify: Callable[[int], None]) -> Plan:
    """Plan by the line through two measurements on cuda:0: at a batch size and at half of it.

    Uses CUDA and resets the peak statistics of this process. `notify` is called with a batch size before it is
    measured. Raises ConfigurationError if there is no CUDA, or if the measured batch does not fit.
    """
    if not torch.cuda.is_available():
        raise ConfigurationError(
            "CUDA is not available: --profile measures on a GPU; without --profile no GPU is needed"
        )
    if batch < 2:
        raise ConfigurationError(f"invalid batch {batch}: it must be at least 2, because half of it is measured too")
    accumulating = replace(job, accumulation=2) if target.effective_batch is not None else job
    try:
        small, _, _ = _measure(accumulating, batch // 2, notify)
        large, reserved, shares = _measure(accumulating, batch, notify)
    except torch.OutOfMemoryError as error:
        raise ConfigurationError(f"batch {batch} does not fit: measure a smaller one with --batch") from error
    span = batch - batch // 2
    slope = max(1, -(-(large - small) // span))
    # The allocator's rounding and cache grow with the allocated bytes.
    slack = reserved / max(1, large)
    fixed = large - slope * batch
    limit = gpu.free_bytes * target.margin
    largest = max(0, int((limit / slack - fixed) // slope)) // target.multiple_of * target.multiple_of
    size, accumulation = accumulate(largest, target)
    allocated = fixed + slope * size
    peak, rest = int(allocated * slack), max(0, allocated - sum(shares.values()))
    return Plan(
        source="profile",
        gpu=gpu,
        margin=target.margin,
        largest_batch=largest,
        batch=size,
        accumulation=accumulation if target.effective_batch is not None else job.accumulation,
        target_effective_batch=target.effective_batch,
        devices=target.devices,
        allocated_peak_bytes=allocated,
        reserved_peak_bytes=peak,
        breakdown={**shares, "activations": rest, "overhead": int(allocated * (slack - 1))},
        on=(Fit(gpu, size <= largest, int(limit) - peak, largest),),
    )


def _measure(job: Job, batch: int, notify: Callable[[int], None]) -> tuple[int, int, dict[str, int]]:
    """Return the allocated and the reserved peak of a batch size, and the bytes of each kind."""
    notify(batch)
    torch.cuda.init()
    gc.collect()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats(0)
    model = job.make_model().to("cuda").train()
    if job.precision.startswith("pure-"):
        model.to(DTYPES[job.precision])
    if job.checkpointing:
        checkpoint_blocks(model)
    shares: dict[str, int] = {}
    optimizer, _ = make_optimizer(job, model)
    for event in train(job, model, optimizer, batch, STEPS, "cuda"):
        if event == "optimizer":
            gradients = [p.grad for p in model.parameters() if p.grad is not None]
            kinds = {"parameters": model.parameters(), "buffers": model.buffers(), "gradients": gradients}
            shares = {kind: Storages(torch, tensors).total() for kind, tensors in kinds.items()} | {"optimizer": 0}
        elif event == "stepped":
            values = [value for state in optimizer.state.values() for value in state.values()]
            on_device = (value for value in values if isinstance(value, Tensor) and value.is_cuda)
            shares["optimizer"] = Storages(torch, on_device).total()
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated(0), torch.cuda.max_memory_reserved(0), shares
