"""What the environment says to PyTorch's CUDA allocator: its settings, and the limits of a scheduler.

PyTorch rejects an unknown name or an invalid value when it initializes CUDA, perhaps after minutes of loading. So the
client checks names and switches before the program starts. Source: c10's AllocatorConfig and CUDAAllocatorConfig up to
2.15; older releases know fewer.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping

from gpumem_client.wire.errors import ConfigurationError

VARIABLES = ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF")
"""PyTorch reads the first one that is set, even if it is empty. The second is read for CUDA from 2.10 on."""


_SWITCHES = (
    *("expandable_segments", "graph_capture_record_stream_reuse", "pinned_free_catch_all"),
    *("pinned_use_background_threads", "pinned_use_cuda_host_register", "pinned_use_hip_host_register"),
    *("release_lock_on_cudamalloc", "release_lock_on_hipmalloc", "throw_on_cudamalloc_oom"),
)
KEYS = (
    *_SWITCHES,
    *("backend", "expandable_segments_reserve", "expandable_segments_reserve_by_class", "garbage_collection_threshold"),
    *("large_segment_size_mb", "max_non_split_rounding_mb", "max_split_size_mb", "per_process_memory_fraction"),
    *("pinned_max_cached_size_mb", "pinned_max_round_threshold_mb", "pinned_num_register_threads"),
    *("pinned_reserve_segment_size_mb", "roundup_power2_divisions"),
)
"""The names of settings."""


def parse_settings(line: str) -> dict[str, str]:
    """Read `key:value,key:value`; commas within brackets belong to the value.

    Raises:
        ConfigurationError: a name is unknown, a value is missing, or a switch is neither True nor False.
    """
    settings: dict[str, str] = {}
    for part in _parts(line):
        key, _, value = part.partition(":")
        if key not in KEYS:
            raise ConfigurationError(
                f"{key!r} is not a setting of PyTorch's allocator; the settings are {', '.join(KEYS)}"
            )
        if not value or (key in _SWITCHES and value not in ("True", "False")):
            expected = "True or False, written like this" if key in _SWITCHES else "any text"
            raise ConfigurationError(f"invalid value {value!r} of {key}: it must be {expected}")
        settings[key] = value
    if not settings:
        raise ConfigurationError("no setting is given; an example is expandable_segments:True")
    return settings


def in_force(environ: Mapping[str, str]) -> tuple[str, str]:
    """Return the variable that PyTorch reads in this environment, and its content; both are empty if none is set."""
    for variable in VARIABLES:
        if variable in environ:
            return variable, environ[variable]
    return "", ""


def merged(current: str, wanted: Mapping[str, str]) -> str:
    """Return the current line with these settings added; they replace settings of the same name."""
    kept = [part for part in _parts(current) if part.partition(":")[0] not in wanted]
    return ",".join([*kept, *(f"{key}:{value}" for key, value in wanted.items())])


def environment_with(environ: Mapping[str, str], line: str) -> dict[str, str]:
    """Return the variables that put these settings in force, together with the environment's own settings.

    Raises:
        ConfigurationError: as `parse_settings`.
    """
    # Every release reads PYTORCH_CUDA_ALLOC_CONF, and ignores the newer variable beside it: so it gets both.
    return {VARIABLES[0]: merged(in_force(environ)[1], parse_settings(line))}


def _parts(line: str) -> list[str]:
    return re.findall(r"(?:[^,\[]|\[[^\]]*\]?)+", "".join(line.split()))


# For all devices; with `_0`, `_1` and so on for one device. Sizes such as `3000m`. KAI sets it as well, with HAMi-core.
_HAMI_VARIABLE = "CUDA_DEVICE_MEMORY_LIMIT"
# The container's share of a device's memory, such as `0.5`.
_KAI_VARIABLE = "GPU_PORTION"
_UNITS = {"": 0, "k": 10, "m": 20, "g": 30}


def environment_limit(environ: Mapping[str, str], index: int, total_bytes: Callable[[int], int]) -> int | None:
    """Return the smallest limit that HAMi and KAI set for a device, by its index in PyTorch; None without one.

    `total_bytes` returns the memory of a device. It is called if the limit is a share of it.
    """
    # HAMi counts the devices of the container, of which CUDA_VISIBLE_DEVICES may select some.
    visible = environ.get("CUDA_VISIBLE_DEVICES", "").split(",")
    in_container = visible[index].strip() if index < len(visible) and visible[index].strip().isdigit() else str(index)
    found = re.fullmatch(
        r"(\d+)([kmg]?)",
        environ.get(f"{_HAMI_VARIABLE}_{in_container}", environ.get(_HAMI_VARIABLE, "")).strip().lower(),
    )
    of_hami = int(found[1]) << _UNITS[found[2]] if found else 0
    portion = re.fullmatch(r"0?\.\d+", environ.get(_KAI_VARIABLE, "").strip())
    of_kai = int(float(portion[0]) * total_bytes(index)) if portion else 0
    return min((size for size in (of_hami, of_kai) if size), default=None)
