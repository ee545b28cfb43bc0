"""The training jobs that `benchmarks.planner` plans and then runs: models, and an ordinary training loop for them.

    python -m benchmarks.planner_jobs JOB BATCH STEPS      # runs one on cuda:0 and prints its peaks as JSON

The training loop is an ordinary one and independent of the planner's. cuDNN is off, because the emulated
node does not have it; on a real GPU `--cudnn` leaves it on.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.checkpoint import checkpoint


class Mlp(nn.Module):
    def __init__(self, width: int = 2048, depth: int = 6) -> None:
        super().__init__()
        self.body = nn.Sequential(*(nn.Sequential(nn.Linear(width, width), nn.GELU()) for _ in range(depth)))
        self.head = nn.Linear(width, 1000)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.body(x))


class Residual(nn.Module):
    def __init__(self, inner: int, outer: int, stride: int) -> None:
        super().__init__()
        self.a = nn.Conv2d(inner, outer, 3, stride, 1, bias=False)
        self.b = nn.Conv2d(outer, outer, 3, 1, 1, bias=False)
        self.na, self.nb = nn.BatchNorm2d(outer), nn.BatchNorm2d(outer)
        self.short = nn.Conv2d(inner, outer, 1, stride, bias=False) if (inner, 1) != (outer, stride) else nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        y = functional.relu(self.na(self.a(x)))
        return functional.relu(self.nb(self.b(y)) + self.short(x))


class Cnn(nn.Module):
    def __init__(self, checkpointing: bool = False) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(3, 64, 7, 2, 3), nn.BatchNorm2d(64), nn.ReLU(inplace=True), nn.MaxPool2d(2))
        widths = [(64, 64, 1), (64, 64, 1), (64, 128, 2), (128, 128, 1), (128, 256, 2), (256, 256, 1), (256, 512, 2)]
        self.blocks = nn.ModuleList(Residual(*width) for width in widths)
        self.head = nn.Linear(512, 1000)
        self.checkpointing = checkpointing

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False) if self.checkpointing else block(x)
        return self.head(functional.adaptive_avg_pool2d(x, 1).flatten(1))


class Block(nn.Module):
    def __init__(self, width: int, heads: int, dropout: float, causal: bool) -> None:
        super().__init__()
        self.n1, self.n2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.drop = nn.Dropout(dropout)
        self.heads, self.dropout, self.causal = heads, dropout, causal

    def forward(self, x: Tensor) -> Tensor:
        b, s, w = x.shape
        q, k, v = self.qkv(self.n1(x)).view(b, s, 3, self.heads, w // self.heads).permute(2, 0, 3, 1, 4).unbind(0)
        a = functional.scaled_dot_product_attention(
            q, k, v, dropout_p=self.dropout if self.training else 0.0, is_causal=self.causal
        )
        x = x + self.drop(self.out(a.transpose(1, 2).reshape(b, s, w)))
        return x + self.drop(self.down(functional.gelu(self.up(self.n2(x)))))


class Transformer(nn.Module):
    def __init__(
        self,
        *,
        width: int = 768,
        heads: int = 12,
        depth: int = 6,
        vocabulary: int = 8192,
        length: int = 512,
        dropout: float = 0.0,
        checkpointing: bool = False,
        causal: bool = True,
    ) -> None:
        super().__init__()
        # Frozen, because an embedding's backward reads values from the device, which the emulated node does not
        # compute.
        self.tokens = nn.Embedding(vocabulary, width).requires_grad_(False)
        self.positions = nn.Parameter(torch.zeros(length, width))
        self.blocks = nn.ModuleList(Block(width, heads, dropout, causal) for _ in range(depth))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, vocabulary, bias=False)
        self.checkpointing = checkpointing

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.tokens(tokens) + self.positions
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False) if self.checkpointing else block(x)
        return self.head(self.norm(x)).flatten(0, 1)


class Encoder(nn.Module):
    def __init__(self, width: int = 512, depth: int = 4) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(width, 8, 4 * width, dropout=0.1, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, depth)
        self.head = nn.Linear(width, 1000)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.encoder(x).mean(1))


class UNet(nn.Module):
    def __init__(self, width: int = 48) -> None:
        super().__init__()
        self.first = self.double(3, width)
        self.down = nn.ModuleList(self.double(width << i, width << (i + 1)) for i in range(3))
        self.up = nn.ModuleList(self.double(3 * width << i, width << i) for i in reversed(range(3)))
        self.last = nn.Conv2d(width, 3, 1)

    @staticmethod
    def double(inner: int, outer: int) -> nn.Module:
        parts = [nn.Conv2d(inner, outer, 3, padding=1), nn.GroupNorm(8, outer), nn.SiLU()]
        return nn.Sequential(*parts, nn.Conv2d(outer, outer, 3, padding=1), nn.GroupNorm(8, outer), nn.SiLU())

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        kept = []
        for part in self.down:
            kept.append(x)
            x = part(functional.max_pool2d(x, 2))
        for part in self.up:
            x = part(torch.cat([functional.interpolate(x, scale_factor=2, mode="nearest"), kept.pop()], 1))
        return self.last(x)


class Gated(nn.Module):
    """RMS norm, rotary positions, grouped queries, a gated feed-forward part."""

    def __init__(self, width: int = 640, heads: int = 8, groups: int = 2, depth: int = 5) -> None:
        super().__init__()
        size = width // heads
        self.blocks = nn.ModuleList(
            nn.ModuleDict(
                {
                    "n1": nn.RMSNorm(width),
                    "q": nn.Linear(width, width, bias=False),
                    "kv": nn.Linear(width, 2 * groups * size, bias=False),
                    "o": nn.Linear(width, width, bias=False),
                    "n2": nn.RMSNorm(width),
                    "gate": nn.Linear(width, 1728, bias=False),
                    "up": nn.Linear(width, 1728, bias=False),
                    "down": nn.Linear(1728, width, bias=False),
                }
            )
            for _ in range(depth)
        )
        self.head = nn.Linear(width, 1000)
        self.heads, self.groups, self.size = heads, groups, size
        self.register_buffer("angles", torch.zeros(300, size // 2), persistent=False)

    def turn(self, x: Tensor) -> Tensor:
        a, b = x.chunk(2, -1)
        cos, sin = self.angles.cos(), self.angles.sin()
        return torch.cat([a * cos - b * sin, a * sin + b * cos], -1).type_as(x)

    def forward(self, x: Tensor) -> Tensor:
        b, s, w = x.shape
        for block in self.blocks:
            y = block["n1"](x)
            q = self.turn(block["q"](y).view(b, s, self.heads, self.size).transpose(1, 2))
            k, v = block["kv"](y).view(b, s, 2 * self.groups, self.size).transpose(1, 2).chunk(2, 1)
            k, v = (t.repeat_interleave(self.heads // self.groups, 1) for t in (self.turn(k), v))
            a = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
            x = x + block["o"](a.transpose(1, 2).reshape(b, s, w))
            y = block["n2"](x)
            x = x + block["down"](functional.silu(block["gate"](y)) * block["up"](y))
        return self.head(x.mean(1))


VECTORS, IMAGES, TOKENS, SEQUENCES = "float32[B,2048]", "float32[B,3,128,128]", "int64[B,512]", "float32[B,256,512]"
PICTURES, ODD = "float32[B,3,96,96]", "float32[B,300,640]"
CLASSES, NEXT_TOKENS = "int64[B]", "int64[B*512]"


@dataclass(frozen=True)
class Job:
    """One configuration, in the terms of `gpumem-exporter plan`."""

    model: Callable[..., nn.Module]
    input: str
    target: str
    optimizer: str
    batch: int
    arguments: dict[str, Any] = field(default_factory=dict)
    options: dict[str, Any] = field(default_factory=dict)
    precision: str = "fp32"
    attention: str = "auto"
    accumulation: int = 1

    def make(self) -> nn.Module:
        return self.model(**self.arguments)


JOBS: dict[str, Job] = {
    "mlp-sgd-fp32": Job(Mlp, VECTORS, CLASSES, "sgd", 4096),
    "mlp-adam-fp32": Job(Mlp, VECTORS, CLASSES, "adam", 4096),
    "mlp-adamw-fused-bf16": Job(Mlp, VECTORS, CLASSES, "adamw", 8192, options={"fused": True}, precision="bf16"),
    "cnn-sgd-momentum-fp32": Job(Cnn, IMAGES, CLASSES, "sgd", 64, options={"momentum": 0.9}),
    "cnn-adamw-bf16": Job(Cnn, IMAGES, CLASSES, "adamw", 64, precision="bf16"),
    "cnn-adam-checkpointing-fp32": Job(Cnn, IMAGES, CLASSES, "adam", 96, {"checkpointing": True}),
    "transformer-math-adam-fp32": Job(Transformer, TOKENS, NEXT_TOKENS, "adam", 8, attention="math"),
    "transformer-math-adamw-bf16": Job(
        Transformer, TOKENS, NEXT_TOKENS, "adamw", 8, {"dropout": 0.1}, precision="bf16", attention="math"
    ),
    "transformer-efficient-adamw-fp32": Job(Transformer, TOKENS, NEXT_TOKENS, "adamw", 16, attention="efficient"),
    "transformer-efficient-accumulation-bf16": Job(
        Transformer, TOKENS, NEXT_TOKENS, "adamw", 16, precision="bf16", attention="efficient", accumulation=4
    ),
    "transformer-flash-adamw-fused-bf16": Job(
        Transformer, TOKENS, NEXT_TOKENS, "adamw", 16, {}, {"fused": True}, precision="bf16", attention="flash"
    ),
    "transformer-flash-checkpointing-bf16": Job(
        Transformer,
        TOKENS,
        NEXT_TOKENS,
        "adamw",
        32,
        {"checkpointing": True, "dropout": 0.1},
        precision="bf16",
        attention="flash",
    ),
    "encoder-auto-sgd-bf16": Job(Encoder, SEQUENCES, CLASSES, "sgd", 64, precision="bf16"),
    "encoder-auto-adam-one-by-one-fp32": Job(Encoder, SEQUENCES, CLASSES, "adam", 32, options={"foreach": False}),
    # The planner's rules for kernels were not fitted to the jobs below.
    "unet-adamw-bf16": Job(UNet, PICTURES, PICTURES, "adamw", 12, precision="bf16"),
    "gated-head80-flash-adamw-bf16": Job(Gated, ODD, CLASSES, "adamw", 24, precision="bf16", attention="flash"),
    "gated-math-rmsprop-fp32": Job(Gated, ODD, CLASSES, "rmsprop", 10, attention="math"),
    "mlp-nadam-odd-sizes-fp32": Job(Mlp, VECTORS[:-5] + "1531]", CLASSES, "nadam", 777, {"width": 1531, "depth": 9}),
    "transformer-auto-fp16-scaler": Job(Transformer, TOKENS, NEXT_TOKENS, "adamw", 16, precision="fp16"),
}

OPTIMIZERS: dict[str, Any] = {
    "sgd": torch.optim.SGD,
    "adam": torch.optim.Adam,
    "adamw": torch.optim.AdamW,
    "nadam": torch.optim.NAdam,
    "rmsprop": torch.optim.RMSprop,
}
BACKENDS = {
    "math": SDPBackend.MATH,
    "efficient": SDPBackend.EFFICIENT_ATTENTION,
    "flash": SDPBackend.FLASH_ATTENTION,
}


def make_batch(job: Job, batch: int, device: str) -> tuple[Tensor, Tensor]:
    """Return a batch as a loader does: created on the host and copied to the device."""
    x, y = (make_tensor(text, batch) for text in (job.input, job.target))
    return x.to(device), y.to(device)


def make_tensor(text: str, batch: int) -> Tensor:
    dtype, shape = text.rstrip("]").split("[")
    sizes = [
        batch * int(part.removeprefix("B").removeprefix("*") or 1) if "B" in part else int(part)
        for part in shape.split(",")
    ]
    return torch.zeros(sizes, dtype=getattr(torch, dtype))


def train(job: Job, batch: int, steps: int, device: str = "cuda") -> None:
    """The training script."""
    model = job.make().to(device)
    optimizer = OPTIMIZERS[job.optimizer](model.parameters(), lr=1e-4, **job.options)
    dtype = {"bf16": torch.bfloat16, "fp16": torch.float16}.get(job.precision)
    scaler = torch.amp.GradScaler(device, enabled=job.precision == "fp16")
    kernels = sdpa_kernel(BACKENDS[job.attention]) if job.attention in BACKENDS else nullcontext()
    with kernels:
        for _ in range(steps):
            for _ in range(job.accumulation):
                x, y = make_batch(job, batch, device)
                with torch.autocast(device, dtype=dtype, enabled=dtype is not None):
                    loss = (functional.mse_loss if y.is_floating_point() else functional.cross_entropy)(model(x), y)
                    loss = loss / job.accumulation
                scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()


def main() -> None:
    made = argparse.ArgumentParser(description=__doc__)
    made.add_argument("job", choices=JOBS)
    made.add_argument("batch", type=int)
    made.add_argument("steps", type=int)
    made.add_argument("--cudnn", action="store_true")
    made.add_argument("--limit", type=int, help="bytes that the allocator may reserve")
    options = made.parse_args()
    torch.backends.cudnn.enabled = options.cudnn
    torch.backends.cuda.enable_cudnn_sdp(options.cudnn)
    if options.limit:
        total = torch.cuda.get_device_properties(0).total_memory
        torch.cuda.set_per_process_memory_fraction(min(1.0, options.limit / total))
    document: dict[str, Any] = {"oom": False}
    try:
        train(JOBS[options.job], options.batch, options.steps)
    except torch.OutOfMemoryError as error:
        document = {"oom": True, "message": str(error)}
    stats = torch.cuda.memory_stats(0)
    document["allocated_peak_bytes"] = stats["allocated_bytes.all.peak"]
    document["reserved_peak_bytes"] = stats["reserved_bytes.all.peak"]
    document["retries"] = stats["num_alloc_retries"]
    print(json.dumps(document))


if __name__ == "__main__":
    main()
