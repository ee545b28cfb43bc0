"""What follows from the figures of an out-of-memory error: pieces of advice, the best first. Pure."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from gpumem_exporter.client.oom.figures import OomFigures
from gpumem_exporter.client.sizes import human_bytes

__all__ = ["Advice", "advise", "smaller_batch"]

_ENOUGH, _PERHAPS, _NOT_ENOUGH = 0, 1, 2
_MATERIAL_SHARE = 0.1
"""Another process, or fragmentation, is the likely cause from this share of the device (of what is reserved) on."""
_HUGE_SHARE = 0.5
_TRIFLE_SHARE = 0.02
"""What gives no more than this of what is short is not worth saying."""
_BATCH_MARGIN = 0.9
"""A batch is proposed that fills nine tenths of the room: allocations round up, and the slope is a measured one."""


@dataclass(frozen=True, slots=True)
class Advice:
    """One thing to do."""

    kind: str
    """`clear`, `memory_fraction`, `split_request`, `other_process`, `leak`, `expandable_segments`, `pieces`,
    `smaller_batch`, `accumulation`, `checkpointing`, `mixed_precision`, `offload`, `optimizer_temporaries`,
    `optimizer_state`, `shard`, `half_precision`, `private_pools`, `release`."""
    text: str
    gives_bytes: int | None = None
    """What it would give; None where that cannot be told."""
    enough: bool | None = None
    """Whether that alone would have been enough; None where that cannot be told."""
    batch_size: int | None = None
    """For `smaller_batch`: the size."""

    def __str__(self) -> str:
        if self.gives_bytes is None:
            return self.text
        would = {True: ", enough", False: ", not enough alone", None: ""}[self.enough]
        return f"{self.text} (gives about {human_bytes(self.gives_bytes)}{would})"


def advise(figures: OomFigures) -> tuple[Advice, ...]:
    """Rank what can be done: first what is enough, cheapest first; then what may be; then the rest, by its bytes."""
    ranked: list[tuple[tuple[int, int, int], Advice]] = []
    trifle = _TRIFLE_SHARE * (figures.short or 0)
    for order, advice in enumerate(_all(figures)):
        if not advice.enough and advice.gives_bytes is not None and advice.gives_bytes <= trifle:
            continue
        if advice.enough is None:
            key = (_PERHAPS, order, 0)
        elif advice.enough:
            key = (_ENOUGH, order, 0)
        else:
            key = (_NOT_ENOUGH, -(advice.gives_bytes or 0), order)
        ranked.append((key, advice))
    return tuple(advice for _, advice in sorted(ranked, key=lambda each: each[0]))


def smaller_batch(figures: OomFigures) -> int | None:
    """The batch that should fit; None where there is no batch size, or none fits.

    By the growth per item that was measured in earlier runs of the block. Without one, what this run had grown by when
    it failed is the least that this batch needs: then half of it at most.
    """
    batch, grown, available = figures.batch_size, figures.grown, figures.available
    if not batch or grown is None or available is None:
        return None
    room = int((grown + available + (figures.reclaimable or 0)) * _BATCH_MARGIN)
    if figures.bytes_per_item and figures.batch_growth is not None:
        fixed = max(0, figures.batch_growth - figures.bytes_per_item * batch)
        fits = (room - fixed) // figures.bytes_per_item
    else:
        least = grown + (figures.requested or 0)
        fits = min(batch // 2, batch * room // least) if least > 0 else batch // 2
    fits = min(fits, batch - 1)
    if fits >= 16:
        fits -= fits % 8
    return fits if fits >= 1 else None


def _all(figures: OomFigures) -> Iterator[Advice]:
    """In the order in which they are tried: what costs least, and what is the likeliest cause, first."""
    yield from _memory_at_hand(figures)
    huge = _huge_request(figures)
    if huge is not None:
        yield huge
    yield from _leak(figures)
    others, fragmented = _other_processes(figures), _fragmentation(figures)
    likely = figures.other >= _MATERIAL_SHARE * (figures.total or 0)
    if others is not None and likely:
        yield others
    broken = fragmented is not None and (figures.fragmented or 0) >= _MATERIAL_SHARE * (figures.reserved or 0)
    if fragmented is not None and broken:
        yield fragmented
    if figures.phase == "optimizer":
        yield from _optimizer(figures)
    elif figures.phase == "data transfer":
        yield from _data_transfer(figures)
    elif figures.phase == "model transfer":
        yield from _model_transfer(figures)
    else:
        yield from _activations(figures)
    # Enough for this request, but hardly the reason why the next one fits either.
    if others is not None and not likely:
        yield replace(others, enough=others.enough and None)
    if fragmented is not None and not broken:
        yield replace(fragmented, enough=fragmented.enough and None)


def _memory_at_hand(figures: OomFigures) -> Iterator[Advice]:
    reclaimable, short = figures.reclaimable or 0, figures.short
    if reclaimable > 0 and short is not None and reclaimable >= short:
        yield Advice(
            "clear",
            "give the cache back first: gpumem.clear_cache(), or `gpumem-exporter clear` from outside",
            reclaimable,
            enough=True,
        )
    if figures.allowed is not None and figures.free is not None and figures.needed is not None:
        gives = figures.free - (figures.available or 0)
        if gives > 0:
            yield Advice(
                "memory_fraction",
                f"raise the memory fraction: it allows {human_bytes(figures.allowed)}, and the device has"
                f" {human_bytes(figures.free)} free (gpumem.set_memory_fraction)",
                gives,
                enough=figures.free >= figures.needed,
            )
    if figures.private_pools:
        yield Advice(
            "private_pools",
            "drop CUDA graphs and memory pools that are no longer replayed: their memory is not shared with the rest",
            figures.private_pools,
            enough=False,
        )


def _huge_request(figures: OomFigures) -> Advice | None:
    requested, total, allocated = figures.requested, figures.total, figures.allocated
    if requested is None or total is None or "transfer" in figures.phase:
        return None
    most = total - max(0, figures.non_torch or 0)
    alone = requested > most
    if not alone and not (requested >= _HUGE_SHARE * total and requested >= (allocated or 0)):
        return None
    says = "more than an empty device has" if alone else "one tensor of more than half of the device"
    where = f" at {figures.place}" if figures.place else ""
    return Advice(
        "split_request",
        f"compute in pieces{where}: it asks for {human_bytes(requested)} at once, {says}; look for a shape that is"
        " not meant (a broadcast, a full attention matrix, a one-hot), else loop over chunks of it",
        requested - (figures.available or 0),
        enough=True,
    )


def _leak(figures: OomFigures) -> Iterator[Advice]:
    if not figures.leaked:
        return
    suspects = f": {'; '.join(figures.leak_suspects)}" if figures.leak_suspects else ""
    each = f" by {human_bytes(figures.leak_per_step)} a step" if figures.leak_per_step else ""
    yield Advice(
        "leak",
        f"something keeps what each step allocates: memory grew{each}{suspects}. Keep numbers, not tensors"
        " (`loss.item()`, `.detach().cpu()`), and bound what collects them",
        figures.leaked,
        enough=None if figures.short is None else figures.leaked >= figures.short,
    )


def _other_processes(figures: OomFigures) -> Advice | None:
    if not figures.other:
        return None
    worst = sorted(figures.other_processes, key=lambda each: -each[1])[:3]
    names = ", ".join(f"process {pid} with {human_bytes(size)}" for pid, size in worst)
    return Advice(
        "other_process",
        f"others use this device: {names}. End or move them, give this job another device, or have them give"
        " their cache back (`gpumem-exporter clear`, if they report)",
        figures.other,
        enough=None if figures.short is None else figures.other >= figures.short,
    )


def _fragmentation(figures: OomFigures) -> Advice | None:
    fragmented = figures.fragmented
    if not fragmented or figures.expandable:
        return None
    return Advice(
        "expandable_segments",
        "start with PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True (`gpumem-exporter run --allocator"
        f" expandable_segments:True`): {human_bytes(fragmented)} are reserved and free, in pieces between live tensors",
        fragmented,
        enough=None if figures.short is None else fragmented >= figures.short,
    )


def _activations(figures: OomFigures) -> Iterator[Advice]:
    """Forward, backward, and where the phase is not known."""
    batch, fits = figures.batch_size, smaller_batch(figures)
    grown = max(figures.grown or 0, figures.batch_growth or 0) or None
    if batch and fits:
        measured = bool(figures.bytes_per_item and figures.batch_growth is not None)
        per_item = figures.bytes_per_item or ((grown or 0) + (figures.requested or 0)) // batch
        gives = (batch - fits) * per_item
        yield Advice(
            "smaller_batch",
            f"a batch of {fits} instead of {batch}" + ("" if measured else ", as a first try: nothing is measured yet"),
            gives,
            enough=True if measured else None,
            batch_size=fits,
        )
        micro = -(-batch // fits)
        yield Advice(
            "accumulation",
            f"to keep the effective batch of {batch}: {micro} micro-batches of {-(-batch // micro)}, with their"
            " gradients accumulated",
            gives,
            enough=True if measured else None,
        )
    elif batch != 1:
        yield Advice("smaller_batch", "a smaller batch, with gradients accumulated over several of them")
    if figures.recomputed:
        yield Advice(
            "checkpointing", "checkpoint smaller parts: one of them, computed again, did not fit beside the rest"
        )
    else:
        yield Advice(
            "checkpointing",
            "activation checkpointing (torch.utils.checkpoint): activations are computed again rather than kept",
            None if grown is None else grown // 2,
        )
    yield Advice(
        "mixed_precision",
        "if it computes in float32: torch.autocast with bfloat16, which halves most activations",
        None if grown is None else grown // 2,
    )
    yield Advice(
        "offload",
        "keep saved activations in host memory (torch.autograd.graph.save_on_cpu)",
        grown,
    )
    if figures.ranks > 1 and figures.allocated:
        yield Advice("shard", "shard parameters, gradients and optimizer state over the ranks (FSDP)")


def _optimizer(figures: OomFigures) -> Iterator[Advice]:
    short = figures.short
    missing, present = figures.optimizer_state_missing or 0, figures.optimizer_state or 0
    state, name = missing + present, figures.optimizer or "the optimizer"

    def judged(kind: str, text: str, gives: int) -> Advice:
        return Advice(kind, text, gives, enough=None if short is None else gives >= short)

    if missing:
        if figures.ranks > 1:
            yield judged(
                "shard",
                f"shard {name}'s state over the {figures.ranks} ranks (FSDP, ZeroRedundancyOptimizer)",
                state - state // figures.ranks,
            )
        yield judged(
            "optimizer_state",
            f"{name} is making {human_bytes(state)} of state: an optimizer with less of it (8-bit AdamW keeps a"
            " quarter; torch.optim.Adafactor keeps rows and columns; SGD without momentum none)",
            state - state // 4,
        )
    elif figures.parameters:
        yield judged(
            "optimizer_temporaries",
            f"{name}(..., fused=True), or foreach=False: the default steps over all tensors at once and makes"
            " temporary copies of them",
            figures.parameters,
        )
    elif figures.phase == "optimizer":
        yield Advice("optimizer_temporaries", f"{name}(..., fused=True), or foreach=False: no temporary copies")
    known = [figures.parameters, figures.allocated]
    if None not in known:
        # Parameters, and gradients of the same size.
        rest = (figures.allocated or 0) - 2 * (figures.parameters or 0) - present
        if rest > 0:
            yield Advice(
                "release",
                "what is neither parameter, gradient nor state is still alive in the step: drop outputs and loss"
                " (`del`) before optimizer.step()",
                rest,
                enough=False,
            )
    if state:
        yield judged("offload", "keep the optimizer's state in host memory (FSDP CPUOffloadPolicy, DeepSpeed)", state)


def _data_transfer(figures: OomFigures) -> Iterator[Advice]:
    available = figures.available or 0
    requested = figures.requested or 0
    most = f"{human_bytes(available)} at once at most" if available else "smaller ones"
    yield Advice(
        "pieces",
        f"keep the data in host memory and move it in pieces, {most}, when they are needed",
        requested or None,
        enough=True if requested else None,
    )
    yield Advice("release", "drop what the last step left (outputs, loss, the batch before) ahead of the next transfer")
    if figures.batch_size != 1:
        fits = smaller_batch(figures)
        size = f"a batch of {fits} instead of {figures.batch_size}" if fits else "a smaller batch"
        yield Advice("smaller_batch", size, batch_size=fits)
    yield Advice(
        "half_precision",
        "move narrow types (uint8, bfloat16) and widen them on the device",
        requested // 2 or None,
    )


def _model_transfer(figures: OomFigures) -> Iterator[Advice]:
    parameters, short = figures.parameters, figures.short

    def judged(kind: str, text: str, gives: int | None) -> Advice:
        enough = None if gives is None or short is None else gives >= short
        return Advice(kind, text, gives, enough)

    yield judged("half_precision", "load it in bfloat16", None if parameters is None else parameters // 2)
    if figures.ranks > 1:
        yield judged(
            "shard",
            f"shard it over the {figures.ranks} ranks (FSDP, from the meta device)",
            None if parameters is None else parameters - parameters // figures.ranks,
        )
    else:
        yield Advice("shard", "shard it over several devices (FSDP, device_map), or quantize it")
    yield Advice("offload", "keep part of it in host memory (cpu_offload)", parameters)
