"""Integrated GPUs, which have no memory of their own: the host's memory is theirs.

NVML answers NOT_SUPPORTED to the memory calls there, and has no call that says that a GPU is integrated; so does it for
some that are not (a GPU passed on to a virtual machine, for instance). A fallback is sound only where the product is
known, hence the names: Grace-Blackwell GB10 (DGX Spark) and the Jetson modules. `MemAvailable`, not `MemFree`, is what
CUDA can come to hold there: the page cache gives way to it (NVIDIA's own advice for DGX Spark).
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
    """Whether a GPU of this product name shares the host's memory."""
    return _INTEGRATED.search(name) is not None


def host_memory(meminfo: Path) -> DeviceMemory:
    """The host's memory as a device's: free is what is available.

    Args:
        meminfo: /proc/meminfo. In a container it still tells of the whole host.

    Raises:
        NvmlNotSupportedError: the kernel does not tell.
    """
    try:
        figures = {name: int(kib) * 1024 for name, kib in _LINE.findall(meminfo.read_text(encoding="ascii"))}
        total, available = figures["MemTotal"], figures["MemAvailable"]
    except (OSError, UnicodeDecodeError, KeyError) as error:
        raise NvmlNotSupportedError(f"{meminfo} does not tell the host's memory, which this GPU shares") from error
    return DeviceMemory(
        total_bytes=total, used_bytes=total - available, free_bytes=available, reserved_bytes=None, of_host=True
    )
