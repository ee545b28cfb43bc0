"""The memory of a GPU, by its name or as a size."""

from __future__ import annotations

import re
from dataclasses import dataclass

from gpumem_client.wire.errors import ConfigurationError

MIB = 1 << 20

CONTEXT_BYTES = 512 * MIB
"""The CUDA context with its kernels (200 to 700 MB), without NCCL."""
DEFAULT_OVERHEAD_BYTES = CONTEXT_BYTES + 640 * MIB
"""The context, and what the driver reserves and does not attribute to a process: 499 MiB on an H100, 625 MiB on an L40S
and 634 MiB on an H200, with drivers 590 to 610 (nvidia_gpu_exporter's captures)."""

KNOWN_GPUS = {
    "t4": 15360,
    "v100-16gb": 16384,
    "v100-32gb": 32768,
    "rtx3090": 24576,
    "rtx4090": 24564,
    "rtx5090": 32607,
    "l4": 23034,
    "a10g": 23028,
    "a6000": 49140,
    "l40s": 46068,
    "a100-40gb": 40960,
    "a100-80gb": 81920,
    "h100-80gb": 81559,
    "h200": 143771,
}
"""Total MiB as the driver shows it. Boards and drivers differ by a few hundred MiB."""

_SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*([kmgt]?)(i?)(b?)", re.IGNORECASE)


@dataclass(frozen=True, slots=True)
class Gpu:
    """The device to plan for."""

    name: str
    total_bytes: int
    overhead_bytes: int = DEFAULT_OVERHEAD_BYTES
    """Memory that tensors cannot use: context, driver and other processes."""

    @property
    def free_bytes(self) -> int:
        """The memory for PyTorch's allocator."""
        return max(0, self.total_bytes - self.overhead_bytes)


def parse_gpu(text: str) -> Gpu:
    """Parse a name (`h100-80gb`) or a size (`80GiB`)."""
    name = re.sub(r"[\s_]+", "-", text.strip().lower())
    if name in KNOWN_GPUS:
        return Gpu(name, KNOWN_GPUS[name] * MIB)
    try:
        total_bytes = parse_bytes(text)
    except ConfigurationError as error:
        raise ConfigurationError(
            f"invalid GPU {text!r}: use its memory, such as 80GiB, or one of {', '.join(KNOWN_GPUS)}"
        ) from error
    return Gpu(text.strip(), total_bytes)


def smallest_gpu() -> Gpu:
    """Return the smallest GPU that CUDA shows to this process."""
    try:
        import torch

        # Initializes CUDA in the process of the command, but creates no context.
        devices = [torch.cuda.get_device_properties(index) for index in range(torch.cuda.device_count())]
    except (ImportError, RuntimeError) as error:
        raise ConfigurationError(
            f"give --gpu, such as --gpu 80GiB; this node's GPUs cannot be read: {error}"
        ) from error
    if not devices:
        raise ConfigurationError("give --gpu, such as --gpu 80GiB; this node has no GPU that PyTorch can use")
    smallest = min(devices, key=lambda device: device.total_memory)
    # CUDA's total, unlike NVML's, is without the driver's reserve.
    return Gpu(smallest.name, smallest.total_memory, CONTEXT_BYTES)


def parse_bytes(text: str) -> int:
    """Parse `80GiB`, `512MiB` or `24GB`; a number alone is bytes."""
    match = _SIZE.fullmatch(text.strip())
    if match is None or (match[3] and not match[2]):
        raise ConfigurationError(f"invalid size {text!r}: write 80GiB, 24GB or 1073741824")
    power = " kmgt".index(match[2].lower() or " ")
    return int(float(match[1]) * (1024 if match[3] else 1000) ** power)
