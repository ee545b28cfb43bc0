"""A PyTorch program that runs commands of a test: one JSON request per line on stdin, one JSON answer per line.

`torch_process.TorchProcess` starts it. It describes itself in answer 0 after the import of torch. Answers go to the
original stdout; all other output of the program and its libraries goes to stderr. A request is
`{"id", "command", "arguments"}`, an answer `{"id", "value"}` or `{"id", "error": {"type", "message", "traceback"}}`.
"""

from __future__ import annotations

import contextlib
import faulthandler
import json
import os
import random
import signal
import sys
import threading
import traceback
from collections.abc import Callable
from typing import Any

import torch


def set_allocator_settings(settings: str) -> None:
    """Change the allocator's settings. The function of torch has this name since 2.10."""
    change = getattr(torch._C, "_accelerator_setAllocatorSettings", None)
    (change or getattr(torch._C, "_cuda_cudaCachingAllocator_set_allocator_settings"))(settings)  # noqa: B009 - the newest torch has no such name


class Worker:
    """The commands. Tensors have numbers, so that a test can free them one by one."""

    def __init__(self) -> None:
        self.tensors: dict[int, torch.Tensor] = {}
        self.next_number = 1
        self.namespace: dict[str, Any] = {"torch": torch, "worker": self}

    # The process

    def hello(self) -> dict[str, Any]:
        """Describe the process."""
        return {"pid": os.getpid(), "torch": torch.__version__, "python": sys.version}

    def exec(self, code: str, **variables: Any) -> Any:
        """Run Python code in a permanent namespace and return the value of `result`."""
        self.namespace.pop("result", None)
        self.namespace.update(variables)
        exec(compile(code, "<from the test>", "exec"), self.namespace)
        return self.namespace.get("result")

    # The allocator

    def set_allocator_settings(self, settings: str) -> None:
        """Change the allocator's settings."""
        set_allocator_settings(settings)

    def alloc(self, nbytes: int, device: int = 0) -> int:
        """Allocate a tensor and return its number."""
        number = self.next_number
        self.tensors[number] = torch.empty(nbytes, dtype=torch.uint8, device=f"cuda:{device}")
        self.next_number += 1
        return number

    def free(self, numbers: list[int] | None = None) -> int:
        """Free tensors (None: all) and return their count."""
        chosen = list(self.tensors) if numbers is None else numbers
        for number in chosen:
            del self.tensors[number]
        return len(chosen)

    def random_heap(
        self, device: int = 0, seed: int = 0, blocks: int = 100, largest_bytes: int = 32 << 20, keep: float = 0.5
    ) -> list[int]:
        """Allocate blocks of random small and large sizes, free some, and return the numbers of the others."""
        rng = random.Random(seed)
        numbers = [self.alloc(self._size(rng, largest_bytes), device) for _ in range(blocks)]
        kept = [number for number in numbers if rng.random() < keep]
        self.free([number for number in numbers if number not in set(kept)])
        return kept

    def start_churn(self, devices: list[int], seed: int = 0, largest_bytes: int = 64 << 20, held: int = 40) -> None:
        """Allocate and free at random in a thread, until the process ends."""
        threading.Thread(
            target=self._churn, args=(random.Random(seed), devices, largest_bytes, held), daemon=True
        ).start()

    @staticmethod
    def _size(rng: random.Random, largest_bytes: int) -> int:
        return int(512 * (largest_bytes / 512) ** rng.random())

    def _churn(self, rng: random.Random, devices: list[int], largest_bytes: int, held: int) -> None:
        mine: list[torch.Tensor] = []
        while True:
            if mine and rng.random() < len(mine) / (2 * held):
                mine.pop(rng.randrange(len(mine)))
                continue
            with contextlib.suppress(torch.OutOfMemoryError):
                device = f"cuda:{rng.choice(devices)}"
                mine.append(torch.empty(self._size(rng, largest_bytes), dtype=torch.uint8, device=device))

    def empty_cache(self) -> None:
        """Call `torch.cuda.empty_cache`."""
        torch.cuda.empty_cache()

    def stats(self, device: int = 0) -> dict[str, int]:
        """Return `torch.cuda.memory_stats`; empty before CUDA is initialized."""
        return dict(torch.cuda.memory_stats(device))

    def reset_peak(self, device: int = 0) -> None:
        """Set the peaks to the current values."""
        torch.cuda.reset_peak_memory_stats(device)

    def snapshot(self) -> list[dict[str, Any]]:
        """Return `torch.cuda.memory_snapshot`: every segment with its blocks."""
        return torch.cuda.memory_snapshot()

    def mem_get_info(self, device: int = 0) -> dict[str, int]:
        """Return the driver's free and total bytes; creates a context on the device."""
        free, total = torch.cuda.mem_get_info(device)
        return {"free": free, "total": total}

    def contexts(self) -> list[int]:
        """Return the devices on which this process has a primary context."""
        return [i for i in range(torch.cuda.device_count()) if torch._C._cuda_hasPrimaryContext(i)]

    def uuids(self) -> list[str]:
        """Return the UUIDs of the visible devices in NVML's format for GPUs."""
        return ["GPU-" + str(torch.cuda.get_device_properties(i).uuid) for i in range(torch.cuda.device_count())]

    # The client

    def start_client(self, **arguments: Any) -> None:
        """Call `gpumem_client.start(...)`."""
        import gpumem_client as client

        client.start(**arguments)

    def stop_client(self) -> None:
        """Call `gpumem_client.stop()`."""
        import gpumem_client as client

        client.stop()

    def client_step(self) -> None:
        """Call `gpumem_client.step()`."""
        import gpumem_client as client

        client.step()


def answer(worker: Worker, line: str) -> dict[str, Any]:
    """Run the request of one line."""
    request = json.loads(line)
    try:
        command: Callable[..., Any] = getattr(worker, request["command"])
        return {"id": request["id"], "value": command(**request["arguments"])}
    except BaseException as error:  # noqa: BLE001 - the test gets every error
        value = {"type": type(error).__name__, "message": str(error), "traceback": traceback.format_exc()}
        return {"id": request["id"], "error": value}


def main() -> None:
    """Run requests until stdin ends."""
    faulthandler.register(signal.SIGUSR2, all_threads=True)
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    worker = Worker()

    def write(value: dict[str, Any]) -> None:
        answers.write(json.dumps(value, default=str) + "\n")
        answers.flush()

    write({"id": 0, "value": worker.hello()})
    for line in sys.stdin:
        write(answer(worker, line))


if __name__ == "__main__":
    main()
