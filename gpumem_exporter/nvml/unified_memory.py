"""The memory of integrated GPUs, which use the host's memory.

NVML returns NOT_SUPPORTED for the memory of an integrated GPU, and also for some other GPUs (such as a GPU passed to a
virtual machine). NVML has no call that says that a GPU is integrated, so this module knows the product names:
Grace-Blackwell GB10 (DGX Spark) and the Jetson modules. CUDA can allocate `MemAvailable`, not only `MemFree`, because
the kernel shrinks the page cache; NVIDIA recommends this for DGX Spark.
"""

from __future__ import annotations

import re
from pathlib import Path

from gpumem_exporter.core.samples import DeviceMemory
from gpumem_exporter.errors import NvmlNotSupportedError

__all__ = ["host_memory", "is_integrated"]

_INTEGRATED = re.compile(r"\b(GB10|Thor|Orin|Xavier)\b", re.IGNORECASE)
_LINE = re.compile(r"^(MemTotal|MemAvailable): +(\d+) kB$", re.MULTILINE)


def is_integrated(name: str) -> bool:
    """Return whether a GPU with this product name uses the host's memory."""
    return _INTEGRATED.search(name) is not None


def host_memory(meminfo: Path) -> DeviceMemory:
    """Return the host's memory as the memory of a device; free is `MemAvailable`.

    Args:
        meminfo: the path of /proc/meminfo, which describes the whole host also in a container.

    Raises:
        NvmlNotSupportedError: the file cannot be read or lacks a value.
    """
    try:
        values = {name: int(kib) * 1024 for name, kib in _LINE.findall(meminfo.read_text(encoding="ascii"))}
        total, available = values["MemTotal"], values["MemAvailable"]
    except (OSError, UnicodeDecodeError, KeyError) as error:
        raise NvmlNotSupportedError(f"{meminfo} does not have the host's memory, which this GPU uses") from error
    return DeviceMemory(
        total_bytes=total, used_bytes=total - available, free_bytes=available, reserved_bytes=None, of_host=True
    )
