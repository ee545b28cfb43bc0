"""Recommends allocator settings from measured values, and finds what conflicts with expandable segments."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from gpumem_client.allocator.allocator import attached
from gpumem_client.allocator.allocator_environment import VARIABLES, in_force, merged, parse_settings
from gpumem_client.allocator.reclaimable import unreturnable_bytes
from gpumem_client.objects.tracked import each_tracked, find_frozen
from gpumem_client.wire.errors import ConfigurationError
from gpumem_client.wire.protocol import DeviceSample
from gpumem_client.wire.units import ShownAsText, counted, human_bytes

_FRAGMENTED_SHARE = 0.1
_FRAGMENTED_LEAST = 256 << 20
_RETRIES_MANY = 3
# A setting and its value, both empty if none helps; what was observed; the effect of the setting, or other advice.
_Cause = tuple[str, str, str, str]
_NO_OPTION = "expandable segments are no option, because {}: use fewer tensor sizes or less memory"


@dataclass(frozen=True, slots=True)
class Recommendation(ShownAsText):
    """Settings for the next run, and the reasons. Prints as text."""

    settings: tuple[tuple[str, str], ...] = ()
    reasons: tuple[str, ...] = ()
    """One reason per setting, or the reason for no change."""
    current: str = ""
    """The settings in force now."""
    variable: str = ""
    """The environment variable that sets them; empty if none is set."""

    @property
    def line(self) -> str:
        """All settings for the next run, including those in force; empty if no change is recommended."""
        return merged(self.current, dict(self.settings)) if self.settings else ""

    def __str__(self) -> str:
        came = f" (from {self.variable})" if self.variable else ""
        lines = [f"in force: {self.current or 'the defaults'}{came}"]
        if self.settings:
            lines.append(f"next run: {VARIABLES[0]}={self.line}")
        lines += [f"  {reason}" for reason in self.reasons]
        return "\n".join(lines)


def recommend_allocator_settings() -> Recommendation:
    """Recommend allocator settings for this process' memory, with reasons.

    Settings take effect when CUDA starts: set them in the environment of the next run, for example with
    `gpumem-exporter run --allocator`. Call this at the end of a representative step; it takes at most one walk over the
    heap. Without CUDA it recommends nothing.
    """
    allocator = attached("recommend_allocator_settings")
    if allocator is None:
        return Recommendation(reasons=("no CUDA: nothing was measured",))
    index_of = {allocator.uuid(index): index for index in allocator.devices()}
    devices = {index_of[sample.uuid]: sample for sample in allocator.samples() if sample.uuid in index_of}
    conflict = expandable_segments_conflict()
    return recommend(devices, allocator.settings, in_force(os.environ)[0], expandable_segments_conflict=conflict)


def recommend(
    devices: Mapping[int, DeviceSample], current: str, variable: str = "", *, expandable_segments_conflict: str = ""
) -> Recommendation:
    """Return the recommendation for samples by device index. `variable` set the settings in force."""
    try:
        settings = parse_settings(current) if current else {}
    except ConfigurationError:  # settings of a newer release
        settings = {}
    if settings.get("backend") == "cudaMallocAsync":
        reason = "backend:cudaMallocAsync is the driver's own allocator: PyTorch's settings do not affect it"
        return Recommendation(reasons=(reason,), current=current, variable=variable)
    wanted: dict[str, str] = {}
    reasons: list[str] = []
    for index, sample in devices.items():
        name = f"cuda:{index}"
        for causes in (_fragmentation, _retries):
            for setting, value, observation, effect in causes(name, sample, settings):
                if setting == "expandable_segments" and expandable_segments_conflict:
                    reasons.append(f"{observation}; {_NO_OPTION.format(expandable_segments_conflict)}")
                    continue
                if setting not in wanted:
                    reason = f"{observation}; {effect}"
                    reasons.append(f"{setting}:{value}: {reason}" if setting else reason)
                if setting:
                    wanted.setdefault(setting, value)
    if not reasons:
        reasons.append("the measured values suggest no change")
    return Recommendation(tuple(wanted.items()), tuple(reasons), current, variable)


def _fragmentation(name: str, sample: DeviceSample, settings: Mapping[str, str]) -> Iterator[_Cause]:
    fragmented, reserved = unreturnable_bytes(sample), sample.reserved_bytes
    if fragmented is None or not reserved or fragmented < max(_FRAGMENTED_LEAST, _FRAGMENTED_SHARE * reserved):
        return
    share = (
        f"{name} has {human_bytes(fragmented)} of {human_bytes(reserved)} reserved memory fragmented between tensors"
    )
    if settings.get("expandable_segments") == "True":
        yield "", "", f"{share}, although segments are expandable", "allocate long-lived tensors first"
        return
    remove = "; max_split_size_mb has no effect then: remove it" if "max_split_size_mb" in settings else ""
    yield "expandable_segments", "True", share, f"expandable segments are unmapped and reused by the page{remove}"


def _retries(name: str, sample: DeviceSample, settings: Mapping[str, str]) -> Iterator[_Cause]:
    retries = sample.alloc_retries or 0
    if retries < _RETRIES_MANY:
        return
    observation = f"{name} had to empty its cache {retries} times for an allocation"
    if sample.ooms:
        observation += f", and ran out of memory {counted(sample.ooms, 'time', 'times')}"
    if settings.get("expandable_segments") == "True":
        yield "", "", observation, "no setting helps: use less memory (a smaller batch, checkpointing)"
    else:
        yield "expandable_segments", "True", observation, "expandable segments grow by the page instead"


_LIBRARIES = {"vllm": "vLLM", "sglang": "SGLang", "torch_memory_saver": "torch_memory_saver"}
_FROZEN_SECONDS, _FROZEN_MAX = 1.0, 5_000_000


def expandable_segments_conflict() -> str:
    """Return why expandable segments are no option in this process, such as `vLLM is loaded`; empty if they are one.

    Keeps the GIL for about 0.05 s per million objects.
    """
    for module, name in _LIBRARIES.items():
        if module in sys.modules and not (module == "vllm" and _version_of(sys.modules[module]) >= (0, 33)):
            return f"{name} is loaded"
    # Among the objects of the garbage collector, because the allocator's state does not distinguish a
    # `torch.cuda.MemPool` (torch 2.5 and later) from the pool of CUDA graphs.
    pool_class = getattr(sys.modules.get("torch.cuda.memory"), "MemPool", None)
    if pool_class is not None and (
        next(each_tracked((pool_class,), lambda: False), None) is not None
        or any(type(each) is pool_class for each in find_frozen(time.thread_time() + _FROZEN_SECONDS, _FROZEN_MAX))
    ):
        return "the program uses a torch.cuda.MemPool"
    return ""


def _version_of(module: object) -> tuple[int, ...]:
    """Return the first two numbers of a module's version; empty if it has none, as a build from its sources."""
    numbers = str(getattr(module, "__version__", "")).split(".")[:2]
    return tuple(int(number) for number in numbers) if all(number.isdecimal() for number in numbers) else ()
