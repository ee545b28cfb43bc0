"""Training steps with and without checkpointing, on the CPU and on the emulated node.

The functions run in a process with torch.
"""

from __future__ import annotations

import contextlib
import random
import re
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
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


def selections(comparison: CheckpointingComparison) -> list[int | None]:
    """Return the selection of blocks of each row."""
    return [row.every for row in comparison.rows]


def peaks(comparison: CheckpointingComparison) -> list[int | None]:
    return [row.peak_bytes for row in comparison.rows]


def the_longest_list_of_blocks_of_one_class_is_recomputed_and_without_cuda_no_peak_is_known() -> None:
    net = Net()
    result = compare(net, torch.randn(8, 16), repeats=2)
    assert re.search(r"\b5 Block\b.*\bblocks\b", result.blocks)
    assert [(row.every, row.blocks) for row in result.rows] == [(None, 0), (4, 2), (2, 3), (1, 5)]
    # 17 forward passes: for each variant a warm-up, two timed runs and a comparison, and a second comparison for `none`
    assert [block.calls for block in net.blocks] == [17 + 12, 17 + 4, 17 + 8, 17 + 4, 17 + 12]
    assert {row.peak_bytes for row in result.rows} == {None}
    assert all(row.name in str(result) for row in result.rows)
    assert "CUDA" in str(result)
    assert result.same_results
    assert all(row.seconds > 0 for row in result.rows)


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


def a_comparison_changes_nothing(*, failing: bool) -> None:
    net = Net(misbehave=lambda x: x * random.random() * np.random.rand())
    own = net.blocks[1].forward
    net.blocks[1].forward = given = lambda x: own(x)  # set by other code; must remain
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

    with pytest.raises(RuntimeError, match="in the middle") if failing else contextlib.nullcontext():
        compare(net, batch, loss=loss, repeats=1)
    assert [one == other for one, other in zip(before, state_of(net), strict=True)] == [True] * len(before)
    assert net.blocks[1].forward is given
    assert batch.grad is None


def an_allocation_failure_of_a_library_counts_as_out_of_memory() -> None:
    def only_in_checkpoints(x: torch.Tensor) -> torch.Tensor:
        if torch._C._autograd._top_saved_tensors_default_hooks(True) is None:
            raise RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`")
        return x

    net = Net(misbehave=only_in_checkpoints)
    rows = compare(net, torch.randn(8, 16), repeats=1).rows
    assert [(row.every, row.out_of_memory) for row in rows] == [(None, True), (4, True), (2, True), (1, False)]


def results_that_differ_are_named() -> None:
    """Random numbers are drawn again, statistics are counted twice, and one model is never twice the same."""
    random.seed(2)
    batch, running = torch.randn(8, 16), np.random.default_rng(0)
    drawing = compare(Net(misbehave=lambda x: x * random.random()), batch, repeats=1)
    assert [bool(row.differs) for row in drawing.rows] == [False, True, True, True]
    assert "gradient" in str(drawing)
    blocks = nn.Sequential(*(nn.Sequential(nn.Linear(16, 16), nn.BatchNorm1d(16)) for _ in range(3)))
    norms = compare(blocks, batch, repeats=1)
    assert re.search(r"\b3 Sequential\b", norms.blocks)
    assert [bool(row.differs) for row in norms.rows] == [False, True, True]
    moved = norms.rows[2].differs
    assert {name.split()[0] for name in moved} == {"buffer"}, "gradients stay"
    assert {name.rsplit(".")[-1] for name in moved} == {"running_mean", "running_var", "num_batches_tracked"}
    assert "0.1.running_mean" in str(norms)
    noisy = compare(Net(misbehave=lambda x: x * float(running.random())), batch, repeats=1)
    assert "loss" in str(noisy)
    assert not any(each.same_results for each in (drawing, norms, noisy))


def blocks_selections_and_batches_can_be_chosen() -> None:
    net, batch = Net(), torch.randn(8, 16)
    given = compare(net, batch, blocks=[net.stem[0], net.blocks[0], net.head], repeats=1)
    assert selections(given) == [None, 2, 1]
    for arguments in (
        {"batch": {"x": batch}},
        {"batch": (batch,), "loss": lambda y: {"l": y.sum()}["l"]},
        {"batch": batch, "autocast": torch.bfloat16},
    ):
        chosen = compare(net.eval(), **arguments, repeats=1)
        assert not any(module.training for module in net.modules())
        assert selections(chosen) == [None, 4, 2, 1]
        assert chosen.same_results, str(chosen)


def errors_name_the_accepted_values() -> None:
    net, batch, hooked, frozen = Net(), torch.randn(8, 16), Net(), Net().requires_grad_(False)
    hooked.head.weight.register_post_accumulate_grad_hook(lambda _: None)

    @torch.inference_mode()
    def in_inference() -> None:
        compare(net, batch)

    for pattern, call in (
        (r"\bLinear\b.*blocks=\[", lambda: compare(nn.Linear(2, 2), batch)),
        (r"\bloss\b.*\(8, 3\)", lambda: compare(net, batch, loss=lambda output: output)),
        (r"\bloss\b.*\bparameter\b", lambda: compare(frozen, batch)),
        (r"\bhead\.weight\b.*\bhook\b", lambda: compare(hooked, batch)),
        (r"torch\.inference_mode", in_inference),
        (r"\bbatch\b.*\bdetached\b", lambda: compare(net, nn.Linear(16, 16)(batch))),
        (r"torch\.int8.*torch\.bfloat16.*torch\.float16", lambda: compare(net, batch, autocast=torch.int8)),
    ):
        with pytest.raises(ConfigurationError, match=pattern):
            call()


def transformer() -> nn.Module:
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(128, 4, 512, dropout=0.1, batch_first=True)
    return nn.TransformerEncoder(layer, 6, enable_nested_tensor=False)


def peaks_are_of_the_step_alone_and_fall_with_more_checkpoints() -> None:
    """Compare on a device that had a higher peak before."""
    net, batch = transformer().cuda(), torch.randn(8, 64, 128, device="cuda")
    compare(net, batch, repeats=1)  # allocates what torch keeps after its first kernels
    del [torch.empty(1 << 30, dtype=torch.uint8, device="cuda")][:]
    allocated = torch.cuda.memory_allocated()
    found = peaks(compare(net, batch, repeats=2))
    assert torch.cuda.memory_allocated() == allocated
    assert found == sorted(found, reverse=True)
    assert found[0] > found[-1] > 0
    torch.cuda.reset_peak_memory_stats()
    net.train()(batch).mean().backward()
    assert found[0] == torch.cuda.max_memory_allocated() - allocated


def a_variant_that_runs_out_of_memory_is_reported_and_the_others_are_measured() -> None:
    net, batch = transformer().cuda(), torch.randn(256, 64, 128, device="cuda")
    needed = {row.every: row.peak_bytes for row in compare(net, batch, repeats=1).rows}
    torch.cuda.empty_cache()
    room = torch.cuda.memory_reserved() + (needed[1] + needed[None]) // 2
    torch.cuda.set_per_process_memory_fraction(room / torch.cuda.mem_get_info()[1])
    try:
        allocated = torch.cuda.memory_allocated()
        result = compare(net, batch, repeats=1)
        assert torch.cuda.memory_allocated() == allocated, "the failed run has left nothing"
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)
    first, *_, last = result.rows
    assert (first.every, first.out_of_memory, first.seconds, first.peak_bytes) == (None, True, None, None)
    assert (last.every, last.out_of_memory) == (1, False)
    assert last.peak_bytes > 0
    assert "out of memory" in str(result)
