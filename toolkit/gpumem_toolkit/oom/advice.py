"""Derives ranked advice from the values of an out-of-memory error. Pure."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from gpumem_client.wire.units import ShownAsText, human_bytes
from gpumem_toolkit.oom.known_causes import CAUSES
from gpumem_toolkit.oom.values import OomValues

# Other processes are the likely cause from this share of the device, fragmentation from this share of reserved.
_CAUSE_SHARE = 0.1
_HUGE_SHARE = 0.5
# Advice that saves less than this share of the missing bytes is left out.
_TRIFLE_SHARE = 0.02
# A proposed batch fills this share of the available memory, because rounding and the growth per item vary.
_BATCH_MARGIN = 0.9
# Kinds of advice that change the cause.
_KNOWN = {"separate_backward", "inference_mode", *(cause.kind for cause in CAUSES)}
# A training step with several losses, as for several tasks, has fewer forward passes.
_LOSSES_MANY = 4

_CHECKPOINTING = (
    "use activation checkpointing (torch.utils.checkpoint): it recomputes activations instead of keeping them"
)
_MIXED_PRECISION = (
    "use torch.autocast with bfloat16 if the model computes in float32: most activations take half the memory"
)
# Optimizers whose fused kernels run on GPUs.
_WITH_FUSED = ("Adam", "AdamW", "SGD")


@dataclass(frozen=True, slots=True)
class Advice(ShownAsText):
    """One thing to do."""

    kind: str
    """`clear`, `memory_fraction`, `split_request`, `other_process`, `leak`, `expandable_segments`, `fewer_sizes`,
    `pieces`, `smaller_batch`, `accumulation`, `checkpointing`, `mixed_precision`, `offload`, `optimizer_temporaries`,
    `optimizer_state`, `shard`, `half_precision`, `private_pools`, `release`, `separate_backward`, `inference_mode`, or
    the kind of a known cause."""
    text: str
    gives_bytes: int | None = None
    """Bytes that the advice saves; None if unknown."""
    enough: bool | None = None
    """Whether the advice alone would have been enough; None if unknown."""
    batch_size: int | None = None
    """The proposed batch size of `smaller_batch`."""

    def __str__(self) -> str:
        if self.gives_bytes is None:
            return self.text
        enough = {True: ", enough", False: ", not enough alone", None: ""}[self.enough]
        return f"{self.text} (saves about {human_bytes(self.gives_bytes)}{enough})"


def advise(values: OomValues) -> tuple[Advice, ...]:
    """Rank all advice.

    Known causes and advice that is enough come first, the cheapest of it at the top. Then come advice of unknown
    effect, and the rest by saved bytes.
    """
    ranked: list[tuple[tuple[int, int, int], Advice]] = []
    trifle = _TRIFLE_SHARE * (values.short or 0)
    for order, advice in enumerate(_all(values)):
        if advice.enough or advice.kind in _KNOWN:
            ranked.append(((0, order, 0), advice))
        elif advice.gives_bytes is not None and advice.gives_bytes <= trifle:
            continue
        elif advice.enough is None:
            ranked.append(((1, order, 0), advice))
        else:
            ranked.append(((2, -(advice.gives_bytes or 0), order), advice))
    return tuple(advice for _, advice in sorted(ranked, key=lambda each: each[0]))


def smaller_batch(values: OomValues) -> int | None:
    """Return the batch size that should fit, or None without a batch size or if none fits."""
    batch, grown, available = values.batch_size, values.grown, values.available
    if not batch or grown is None or available is None:
        return None
    room = int((grown + available + (values.reclaimable or 0)) * _BATCH_MARGIN)
    if values.bytes_per_item and values.batch_growth is not None:
        fixed = max(0, values.batch_growth - values.bytes_per_item * batch)
        fits = (room - fixed) // values.bytes_per_item
    else:
        # Without earlier runs, the growth of this run until the error is only a lower bound of the batch's need. The
        # result is then at most half of the batch.
        least = grown + (values.requested or 0)
        fits = min(batch // 2, batch * room // least) if least > 0 else batch // 2
    fits = min(fits, batch - 1)
    if fits >= 16:
        fits -= fits % 8  # kernels of tensor cores work on multiples of 8
    return fits if fits >= 1 else None


def _all(values: OomValues) -> Iterator[Advice]:
    """Yield all advice, the cheapest and the likeliest cause first."""
    yield from _available_memory(values)
    yield from _leak(values)
    others, fragmented = _other_processes(values), _fragmentation(values)
    others_likely = values.other >= _CAUSE_SHARE * (values.total or 0)
    fragmented_likely = (values.fragmented or 0) >= _CAUSE_SHARE * (values.reserved or 0)
    if others is not None and others_likely:
        yield others
    yield from _known(values)
    huge, impossible = _huge_request(values)
    # A model's activations are large with a large batch, which can be smaller unless the empty device has no room.
    huge_likely = impossible or values.phase != "forward"
    if huge is not None and huge_likely:
        yield huge
    if fragmented is not None and fragmented_likely:
        yield fragmented
    of_phase = {"optimizer": _optimizer, "data transfer": _data_transfer, "model transfer": _model_transfer}
    if all(values.phase != cause.phase for cause in values.causes):
        yield from of_phase.get(values.phase, _activations)(values)
    if huge is not None and not huge_likely:
        yield huge
    # This may be enough for this request, but hardly for the next one.
    if others is not None and not others_likely:
        yield replace(others, enough=others.enough and None)
    if fragmented is not None and not fragmented_likely:
        yield replace(fragmented, enough=fragmented.enough and None)


def _advice(values: OomValues, kind: str, text: str, saved: int | None) -> Advice:
    """Return advice that is called enough only if earlier runs of the block show what the block needs."""
    covered = values.covered_by(saved)
    return Advice(kind, text, saved, enough=None if covered and values.batch_growth is None else covered)


def _known(values: OomValues) -> Iterator[Advice]:
    """Advice for code that is known to need much memory."""
    if values.losses >= _LOSSES_MANY:
        text = (
            f"call backward on each loss, divided by their number: {values.losses} forward passes wait for one backward"
            " pass, and each keeps its activations"
        )
        yield Advice("separate_backward", text)
    if values.evaluating and values.gradients:
        text = "evaluate under torch.inference_mode(): the model is in evaluation mode, but keeps its activations"
        yield Advice("inference_mode", text)
    for cause in values.causes:
        yield Advice(cause.kind, cause.text)


def _available_memory(values: OomValues) -> Iterator[Advice]:
    if values.reclaimable and values.covered_by(values.reclaimable):
        text = "empty the cache: call gpumem.clear_cache(), or run `gpumem-exporter clear` on the node"
        yield _advice(values, "clear", text, values.reclaimable)
    if values.allowed is not None and values.free is not None and values.needed is not None:
        saved = values.free - (values.available or 0)
        if saved > 0:
            text = (
                f"raise the memory fraction with gpumem.set_memory_fraction: it allows {human_bytes(values.allowed)},"
                f" while {human_bytes(values.free)} are free on the device"
            )
            yield _advice(values, "memory_fraction", text, saved)
    if values.private_pools:
        text = "delete CUDA graphs and memory pools that are no longer used: other tensors cannot use their memory"
        yield Advice("private_pools", text, values.private_pools, enough=False)


def _huge_request(values: OomValues) -> tuple[Advice | None, bool]:
    """Return advice for a request of most of the device, and whether the request is larger than the empty device."""
    requested, total = values.requested, values.total
    if requested is None or total is None or "transfer" in values.phase:
        return None, False
    impossible = requested > total - max(0, values.non_torch or 0)
    if not impossible and not (requested >= _HUGE_SHARE * total and requested >= (values.allocated or 0)):
        return None, False
    size = "more than the empty device has" if impossible else "more than half of the device"
    where = f" at {values.place}" if values.place else ""
    text = (
        f"split the operation{where}: it requests {human_bytes(requested)} at once, {size}. Look for an unintended"
        " shape (a broadcast, a full attention matrix, a one-hot tensor), or loop over chunks"
    )
    return _advice(values, "split_request", text, max(1, requested - (values.available or 0))), impossible


def _leak(values: OomValues) -> Iterator[Advice]:
    if not values.leaked:
        return
    suspects = f": {'; '.join(values.leak_suspects)}" if values.leak_suspects else ""
    rate = f" by {human_bytes(values.leak_per_step)} per step" if values.leak_per_step else ""
    text = (
        f"fix the memory leak: allocated memory grows{rate}{suspects}. Keep numbers instead of tensors (`loss.item()`,"
        " `.detach().cpu()`), and limit the size of lists that collect them"
    )
    yield _advice(values, "leak", text, values.leaked)


def _other_processes(values: OomValues) -> Advice | None:
    if not values.other:
        return None
    largest = sorted(values.other_processes, key=lambda each: -each[1])[:3]
    names = ", ".join(f"process {pid} uses {human_bytes(size)}" for pid, size in largest)
    text = (
        f"free memory of other processes on this device: {names}. Stop or move them, use another device for this job,"
        " or empty their caches with `gpumem-exporter clear` if they report"
    )
    return _advice(values, "other_process", text, values.other)


def _fragmentation(values: OomValues) -> Advice | None:
    if not values.fragmented or values.expandable:
        return None
    pieces = f"{human_bytes(values.fragmented)} are free in pieces between live tensors"
    if values.expandable_conflict:
        text = (
            f"use fewer tensor sizes (pad or bucket batches): {pieces}, and expandable segments are no option, because"
            f" {values.expandable_conflict}"
        )
        return Advice("fewer_sizes", text)
    text = (
        "start the job with PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True (`gpumem-exporter run --allocator"
        f" expandable_segments:True`): {pieces}. Every release reads this name, also where it warns that the name is"
        " deprecated; PYTORCH_ALLOC_CONF works alone, and from torch 2.10 on"
    )
    return _advice(values, "expandable_segments", text, values.fragmented)


def _activations(values: OomValues) -> Iterator[Advice]:
    """Advice for forward, backward and unknown phases."""
    yield from _batch(values)
    if values.gradients:
        first = "checkpoint smaller parts: a part that backward computed again did not fit"
        yield Advice("checkpointing", first if values.recomputed else _CHECKPOINTING)
        yield Advice("mixed_precision", _MIXED_PRECISION)
        yield Advice("offload", "keep saved activations in host memory (torch.autograd.graph.save_on_cpu)")
        if values.ranks > 1 and values.allocated:
            yield Advice("shard", "shard parameters, gradients and optimizer state over the ranks (FSDP)")


def _growth(values: OomValues) -> int | None:
    """Return the growth of the block at its peak, as far as it is known."""
    return max(values.grown or 0, values.batch_growth or 0) or None


def _batch(values: OomValues) -> Iterator[Advice]:
    batch, fits = values.batch_size, smaller_batch(values)
    if batch and fits:
        measured = bool(values.bytes_per_item and values.batch_growth is not None)
        per_item = values.bytes_per_item or ((_growth(values) or 0) + (values.requested or 0)) // batch
        saved, enough = (batch - fits) * per_item, True if measured else None
        guess = "" if measured else ", as a first guess: no earlier run was measured"
        yield Advice("smaller_batch", f"use a batch of {fits} instead of {batch}{guess}", saved, enough, fits)
        micro = -(-batch // fits)
        size = -(-batch // micro)
        text = f"accumulate gradients over {micro} micro-batches of {size}: the effective batch stays {batch}"
        if values.gradients:
            yield Advice("accumulation", text, saved, enough)
    elif batch != 1:
        more = ", and accumulate gradients over several of them" if values.gradients else ""
        yield Advice("smaller_batch", f"use a smaller batch{more}")


def _optimizer(values: OomValues) -> Iterator[Advice]:
    missing, present = values.optimizer_state_missing or 0, values.optimizer_state or 0
    state, name = missing + present, values.optimizer or "the optimizer"
    if missing:
        if values.ranks > 1:
            text = f"shard the state of {name} over the {values.ranks} ranks (FSDP, ZeroRedundancyOptimizer)"
            yield _advice(values, "shard", text, state - state // values.ranks)
        text = (
            f"use an optimizer with less state than the {human_bytes(state)} of {name}: 8-bit AdamW keeps a quarter,"
            " torch.optim.Adafactor rows and columns, SGD without momentum none"
        )
        yield _advice(values, "optimizer_state", text, state - state // 4)
    else:
        yield from _temporaries(values)
    if values.parameters is not None and values.allocated is not None:
        rest = values.allocated - 2 * values.parameters - present  # gradients are as large as parameters
        if rest > 0:
            text = "delete outputs and loss (`del`) before optimizer.step(): they are still alive"
            yield Advice("release", text, rest, enough=False)
    if state:
        text = "keep the optimizer state in host memory (FSDP CPUOffloadPolicy, DeepSpeed)"
        yield _advice(values, "offload", text, state)


def _temporaries(values: OomValues) -> Iterator[Advice]:
    if values.optimizer in _WITH_FUSED and not values.optimizer_fused:
        text = f"create {values.optimizer} with fused=True: otherwise a step makes temporary copies of tensors"
        saved = values.parameters if values.optimizer_foreach else values.requested
        yield _advice(values, "optimizer_temporaries", text, saved or None)
    elif values.optimizer_foreach and not values.optimizer_fused:
        text = f"create {values.optimizer} with foreach=False: otherwise a step makes temporary copies of all tensors"
        yield Advice("optimizer_temporaries", text)


def _data_transfer(values: OomValues) -> Iterator[Advice]:
    requested = values.requested or 0
    most = f", {human_bytes(values.available)} at most" if values.available else ""
    text = f"keep the data in host memory and move pieces of it when they are needed{most}"
    yield _advice(values, "pieces", text, requested or None)
    yield Advice("release", "delete outputs, loss and the previous batch before the next transfer")
    yield from _batch(values)
    text = "move a narrow type (uint8, bfloat16) and convert it on the device"
    yield Advice("half_precision", text, requested // 2 or None)


def _model_transfer(values: OomValues) -> Iterator[Advice]:
    size, ranks = values.parameters, values.ranks
    yield _advice(values, "half_precision", "load the model in bfloat16", None if size is None else size // 2)
    if ranks > 1:
        text = f"shard the model over the {ranks} ranks (FSDP, from the meta device)"
        yield _advice(values, "shard", text, None if size is None else size - size // ranks)
    else:
        yield Advice("shard", "shard the model over several devices (FSDP, device_map), or quantize it")
    yield Advice("offload", "keep a part of the model in host memory (cpu_offload)", size)
