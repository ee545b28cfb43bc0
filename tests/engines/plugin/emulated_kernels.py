"""A vLLM plugin for the emulated node, on which kernels do nothing.

vLLM loads it in each of its processes. Triton cannot compile or launch without a driver, so its kernels are skipped. A
CUDA `cumsum` returns zeros, because vLLM takes indices from it, and memory that no kernel has written is no index. The
functions of the CUDA runtime that vLLM calls by itself, such as `cudaMemcpy` for sleep mode, are the emulated ones.
"""

from __future__ import annotations

import ctypes
from typing import Any


def install() -> None:
    """Replace what cannot run on the emulated node."""
    import torch
    from triton.runtime.autotuner import Autotuner
    from triton.runtime.jit import JITFunction
    from vllm.distributed.device_communicators import cuda_wrapper

    # vLLM would use the file of libcudart that torch has loaded. The program itself has what it preloads.
    cuda_wrapper.find_loaded_library = lambda _: "the program"
    cuda_wrapper.CudaRTLibrary.path_to_library_cache["the program"] = ctypes.CDLL(None)

    def skipped(*_: Any, **__: Any) -> None:
        """Launch nothing."""

    JITFunction.run = skipped
    Autotuner.run = skipped
    cumsum = torch.cumsum

    def zeros_on_cuda(values: Any, *arguments: Any, **named: Any) -> Any:
        if not values.is_cuda:
            return cumsum(values, *arguments, **named)
        result = torch.zeros_like(values, dtype=named.get("dtype"))
        out = named.get("out")
        return result if out is None else out.copy_(result)

    torch.cumsum = zeros_on_cuda
