"""A small training that uses every tool of the package, in the order in which a job needs them.

    python examples/toolkit.py
    gpumem-exporter serve & python examples/toolkit.py   # then open http://127.0.0.1:9844

Trains a small model to continue sine waves, on the GPU if there is one. Without a GPU, the tools that need one log that
and do nothing else. Without an exporter nothing is reported.
"""

import argparse
import tempfile
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn.functional import mse_loss
from torch.utils.data import DataLoader

import gpumem_client as gpumem
import gpumem_toolkit as toolkit

PAST, FUTURE = 256, 64
"""Points of a wave: the model's input and its output."""


class Block(nn.Module):
    """A residual block."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.inner = nn.Sequential(
            nn.LayerNorm(width), nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)
        )

    def forward(self, hidden: Tensor) -> Tensor:
        return hidden + self.inner(hidden)


class Model(nn.Module):
    """Continues a wave."""

    def __init__(self, width: int, layers: int) -> None:
        super().__init__()
        self.inlet = nn.Linear(PAST, width)
        self.blocks = nn.Sequential(*(Block(width) for _ in range(layers)))
        self.outlet = nn.Linear(width, FUTURE)

    def forward(self, past: Tensor) -> Tensor:
        return self.outlet(self.blocks(self.inlet(past)))


class Job:
    """The options of the command line, and the device."""

    def __init__(self, arguments: argparse.Namespace) -> None:
        self.width, self.layers = arguments.width, arguments.layers
        self.samples, self.effective_batch = arguments.samples, arguments.effective_batch
        self.device = torch.device("cuda" if torch.cuda.is_available() else "cpu")

    def make_model(self) -> Model:
        return Model(self.width, self.layers)

    def make_optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        return torch.optim.AdamW(model.parameters(), lr=3e-4)

    def waves(self, batch: int) -> tuple[Tensor, Tensor]:
        """Return the pasts and futures of random waves."""
        phase = 6.28 * torch.rand(batch, 1, device=self.device)
        return torch.sin(phase + torch.arange(PAST + FUTURE, device=self.device) / 5).split((PAST, FUTURE), dim=1)

    def plan(self) -> toolkit.Plan:
        """Predict the memory before the first allocation."""
        gpu = f"{torch.cuda.get_device_properties(0).total_memory >> 20}MiB" if self.device.type == "cuda" else "24GiB"
        planned = toolkit.plan(
            self.make_model,
            f"float32[B,{PAST}]",
            gpu,
            targets=f"float32[B,{FUTURE}]",
            loss=mse_loss,
            target_effective_batch=self.effective_batch,
            changes=False,
        )
        peak = planned.reserved_peak_bytes / 2**20
        print(f"planned for {gpu}: {planned.accumulation} × {planned.batch} samples a step, {peak:.0f} MiB at the peak")
        return planned

    def try_batch_sizes(self, planned: toolkit.Plan) -> int:
        """Check the plan on the device with a temporary model, and return a batch size that fits."""
        model = self.make_model().to(self.device)
        optimizer = self.make_optimizer(model)

        def step(batch: int) -> None:
            optimizer.zero_grad(set_to_none=True)
            inputs, targets = self.waves(batch)
            mse_loss(model(inputs), targets).backward()
            optimizer.step()

        found = toolkit.find_batch_size(step, start=planned.batch, maximum=planned.batch, margin=0.0)
        print(found)
        toolkit.release_model(model, optimizer)
        return max(size for size in range(1, int(found) + 1) if self.effective_batch % size == 0)

    def train(self, model: nn.Module, optimizer: torch.optim.Optimizer, batch: int, epochs: int) -> list[Tensor]:
        """Train, and return the losses on the CPU."""
        accumulator = toolkit.GradientAccumulator(
            model, optimizer, effective_batch=self.effective_batch, micro_batch=batch, clip_norm=1.0
        )
        loader = DataLoader(range(self.samples), batch_size=batch)
        seen = toolkit.milestones(model, optimizer)  # logs the memory after the first steps and each epoch
        toolkit.watch(model, optimizer)  # exports parameters, gradients, optimizer state and the rest
        toolkit.leak_detector(on_leak=print)
        toolkit.auto_clean(fragmentation=0.3, min_bytes=1 << 30)  # between steps, if it frees enough
        losses = []

        @toolkit.oom_guard(batch_size=batch)  # explains an out-of-memory error
        def train_batch(inputs: Tensor, targets: Tensor) -> None:
            with gpumem.phase("forward"), accumulator.forward():
                loss = mse_loss(model(inputs), targets)
            with gpumem.phase("backward"):
                accumulator.backward(loss, samples=len(inputs))
            with gpumem.phase("optimizer"):
                accumulator.step()
            # The loss itself keeps its graph, and mse_loss returns it in a storage as large as all its terms.
            losses.append(loss.detach().clone())

        for epoch in seen.epochs(range(epochs)):
            for numbers in accumulator.batches(loader):
                train_batch(*self.waves(len(numbers)))
            gpumem.log_summary(f"epoch {epoch}")
        print(f"{accumulator.steps} steps of {self.effective_batch}, the last loss {losses[-1].item():.3f}")
        return toolkit.to_cpu(losses)


def main() -> None:
    parser = argparse.ArgumentParser(description="Train a small model with every tool of the package.")
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--samples", type=int, default=1000, help="in an epoch")
    parser.add_argument("--effective-batch", type=int, default=128)
    parser.add_argument("--width", type=int, default=256)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--folder", type=Path, help="for the checkpoint and the snapshot; default: a temporary folder")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        run(Job(arguments), arguments.epochs, arguments.folder or Path(temporary))


def run(job: Job, epochs: int, folder: Path) -> None:
    # Before the training: predict the memory and check the prediction.
    planned = job.plan()
    gpumem.start(workload="toolkit", plan=planned, clean=True)  # starts reporting, also the plan's error
    batch = job.try_batch_sizes(planned)
    gpumem.set_memory_fraction(0.95)  # leaves 5 % to other processes; needs CUDA
    gpumem.reset_peak()  # the plan is compared with the peak from here on

    # Train.
    with gpumem.memory_context("making the model"):
        model = job.make_model().to(job.device)
        optimizer = job.make_optimizer(model)
    job.train(model, optimizer, batch, epochs)
    print(gpumem.memory_summary())

    # Look for savings.
    inputs, targets = job.waves(batch)
    print(
        toolkit.compare_checkpointing(
            model,
            inputs,
            loss=lambda outputs: mse_loss(outputs, targets),
            repeats=2,
        )
    )
    print(toolkit.recommend_allocator_settings())
    print(toolkit.lingering_tensors(max_groups=5))
    gpumem.snapshot(folder / "memory.pickle")  # for https://pytorch.org/memory_viz

    # Save and use the model.
    print(toolkit.save_checkpoint(folder / "last.pt", model=model, optimizer=optimizer))
    with toolkit.inference_mode(model):
        print(f"loss in evaluation {mse_loss(model(inputs), targets).item():.3f}")
    print(toolkit.optimize_model(model, dtype=torch.bfloat16))

    # Release all memory.
    toolkit.release_model(model, optimizer)
    print(toolkit.deep_clean())
    gpumem.stop()


if __name__ == "__main__":
    main()
