"""A small training that uses every tool of the package, in the order in which a job meets them.

    python examples/toolkit.py
    gpumem-exporter serve & python examples/toolkit.py   # and look at http://127.0.0.1:9844

It trains a small model to go on with sine waves, on the GPU where there is one. Without a GPU the tools that are about
one say so and do nothing else; without an exporter nothing is reported.
"""

import argparse
import tempfile
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn.functional import mse_loss
from torch.utils.data import DataLoader

from gpumem_exporter import client as gpumem
from gpumem_exporter import training

PAST, FUTURE = 256, 64
"""Points of a wave: what the model is given, and what it is to say."""


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
    """Goes on with a wave."""

    def __init__(self, width: int, layers: int) -> None:
        super().__init__()
        self.inlet = nn.Linear(PAST, width)
        self.blocks = nn.Sequential(*(Block(width) for _ in range(layers)))
        self.outlet = nn.Linear(width, FUTURE)

    def forward(self, past: Tensor) -> Tensor:
        return self.outlet(self.blocks(self.inlet(past)))


class Job:
    """What the command line asks for, and where it runs."""

    def __init__(self, arguments: argparse.Namespace) -> None:
        self.width, self.layers = arguments.width, arguments.layers
        self.samples, self.effective_batch = arguments.samples, arguments.effective_batch
        self.device = torch.device("cuda" if torch.cuda.is_available() else "cpu")

    def make_model(self) -> Model:
        return Model(self.width, self.layers)

    def make_optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        return torch.optim.AdamW(model.parameters(), lr=3e-4)

    def waves(self, batch: int) -> tuple[Tensor, Tensor]:
        """Their pasts and futures."""
        begin = 6.28 * torch.rand(batch, 1, device=self.device)
        return torch.sin(begin + torch.arange(PAST + FUTURE, device=self.device) / 5).split((PAST, FUTURE), dim=1)

    def plan(self) -> training.Plan:
        """What it will take, before any of it is there."""
        gpu = f"{torch.cuda.get_device_properties(0).total_memory >> 20}MiB" if self.device.type == "cuda" else "24GiB"
        planned = training.plan(
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

    def try_batch_sizes(self, planned: training.Plan) -> int:
        """The plan against the device: a size that has been trained with, on a model that is thrown away again."""
        model = self.make_model().to(self.device)
        optimizer = self.make_optimizer(model)

        def step(batch: int) -> None:
            optimizer.zero_grad(set_to_none=True)
            inputs, targets = self.waves(batch)
            mse_loss(model(inputs), targets).backward()
            optimizer.step()

        found = training.find_batch_size(step, start=planned.batch, maximum=planned.batch, margin=0.0)
        print(found)
        gpumem.release_model(model, optimizer)
        return max(size for size in range(1, int(found) + 1) if self.effective_batch % size == 0)

    def train(self, model: nn.Module, optimizer: torch.optim.Optimizer, batch: int, epochs: int) -> list[Tensor]:
        """Train, and return the losses, in the host's memory."""
        # The effective batch is made of batches that fit; the plan's divide it.
        accumulator = training.GradientAccumulator(
            model, optimizer, effective_batch=self.effective_batch, micro_batch=batch, clip_norm=1.0
        )
        loader = DataLoader(range(self.samples), batch_size=batch)
        seen = gpumem.milestones(model, optimizer)  # logs the memory at the first steps and at each epoch
        gpumem.watch(model, optimizer)  # parameters, gradients, optimizer state and the rest, on /metrics
        gpumem.leak_detector(on_leak=print)
        gpumem.auto_clean(fragmentation=0.3, min_bytes=1 << 30)  # between steps, where it is worth it
        losses = []

        @gpumem.oom_guard(batch_size=batch)  # an error says why, and what would help by how many bytes
        def train_batch(inputs: Tensor, targets: Tensor) -> None:
            with gpumem.phase("forward"), accumulator.forward():
                loss = mse_loss(model(inputs), targets)
            with gpumem.phase("backward"):
                accumulator.backward(loss, samples=len(inputs))
            with gpumem.phase("optimizer"):
                accumulator.step()
            # Not the loss itself, which keeps its graph; and mse_loss leaves it in a storage as large as all its terms.
            losses.append(loss.detach().clone())

        for epoch in seen.epochs(range(epochs)):
            for numbers in accumulator.batches(loader):
                train_batch(*self.waves(len(numbers)))
            gpumem.log_summary(f"epoch {epoch}")
        print(f"{accumulator.steps} steps of {self.effective_batch}, the last loss {losses[-1].item():.3f}")
        return gpumem.to_cpu(losses)


def main() -> None:
    parser = argparse.ArgumentParser(description="Train a small model with every tool of the package.")
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--samples", type=int, default=1000, help="in an epoch")
    parser.add_argument("--effective-batch", type=int, default=128)
    parser.add_argument("--width", type=int, default=256)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--folder", type=Path, help="for the checkpoint and the snapshot; without: they are not kept")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        run(Job(arguments), arguments.epochs, arguments.folder or Path(temporary))


def run(job: Job, epochs: int, folder: Path) -> None:
    # Before: what will it take, and does it?
    planned = job.plan()
    gpumem.start(workload="toolkit", plan=planned, clean=True)  # reports from here on, the plan's error too
    batch = job.try_batch_sizes(planned)
    gpumem.set_memory_fraction(0.95)  # the rest is left to others; where CUDA has not begun, this does nothing
    gpumem.reset_peak()  # ours to reset: what follows is compared with the plan

    # The training itself.
    with gpumem.memory_context("making the model"):
        model = job.make_model().to(job.device)
        optimizer = job.make_optimizer(model)
    job.train(model, optimizer, batch, epochs)
    print(gpumem.summary())

    # What else could be done?
    inputs, targets = job.waves(batch)
    print(
        training.compare_checkpointing(
            model,
            inputs,
            loss=lambda outputs: mse_loss(outputs, targets),
            repeats=2,
            reset_peaks=job.device.type == "cuda",
            simulate=job.device.type == "cpu",
        )
    )
    print(gpumem.recommend_allocator_settings())
    print(gpumem.lingering_tensors(max_groups=5))
    gpumem.snapshot(folder / "memory.pickle")  # for https://pytorch.org/memory_viz

    # The result.
    print(training.save_checkpoint(folder / "last.pt", model=model, optimizer=optimizer))
    with training.inference_mode(model):
        print(f"loss in evaluation {mse_loss(model(inputs), targets).item():.3f}")
    print(training.optimize_model(model, dtype=torch.bfloat16, example=inputs))

    # And everything back.
    gpumem.release_model(model, optimizer)
    print(gpumem.deep_clean())
    gpumem.stop()


if __name__ == "__main__":
    main()
