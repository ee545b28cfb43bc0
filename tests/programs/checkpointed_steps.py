"""Training steps with and without checkpointing, on the CPU and on the emulated node.

The functions run in a process with torch; their results are JSON.
"""

from __future__ import annotations

import random
import sys
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.nn import functional

import gpumem_toolkit as toolkit
from gpumem_client.wire.errors import ConfigurationError
from gpumem_toolkit import CheckpointingComparison

compare = toolkit.compare_checkpointing


class Block(nn.Module):
    """A block that counts its forward passes and can fail in them."""

    table: torch.Tensor | None

    def __init__(self, width: int, misbehave: Callable[[torch.Tensor], torch.Tensor] = lambda x: x) -> None:
        super().__init__()
        self.linear = nn.Linear(width, width)
        self.dropout = nn.Dropout(0.2)
        self.register_buffer("table", None)  # created on first use
        self.calls = 0
        self.misbehave = misbehave

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        if self.table is None:
            self.table = torch.ones(1, device=x.device)
        x = self.misbehave(x)
        return x + functional.gelu(self.dropout(self.linear(x)))


class Net(nn.Module):
    """A model with a stem, blocks, two shorter or mixed lists, and a head."""

    def __init__(self, width: int = 16, **options: Any) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.stem = nn.Sequential(*(part for _ in range(8) for part in (nn.Linear(width, width), nn.ReLU())))
        self.pair = nn.ModuleList(nn.Linear(width, width) for _ in range(2))
        self.blocks = nn.ModuleList(Block(width, **options) for _ in range(5))
        self.norm = nn.BatchNorm1d(width)
        self.head = nn.Linear(width, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.pair[1](self.pair[0](self.stem(x)))
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def refused(call: Callable[[], object]) -> str:
    """Return the message of a configuration error; empty if there is none."""
    try:
        call()
    except ConfigurationError as error:
        return str(error)
    return ""


def as_document(comparison: CheckpointingComparison) -> dict[str, Any]:
    return {**comparison.as_dict(), "text": str(comparison)}


def plain() -> dict[str, Any]:
    net = Net()
    result = as_document(compare(net, torch.randn(8, 16), repeats=2, every=[2]))
    return {**result, "calls": [block.calls for block in net.blocks]}


def state_of(net: nn.Module) -> list[object]:
    return [
        [(name, value.tolist()) for name, value in net.state_dict().items()],
        [(name, vars(module).get("forward") is not None, module.training) for name, module in net.named_modules()],
        [(name, id(p), id(p.grad), None if p.grad is None else p.grad.tolist()) for name, p in net.named_parameters()],
        [id(buffer) for buffer in net.buffers()],
        [list(module._forward_hooks) for module in net.modules()],
        torch.get_rng_state().tolist(),
        repr(random.getstate()),
        repr(np.random.get_state()),
    ]


def simulated_in_evaluation() -> dict[str, Any]:
    """Return the peaks of a model in each mode, and its random numbers."""
    net, batch = Net(width=64, misbehave=lambda x: x * random.random()), torch.randn(512, 64)
    before = state_of(net)
    peaks = {
        mode: [row.peak_bytes for row in compare(net.train(mode), batch, repeats=1, simulate=True).rows]
        for mode in (False, True)
    }
    return {"evaluating": peaks[False], "training": peaks[True], "left": state_of(net) == before}


def left_alone(failing: bool) -> list[bool]:
    """Return whether each part of a model's state is unchanged after a comparison that succeeds or fails."""
    net = Net(misbehave=lambda x: x * random.random() * np.random.rand())
    own = net.blocks[1].forward
    net.blocks[1].forward = lambda x: own(x)  # set by other code; must remain
    given = net.blocks[1].forward
    net.head.register_forward_hook(lambda *_: None)
    net(torch.randn(8, 16)).sum().backward()
    net.stem.eval()
    batch = torch.randn(8, 16, requires_grad=True)
    before = state_of(net)
    runs: list[int] = []

    def loss(output: torch.Tensor) -> torch.Tensor:
        runs.append(1)
        if failing and len(runs) == 4:
            raise RuntimeError("in the middle")
        return output.square().sum()

    try:
        compare(net, batch, loss=loss, repeats=1)
        ended = not failing
    except RuntimeError as error:
        ended = failing and str(error) == "in the middle"
    after = state_of(net)
    same = [one == other for one, other in zip(before, after, strict=True)]
    return [*same, net.blocks[1].forward is given, batch.grad is None, ended]


def without_library_memory() -> list[bool]:
    """Return the modes in which a library runs out of memory, as opposed to the allocator."""

    def only_in_checkpoints(x: torch.Tensor) -> torch.Tensor:
        if torch._C._autograd._top_saved_tensors_default_hooks(True) is None:
            raise RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`")
        return x

    net = Net(misbehave=only_in_checkpoints)
    return [row.out_of_memory for row in compare(net, torch.randn(8, 16), repeats=1, every=[]).rows]


def differing() -> dict[str, Any]:
    """Return what checkpointing changes: random numbers that are drawn again, and statistics that are counted twice."""
    random.seed(2)
    drawing = Net(misbehave=lambda x: x * random.random())
    norms = nn.Sequential(*(nn.Sequential(nn.Linear(16, 16), nn.BatchNorm1d(16)) for _ in range(3)))
    batch = torch.randn(8, 16)
    running = np.random.default_rng(0)
    noisy = Net(misbehave=lambda x: x * float(running.random()))
    return {
        name: as_document(compare(net, batch, repeats=1))
        for name, net in (("drawing", drawing), ("norms", norms), ("noisy", noisy))
    }


def chosen() -> dict[str, Any]:
    net, batch = Net(), torch.randn(8, 16)
    given = [net.stem[0], net.blocks[0], net.head]
    return {
        "given": as_document(compare(net, batch, blocks=given, every=[3], repeats=1)),
        "evaluating": as_document(compare(net.eval(), {"x": batch}, repeats=1)),
        "still evaluating": not any(module.training for module in net.modules()),
        "positional": as_document(compare(net, (batch,), loss=lambda y: {"l": y.sum()}["l"], repeats=1)),
        "autocast": as_document(compare(net, batch, autocast=torch.bfloat16, repeats=1)),
    }


def refusals() -> dict[str, str]:
    net, batch = Net(), torch.randn(8, 16)
    hooked = Net()
    hooked.head.weight.register_post_accumulate_grad_hook(lambda _: None)

    def in_inference() -> None:
        with torch.inference_mode():
            compare(net, batch)

    return {
        "no blocks": refused(lambda: compare(nn.Linear(2, 2), batch)),
        "foreign blocks": refused(lambda: compare(net, batch, blocks=[nn.Linear(2, 2)])),
        "every 9": refused(lambda: compare(net, batch, every=[9])),
        "no loss": refused(lambda: compare(net, batch, loss=lambda output: output)),
        "nothing to train": refused(lambda: compare(net.requires_grad_(False), batch)),
        "a hook": refused(lambda: compare(hooked, batch)),
        "meta": refused(lambda: compare(Net().to("meta"), batch.to("meta"))),
        "inference": refused(in_inference),
        "a computed batch": refused(lambda: compare(net, nn.Linear(16, 16)(batch))),
        "autocast": refused(lambda: compare(net, batch, autocast=torch.int8)),
        "reset on the CPU": refused(lambda: compare(net, batch, reset_peaks=True)),
    }


def charts(path: str) -> dict[str, Any]:
    comparison = compare(Net(), torch.randn(8, 16), repeats=1, simulate=True)
    figure = comparison.figure(path)
    titles = [axes.get_title() for axes in figure.axes]
    labels = [text.get_text() for text in figure.axes[1].texts]
    pyplot = "matplotlib.pyplot" in sys.modules
    kept = {name: sys.modules.pop(name) for name in list(sys.modules) if name.partition(".")[0] == "matplotlib"}
    sys.modules["matplotlib"] = None  # type: ignore[assignment]
    try:
        missing = refused(comparison.figure)
    finally:
        del sys.modules["matplotlib"]
        sys.modules.update(kept)
    peaks = [row.peak_bytes for row in comparison.rows]
    return {"titles": titles, "labels": labels, "pyplot": pyplot, "missing": missing, "peaks": peaks}


def transformer() -> nn.Module:
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(128, 4, 512, dropout=0.1, batch_first=True)
    return nn.TransformerEncoder(layer, 6, enable_nested_tensor=False)


def on_device() -> dict[str, Any]:
    """Compare on a device: first without a higher peak, then with resets, then simulated."""
    net, batch = transformer().cuda(), torch.randn(8, 64, 128, device="cuda")
    compare(net, batch[:1], repeats=1)  # allocates what torch keeps after its first kernels
    torch.cuda.reset_peak_memory_stats()
    keeping = _peaks()
    first, again = (as_document(compare(net, batch, repeats=1)) for _ in range(2))
    fell = [name for name, peak in _peaks().items() if peak < keeping[name]]
    torch.cuda.memory._record_memory_history(max_entries=1000)
    recording = as_document(compare(net, batch, repeats=1))
    still_recording = torch._C._cuda_isHistoryEnabled()
    torch.cuda.memory._record_memory_history(enabled=None)
    allocated = torch.cuda.memory_allocated()
    reset = as_document(compare(net, batch, repeats=2, reset_peaks=True))
    left = torch.cuda.memory_allocated() - allocated
    refusal = refused(lambda: compare(net, batch, simulate=True))
    simulated = as_document(compare(net.cpu(), batch.cpu(), repeats=1, simulate=True))
    return {
        "first": first,
        "again": again,
        "recording": recording,
        "still_recording": still_recording,
        "reset": reset,
        "simulated": simulated,
        "fell": fell,
        "left": left,
        "refusal": refusal,
    }


def _peaks() -> dict[str, int]:
    return {name: value for name, value in torch.cuda.memory_stats().items() if name.endswith(".peak")}


def without_room() -> dict[str, Any]:
    """Compare on a device on which the step fits only with checkpoints."""
    net, batch = transformer().cuda(), torch.randn(256, 64, 128, device="cuda")
    needed = {row.every: row.peak_bytes for row in compare(net, batch, repeats=1, reset_peaks=True).rows}
    torch.cuda.empty_cache()
    room = torch.cuda.memory_reserved() + (needed[1] + needed[None]) // 2
    torch.cuda.set_per_process_memory_fraction(room / torch.cuda.mem_get_info()[1])
    try:
        allocated = torch.cuda.memory_allocated()
        result = as_document(compare(net, batch, repeats=1, reset_peaks=True))
        return {**result, "left": torch.cuda.memory_allocated() - allocated}
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)
