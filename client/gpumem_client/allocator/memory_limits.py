"""The limits of device memory that a scheduler sets in the environment of a container."""

from __future__ import annotations

import re
from collections.abc import Mapping

__all__ = ["environment_limit"]

_HAMI_VARIABLE = "CUDA_DEVICE_MEMORY_LIMIT"
"""For all devices; with `_0`, `_1` and so on for one device. Sizes such as `3000m`."""
_KAI_VARIABLE = "GPU_MEMORY_LIMIT"
"""Bytes on the device that a container shares."""
_UNITS = {"": 0, "k": 10, "m": 20, "g": 30}


def environment_limit(environ: Mapping[str, str], index: int) -> int | None:
    """Return the smallest limit that HAMi and KAI set for the device with this index in PyTorch; None if there is none.

    HAMi counts the devices of the container, of which CUDA_VISIBLE_DEVICES may select some.
    """
    visible = environ.get("CUDA_VISIBLE_DEVICES", "").split(",")
    in_container = visible[index].strip() if index < len(visible) and visible[index].strip().isdigit() else str(index)
    of_hami = environ.get(f"{_HAMI_VARIABLE}_{in_container}", environ.get(_HAMI_VARIABLE, ""))
    sizes = (_size(of_hami), _size(environ.get(_KAI_VARIABLE, "")))
    return min((size for size in sizes if size), default=None)


def _size(text: str) -> int | None:
    found = re.fullmatch(r"(\d+)([kmg]?)", text.strip().lower())
    return int(found[1]) << _UNITS[found[2]] if found else None
