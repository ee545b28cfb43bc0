"""The memory of a GPU, by its name or as a size."""

from __future__ import annotations

import re
from dataclasses import dataclass

from gpumem_client.wire.errors import ConfigurationError

__all__ = ["DEFAULT_OVERHEAD_BYTES", "KNOWN_GPUS", "Gpu", "parse_bytes", "parse_gpu"]

MIB = 1 << 20

DEFAULT_OVERHEAD_BYTES = 768 * MIB
"""The CUDA context with its kernels (200 to 700 MB) and the driver's reserve, without NCCL."""

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
    """The device to plan for.

    Attributes:
        name: the requested name, or the driver's.
        total_bytes: all memory of the device.
        overhead_bytes: memory that tensors cannot use: context, driver and other processes.
    """

    name: str
    total_bytes: int
    overhead_bytes: int = DEFAULT_OVERHEAD_BYTES

    @property
    def free_bytes(self) -> int:
        """The memory for PyTorch's allocator."""
        return max(0, self.total_bytes - self.overhead_bytes)


def parse_gpu(text: str, overhead_bytes: int | None = None) -> Gpu:
    """Parse a name (`h100-80gb`) or a size (`80GiB`).

    Raises:
        ConfigurationError: the text is neither; the message lists the names.
    """
    overhead = DEFAULT_OVERHEAD_BYTES if overhead_bytes is None else overhead_bytes
    name = re.sub(r"[\s_]+", "-", text.strip().lower())
    if name in KNOWN_GPUS:
        return Gpu(name, KNOWN_GPUS[name] * MIB, overhead)
    try:
        total_bytes = parse_bytes(text)
    except ConfigurationError as error:
        raise ConfigurationError(
            f"invalid GPU {text!r}: use its memory, such as 80GiB, or one of {', '.join(KNOWN_GPUS)}"
        ) from error
    return Gpu(text.strip(), total_bytes, overhead)


def parse_bytes(text: str) -> int:
    """Parse `80GiB`, `512MiB` or `24GB`; a number alone is bytes.

    Raises:
        ConfigurationError: the text is not a size.
    """
    match = _SIZE.fullmatch(text.strip())
    if match is None or (match[3] and not match[2]):
        raise ConfigurationError(f"invalid size {text!r}: write 80GiB, 24GB or 1073741824")
    power = " kmgt".index(match[2].lower() or " ")
    return int(float(match[1]) * (1024 if match[3] else 1000) ** power)
