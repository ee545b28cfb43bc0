"""The settings that PyTorch's CUDA allocator takes: which there are, what they may be, and how a line of them is read.

An unknown key, or a wrong value, ends a program when it initialises CUDA, which may be after minutes of loading. So
they are checked before. Source: c10's AllocatorConfig and CUDAAllocatorConfig, releases up to 2.15; an older one knows
fewer of them.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping

from gpumem_exporter.errors import ConfigurationError

__all__ = ["KEYS", "VARIABLES", "environment_with", "in_force", "merged", "parse_settings"]

VARIABLES = ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF")
"""Where PyTorch looks, in this order: the first one that is set counts, even if it is empty. All releases know the
first; the second is read for CUDA from 2.10 on."""


def _truth(value: str) -> str:
    return "" if value in ("True", "False") else "True or False, in this spelling"


def _megabytes(least: int) -> Callable[[str], str]:
    return lambda value: "" if value.isdigit() and int(value) >= least else f"a whole number of MiB, {least} at least"


def _fraction(*, ends: bool) -> Callable[[str], str]:
    def check(value: str) -> str:
        number = _number(value)
        inside = number is not None and (0 <= number <= 1 if ends else 0 < number < 1)
        return "" if inside else f"a number {'from 0 to 1' if ends else 'between 0 and 1'}"

    return check


def _threads(value: str) -> str:
    right = value.isdigit() and int(value) in (1, 2, 4, 8, 16, 32, 64, 128)
    return "" if right else "a power of two up to 128"


def _divisions(value: str) -> str:
    says = "a power of two such as 4, or [256:1,512:2,1024:4,>:8] with powers of two"
    if not value.startswith("["):
        return "" if value == "0" or _power_of_two(value) else says
    pairs = [pair.partition(":") for pair in value.strip("[]").split(",") if pair]
    right = value.endswith("]") and all(
        (size == ">" or _power_of_two(size)) and (parts == "0" or _power_of_two(parts)) for size, _, parts in pairs
    )
    return "" if right and pairs else says


def _backend(value: str) -> str:
    return "" if value in ("native", "cudaMallocAsync") else "native or cudaMallocAsync"


def _reserve(value: str) -> str:
    right = re.fullmatch(r"\d+(\.\d+)?[KMGT]?", value) and (_number(value.rstrip("KMGT")) or 0) > 0
    return "" if right else "a fraction such as 0.5, or a size such as 40G"


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
"""Each key, and what says of a value what would be right; empty where it is."""


def parse_settings(line: str) -> dict[str, str]:
    """Read `key:value,key:value`; commas within brackets belong to the value.

    Raises:
        ConfigurationError: a key is unknown, or its value is not one; says which there are, or what would be right.
    """
    settings: dict[str, str] = {}
    for part in _parts(line):
        key, colon, value = part.partition(":")
        check = KEYS.get(key)
        if check is None:
            raise ConfigurationError(f"{key!r} is no setting of PyTorch's allocator; there are {', '.join(KEYS)}")
        if not colon or not value:
            raise ConfigurationError(
                f"{key} needs a value, as in {key}:VALUE: {check('') or 'see PyTorch CUDA semantics'}"
            )
        expected = check(value)
        if expected:
            raise ConfigurationError(f"{key} cannot be {value!r}; it is {expected}")
        settings[key] = value
    if not settings:
        raise ConfigurationError("no setting is given; say for instance expandable_segments:True")
    return settings


def in_force(environ: Mapping[str, str]) -> tuple[str, str]:
    """The variable that PyTorch reads in this environment, and its content; both empty where none is set."""
    for variable in VARIABLES:
        if variable in environ:
            return variable, environ[variable]
    return "", ""


def merged(present: str, wanted: Mapping[str, str]) -> str:
    """A line of settings with others put in their place, or added."""
    kept = [part for part in _parts(present) if part.partition(":")[0] not in wanted]
    return ",".join([*kept, *(f"{key}:{value}" for key, value in wanted.items())])


def environment_with(environ: Mapping[str, str], line: str) -> dict[str, str]:
    """The variables that put these settings in force, beside those that the environment sets already.

    It is PYTORCH_CUDA_ALLOC_CONF that is set: every release reads it, and it wins over the newer name. What the newer
    name says is taken over, since it is not read any more then.

    Raises:
        ConfigurationError: as `parse_settings`.
    """
    return {VARIABLES[0]: merged(in_force(environ)[1], parse_settings(line))}


def _parts(line: str) -> list[str]:
    parts, depth, begun = [], 0, 0
    text = "".join(line.split())
    for at, character in enumerate(f"{text},"):
        depth += (character == "[") - (character == "]")
        if character == "," and depth <= 0:
            parts.append(text[begun:at])
            begun = at + 1
    return [part for part in parts if part]


def _number(value: str) -> float | None:
    return float(value) if re.fullmatch(r"\d+(\.\d*)?|\.\d+", value) else None


def _power_of_two(value: str) -> bool:
    return value.isdigit() and int(value) > 0 and int(value) & (int(value) - 1) == 0
