"""What the environment says to PyTorch's CUDA allocator: its settings, and the limits of a scheduler.

PyTorch rejects an unknown name or an invalid value when it initializes CUDA, perhaps after minutes of loading. So the
client checks them before the program starts. Source: c10's AllocatorConfig and CUDAAllocatorConfig up to 2.15; older
releases know fewer.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from functools import partial

from gpumem_client.wire.errors import ConfigurationError

VARIABLES = ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF")
"""PyTorch reads the first one that is set, even if it is empty. The second is read for CUDA from 2.10 on."""


_TRUTH = r"True|False", "True or False, written like this"
_FRACTION = r"0(\.\d*)?|\.\d+|1(\.0*)?", "a number from 0 to 1"
_MEGABYTES = r"\d+", "a whole number of MiB, at least 0"
_SEGMENT = r"[2-9]\d|\d{3,}", "a whole number of MiB, at least 20"
_POWER = "(" + "|".join(str(1 << bits) for bits in range(21)) + ")"

KEYS: Mapping[str, tuple[str, str]] = {
    "backend": (r"native|cudaMallocAsync", "native or cudaMallocAsync"),
    "expandable_segments": _TRUTH,
    "expandable_segments_reserve": (r"(?=.*[1-9])\d+(\.\d+)?[KMGT]?", "a fraction such as 0.5, or a size such as 40G"),
    "expandable_segments_reserve_by_class": (r".*", ""),
    "garbage_collection_threshold": (r"0?\.\d*[1-9]\d*", "a number between 0 and 1"),
    "graph_capture_record_stream_reuse": _TRUTH,
    "large_segment_size_mb": _SEGMENT,
    "max_non_split_rounding_mb": _SEGMENT,
    "max_split_size_mb": _SEGMENT,
    "per_process_memory_fraction": _FRACTION,
    "pinned_free_catch_all": _TRUTH,
    "pinned_max_cached_size_mb": _MEGABYTES,
    "pinned_max_round_threshold_mb": _MEGABYTES,
    "pinned_num_register_threads": (r"1|2|4|8|16|32|64|128", "a power of two up to 128"),
    "pinned_reserve_segment_size_mb": _MEGABYTES,
    "pinned_use_background_threads": _TRUTH,
    "pinned_use_cuda_host_register": _TRUTH,
    "pinned_use_hip_host_register": _TRUTH,
    "release_lock_on_cudamalloc": _TRUTH,
    "release_lock_on_hipmalloc": _TRUTH,
    "roundup_power2_divisions": (
        rf"0|{_POWER}|\[({_POWER}|>):(0|{_POWER})(,({_POWER}|>):(0|{_POWER}))*,?\]",
        "a power of two such as 4, or [256:1,512:2,1024:4,>:8] with powers of two",
    ),
    "throw_on_cudamalloc_oom": _TRUTH,
}
"""The valid values of each setting: a regular expression, and its description for error messages."""


def parse_settings(line: str) -> dict[str, str]:
    """Read `key:value,key:value`; commas within brackets belong to the value.

    Raises:
        ConfigurationError: a name is unknown or its value is invalid; the message lists what is accepted.
    """
    settings: dict[str, str] = {}
    for part in _parts(line):
        key, colon, value = part.partition(":")
        if key not in KEYS:
            raise ConfigurationError(
                f"{key!r} is not a setting of PyTorch's allocator; the settings are {', '.join(KEYS)}"
            )
        valid, expected = KEYS[key]
        if not colon or not value:
            raise ConfigurationError(f"{key} needs a value, as in {key}:VALUE: {expected or 'any text'}")
        if not re.fullmatch(valid, value):
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
    parts, depth, start = [], 0, 0
    text = "".join(line.split())
    for at, character in enumerate(f"{text},"):
        depth += (character == "[") - (character == "]")
        if character == "," and depth <= 0:
            parts.append(text[start:at])
            start = at + 1
    return [part for part in parts if part]


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
    of_hami = environ.get(f"{_HAMI_VARIABLE}_{in_container}", environ.get(_HAMI_VARIABLE, ""))
    sizes = (_size(of_hami), _portion(environ.get(_KAI_VARIABLE, ""), partial(total_bytes, index)))
    return min((size for size in sizes if size), default=None)


def _portion(text: str, total_bytes: Callable[[], int]) -> int | None:
    found = re.fullmatch(r"0?\.\d+", text.strip())
    return int(float(found[0]) * total_bytes()) if found else None


def _size(text: str) -> int | None:
    found = re.fullmatch(r"(\d+)([kmg]?)", text.strip().lower())
    return int(found[1]) << _UNITS[found[2]] if found else None
