"""An engine that starts as vLLM does: its worker, in the module that the reporter looks at, with real torch."""

from __future__ import annotations

import sys
import types
from typing import Any

import torch

MIB = 1 << 20
MODULE = "vllm.v1.worker.gpu_worker"


class Worker:
    """The parts of vLLM's worker that measure memory. `wait` returns when the test lets the worker go on."""

    def __init__(self, wait: Any) -> None:
        self._wait = wait
        self.tensors: list[torch.Tensor] = []

    def init_device(self) -> None:
        """Look at the free memory of the device, before anything is loaded."""
        torch.cuda.init()
        self.initial_bytes, _ = torch.cuda.mem_get_info(0)

    def load_model(self) -> None:
        """Allocate all weights, then wait as if they were read."""
        self.tensors.append(torch.empty(256 * MIB, dtype=torch.uint8, device="cuda"))
        self._wait("loaded")

    def determine_available_memory(self) -> int:
        """Run once, and compare the free memory as vLLM does."""
        activations = torch.empty(64 * MIB, dtype=torch.uint8, device="cuda")
        del activations
        torch.cuda.empty_cache()
        free_bytes, _ = torch.cuda.mem_get_info(0)
        assert self.initial_bytes >= free_bytes, (
            f"Error in memory profiling. Initial free memory {self.initial_bytes / (1 << 30):.2f} GiB, "
            f"current free memory {free_bytes / (1 << 30):.2f} GiB."
        )
        self.available_kv_cache_memory_bytes = free_bytes // 2
        return self.available_kv_cache_memory_bytes

    def initialize_from_config(self) -> None:
        """Allocate the cache."""
        size = self.available_kv_cache_memory_bytes
        self.tensors.append(torch.empty(size, dtype=torch.uint8, device="cuda"))


def start(wait: Any) -> None:
    """Start an engine in this process."""
    module = types.ModuleType(MODULE)
    module.Worker = Worker  # type: ignore[attr-defined]
    sys.modules["vllm"] = types.ModuleType("vllm")
    sys.modules[MODULE] = module
    worker = module.worker = Worker(wait)  # type: ignore[attr-defined]
    worker.init_device()
    worker.load_model()
    worker.determine_available_memory()
    worker.initialize_from_config()
