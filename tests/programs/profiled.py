"""Programs whose memory is profiled, for `TorchProcess.call_program` and `exec`."""

from __future__ import annotations

import gc
import random
import threading
import time
from typing import Any

import torch
from torch import nn

from gpumem_client.commands import profiling

RECORDING_SECONDS = 60.0


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.up = nn.Linear(width, 4 * width)
        self.down = nn.Linear(4 * width, width)
        self.register_buffer("scale", torch.ones(width))

    def forward(self, x: Any) -> Any:
        return x + self.down(torch.relu(self.up(x))) * self.scale


class Net(nn.Module):
    def __init__(self, width: int = 256, layers: int = 3) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Block(width) for _ in range(layers))

    def forward(self, x: Any) -> Any:
        for layer in self.layers:
            x = layer(x)
        return x


class Training:
    """A training loop with a leak: it keeps each loss, with the graph behind it."""

    def __init__(self, device: str = "cuda:0") -> None:
        self.device = device
        self.model = Net().to(device)
        self.optimizer = torch.optim.Adam(self.model.parameters())
        self.losses: list[Any] = []

    def step(self) -> None:
        self.optimizer.zero_grad()
        loss = self.model(torch.randn(4096, 256, device=self.device)).pow(2).mean()
        loss.backward()
        self.optimizer.step()
        self.losses.append(loss)


def wait_for_recording(on: bool = True) -> None:
    """Wait until the allocator's history is recorded, or not."""
    end = time.monotonic() + RECORDING_SECONDS
    while torch._C._cuda_isHistoryEnabled() is not on:
        assert time.monotonic() < end
        time.sleep(0.002)


def recorded(work: Any) -> list[int]:
    """Do the work while a recording is on, end it, and return the peak of each device."""
    profiling._CHECK_SECONDS_MAX = 0.1
    wait_for_recording()
    _end_recordings_after(10**9)
    for index in range(torch.cuda.device_count()):
        torch.cuda.reset_peak_memory_stats(index)
    work()
    peaks = [torch.cuda.max_memory_allocated(index) for index in range(torch.cuda.device_count())]
    _end_recordings_after(-1)
    wait_for_recording(False)
    return peaks


def _end_recordings_after(entries: int) -> None:
    for each in gc.get_objects():
        if type(each) is profiling.Recording:
            each._entries_enough = entries


class Heap:
    """Random blocks of two devices, several streams and a pool."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.streams = [torch.cuda.Stream() for _ in range(3)]
        self.pool = torch.cuda.MemPool()
        self.kept: list[Any] = []

    def churn(self, changes: int) -> None:
        for _ in range(changes):
            if self.kept and (self.random.random() < 0.48 or sum(map(len, self.kept)) > 1_000_000_000):
                dropped = self.kept.pop(self.random.randrange(len(self.kept)))
                if self.random.random() < 0.2:
                    dropped.record_stream(self.streams[2])
            else:
                self.kept.append(self.allocate())
            if self.random.random() < 0.005:
                torch.cuda.empty_cache()

    def allocate(self) -> Any:
        size = self.random.randrange(1, 30 << 20 if self.random.random() < 0.5 else 1 << 20)
        kind = self.random.randrange(4)
        if kind == 0:
            return torch.empty(size, dtype=torch.uint8, device="cuda:1")
        if kind == 1:
            with torch.cuda.use_mem_pool(self.pool):
                return torch.empty(size, dtype=torch.uint8, device="cuda:0")
        with torch.cuda.stream(self.random.choice(self.streams)):
            return torch.empty(size, dtype=torch.uint8, device="cuda:0")

    def replace_half(self) -> None:
        self.kept = self.kept[::2]
        self.churn(700)


def run_out_of_memory(keep: list[Any]) -> None:
    """Fill the device in a function, whose tensors the error frees."""
    keep.append(torch.empty(700_000_000, dtype=torch.uint8, device="cuda"))
    filling = []
    while True:
        filling.append(torch.empty(random.Random(len(filling)).randrange(90 << 20, 130 << 20), device="cuda"))


class Loop:
    """Calls a function again and again in a thread, until `stop`."""

    def __init__(self, function: Any) -> None:
        self._function = function
        self._running = True
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def _run(self) -> None:
        while self._running:
            self._function()

    def stop(self) -> None:
        self._running = False
        self._thread.join()
