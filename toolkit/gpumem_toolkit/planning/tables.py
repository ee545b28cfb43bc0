"""The output of `plan`."""

from __future__ import annotations

from typing import TYPE_CHECKING

from gpumem_client.wire.units import human_bytes
from gpumem_exporter.cli.render.terminal import open_console, plain, show, table

if TYPE_CHECKING:
    from rich.console import RenderableType

    from gpumem_toolkit.planning.plan import Plan

__all__ = ["show_plan"]

_SOURCES = {
    "model": "a simulated training step of the model",
    "profile": "training steps measured on this machine's GPU",
    "description": "the sizes of a transformer",
}


def show_plan(plan: Plan) -> None:
    """Print the batch size, the memory at the peak, and changes that save memory."""
    show(open_console(), [*_answer(plan), plain(""), _breakdown(plan), *_changes(plan)])


def _answer(plan: Plan) -> list[RenderableType]:
    gpu = plan.gpu
    device = (
        f"{gpu.name}: {human_bytes(gpu.total_bytes)}, {human_bytes(gpu.free_bytes)} of it for tensors; "
        f"the plan uses {plan.margin:.0%} of that"
    )
    lines = [plain(f"from    {_SOURCES[plan.source]}"), plain(f"device  {device}")]
    if not plan.fits:
        peak = human_bytes(plan.reserved_peak_bytes)
        largest = f"; the largest that fits is {plan.largest_batch}" if plan.largest_batch else ""
        return [*lines, plain(f"fits    no: a batch of {plan.batch} needs {peak}{largest}", style="bold")]
    lines.append(plain(f"fits    up to a batch of {plan.largest_batch}", style="bold"))
    steps = f"accumulate {plan.accumulation}, " if plan.accumulation > 1 else ""
    devices = f" on {plan.devices} devices" if plan.devices > 1 else ""
    use = f"use     a batch of {plan.batch}, {steps}effective batch {plan.effective_batch}{devices}"
    if plan.target_effective_batch not in (None, plan.effective_batch):
        use += f" (requested {plan.target_effective_batch}, which does not divide evenly)"
    peaks = (
        f"peak    {human_bytes(plan.reserved_peak_bytes)} reserved, {human_bytes(plan.allocated_peak_bytes)} allocated"
    )
    return [*lines, plain(use), plain(peaks), *(plain(f"note    {note}") for note in plan.notes)]


def _breakdown(plan: Plan) -> RenderableType:
    rows = [
        (kind, human_bytes(size), human_bytes(plan.highest.get(kind)) if plan.highest else "")
        for kind, size in plan.breakdown.items()
    ]
    columns = [("memory", "left"), ("at the peak", "right"), ("at most", "right" if plan.highest else "left")]
    return table("", columns if plan.highest else columns[:2], [row if plan.highest else row[:2] for row in rows])


def _changes(plan: Plan) -> list[RenderableType]:
    if not plan.changes:
        return []
    rows = [
        (
            change.name,
            human_bytes(change.reserved_peak_bytes),
            "-" if change.largest_batch is None else str(change.largest_batch),
            change.note,
        )
        for change in plan.changes
    ]
    heading = f"peak at {plan.batch}"
    columns = [("change", "left"), (heading, "right"), ("largest batch", "right"), ("", "cut")]
    return [plain(""), table("", columns, rows)]
