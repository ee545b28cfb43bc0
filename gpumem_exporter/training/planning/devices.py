"""How much memory a GPU has, by its name or as a size."""

from __future__ import annotations

import re
from dataclasses import dataclass

from gpumem_exporter.errors import ConfigurationError

__all__ = ["DEFAULT_OVERHEAD_BYTES", "KNOWN_GPUS", "Gpu", "parse_bytes", "parse_gpu"]

MIB = 1 << 20

DEFAULT_OVERHEAD_BYTES = 768 * MIB
"""What a process takes beside its tensors, and the driver for itself: the CUDA context with its kernels is 200 to
700 MB (PyTorch issues 28113 and 107667), what the driver reserves some hundred more. Communication libraries (NCCL)
are not in it."""

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
"""Totals in MiB as the driver shows them; boards and drivers differ by a few hundred."""

_SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*([kmgt]?)(i?)(b?)", re.IGNORECASE)


@dataclass(frozen=True, slots=True)
class Gpu:
    """The device that a job is planned for.

    Attributes:
        name: as asked for, or as the driver names it.
        total_bytes: all of its memory.
        overhead_bytes: what no tensor can have of it: context, driver, and whoever else is on it.
    """

    name: str
    total_bytes: int
    overhead_bytes: int = DEFAULT_OVERHEAD_BYTES

    @property
    def free_bytes(self) -> int:
        """What is there for PyTorch's allocator."""
        return max(0, self.total_bytes - self.overhead_bytes)


def parse_gpu(text: str, overhead_bytes: int | None = None) -> Gpu:
    """A device by name (`h100-80gb`) or size (`80GiB`).

    Raises:
        ConfigurationError: it is neither; lists the names.
    """
    overhead = DEFAULT_OVERHEAD_BYTES if overhead_bytes is None else overhead_bytes
    name = re.sub(r"[\s_]+", "-", text.strip().lower())
    if name in KNOWN_GPUS:
        return Gpu(name, KNOWN_GPUS[name] * MIB, overhead)
    try:
        total_bytes = parse_bytes(text)
    except ConfigurationError as error:
        raise ConfigurationError(
            f"no GPU {text!r}: give its memory, such as 80GiB, or one of {', '.join(KNOWN_GPUS)}"
        ) from error
    return Gpu(text.strip(), total_bytes, overhead)


def parse_bytes(text: str) -> int:
    """`80GiB`, `512MiB`, `24GB`; a number alone is bytes.

    Raises:
        ConfigurationError: it is no size.
    """
    match = _SIZE.fullmatch(text.strip())
    if match is None or (match[3] and not match[2]):
        raise ConfigurationError(f"{text!r} is no size; write one as 80GiB, 24GB or 1073741824")
    power = " kmgt".index(match[2].lower() or " ")
    return int(float(match[1]) * (1024 if match[3] else 1000) ** power)
