"""The settings of PyTorch's CUDA allocator: their names, their values, and the syntax of a line of them.

PyTorch rejects an unknown name or an invalid value when it initializes CUDA, perhaps after minutes of loading. So the
client checks them before the program starts. Source: c10's AllocatorConfig and CUDAAllocatorConfig up to 2.15; older
releases know fewer.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping

from gpumem_exporter.errors import ConfigurationError

__all__ = ["KEYS", "VARIABLES", "environment_with", "in_force", "merged", "parse_settings"]

VARIABLES = ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF")
"""PyTorch reads the first one that is set, even if it is empty. The second is read for CUDA from 2.10 on."""


def _truth(value: str) -> str:
    return "" if value in ("True", "False") else "True or False, written like this"


def _megabytes(least: int) -> Callable[[str], str]:
    return lambda value: "" if value.isdigit() and int(value) >= least else f"a whole number of MiB, at least {least}"


def _fraction(*, ends: bool) -> Callable[[str], str]:
    def check(value: str) -> str:
        number = _number(value)
        inside = number is not None and (0 <= number <= 1 if ends else 0 < number < 1)
        return "" if inside else f"a number {'from 0 to 1' if ends else 'between 0 and 1'}"

    return check


def _threads(value: str) -> str:
    valid = value.isdigit() and int(value) in (1, 2, 4, 8, 16, 32, 64, 128)
    return "" if valid else "a power of two up to 128"


def _divisions(value: str) -> str:
    expected = "a power of two such as 4, or [256:1,512:2,1024:4,>:8] with powers of two"
    if not value.startswith("["):
        return "" if value == "0" or _power_of_two(value) else expected
    pairs = [pair.partition(":") for pair in value.strip("[]").split(",") if pair]
    valid = value.endswith("]") and all(
        (size == ">" or _power_of_two(size)) and (parts == "0" or _power_of_two(parts)) for size, _, parts in pairs
    )
    return "" if valid and pairs else expected


def _backend(value: str) -> str:
    return "" if value in ("native", "cudaMallocAsync") else "native or cudaMallocAsync"


def _reserve(value: str) -> str:
    valid = re.fullmatch(r"\d+(\.\d+)?[KMGT]?", value) and (_number(value.rstrip("KMGT")) or 0) > 0
    return "" if valid else "a fraction such as 0.5, or a size such as 40G"


KEYS: Mapping[str, Callable[[str], str]] = {
    "backend": _backend,
    "expandable_segments": _truth,
    "expandable_segments_reserve": _reserve,
    "expandable_segments_reserve_by_class": lambda _: "",
    "garbage_collection_threshold": _fraction(ends=False),
    "graph_capture_record_stream_reuse": _truth,
    "large_segment_size_mb": _megabytes(20),
    "max_non_split_rounding_mb": _megabytes(20),
    "max_split_size_mb": _megabytes(20),
    "per_process_memory_fraction": _fraction(ends=True),
    "pinned_free_catch_all": _truth,
    "pinned_max_cached_size_mb": _megabytes(0),
    "pinned_max_round_threshold_mb": _megabytes(0),
    "pinned_num_register_threads": _threads,
    "pinned_reserve_segment_size_mb": _megabytes(0),
    "pinned_use_background_threads": _truth,
    "pinned_use_cuda_host_register": _truth,
    "pinned_use_hip_host_register": _truth,
    "release_lock_on_cudamalloc": _truth,
    "release_lock_on_hipmalloc": _truth,
    "roundup_power2_divisions": _divisions,
    "throw_on_cudamalloc_oom": _truth,
}
"""For each name, a function that returns what a value must be; empty if the value is valid."""


def parse_settings(line: str) -> dict[str, str]:
    """Read `key:value,key:value`; commas within brackets belong to the value.

    Raises:
        ConfigurationError: a name is unknown or its value is invalid; the message lists what is accepted.
    """
    settings: dict[str, str] = {}
    for part in _parts(line):
        key, colon, value = part.partition(":")
        check = KEYS.get(key)
        if check is None:
            raise ConfigurationError(
                f"{key!r} is not a setting of PyTorch's allocator; the settings are {', '.join(KEYS)}"
            )
        if not colon or not value:
            raise ConfigurationError(
                f"{key} needs a value, as in {key}:VALUE: {check('') or 'see PyTorch CUDA semantics'}"
            )
        expected = check(value)
        if expected:
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
    """Return the variables that put these settings in force, together with those that the environment sets.

    The result sets PYTORCH_CUDA_ALLOC_CONF, which every release reads and which takes precedence over the newer name.
    It includes the settings of the newer variable, which PyTorch then ignores.

    Raises:
        ConfigurationError: as `parse_settings`.
    """
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


def _number(value: str) -> float | None:
    return float(value) if re.fullmatch(r"\d+(\.\d*)?|\.\d+", value) else None


def _power_of_two(value: str) -> bool:
    return value.isdigit() and int(value) > 0 and int(value) & (int(value) - 1) == 0
