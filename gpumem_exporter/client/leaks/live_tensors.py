"""Which CUDA tensors are alive, how many of each kind, and who refers to them.

A walk over what Python's garbage collector tracks, bounded in time and in number. It runs no code of the program: types
are compared by `type()`, tensors are read through the base class with `__torch_function__` switched off, instances
through their dictionaries. It keeps no tensor alive: what it returns is text and numbers.

What only C++ holds (activations saved for a backward pass) is not seen; a tensor whose graph is alive is marked, since
the graph holds them.
"""

from __future__ import annotations

import sys
import time
from collections import Counter
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Any

from gpumem_exporter.client.allocator import torch_access
from gpumem_exporter.client.allocator.attached import no_cuda
from gpumem_exporter.client.allocator.statistics import initialised_torch
from gpumem_exporter.client.leaks.referrers import Referrers
from gpumem_exporter.client.leaks.tracked_objects import count_objects, find_of_types, find_types
from gpumem_exporter.client.sizes import human_bytes

__all__ = ["Kind", "LingeringTensors", "TensorGroup", "allocating_frames", "lingering_tensors", "walk"]

_CHUNK = 4096
_GRAPH_NODES_MAX = 20_000
_SAMPLES = 4
_SAMPLES_MAX = 8
_HOLDERS_MAX = 4
_GENERATIONS = (0, 1, 2)
"""Of the garbage collector."""

Kind = tuple[tuple[int, ...], str, int, bool]
"""Shape, type, device, and whether an autograd graph hangs on it: what makes tensors the same in another walk."""


@dataclass(frozen=True, slots=True)
class TensorGroup:
    """Live tensors of one shape and type on one device."""

    shape: tuple[int, ...]
    dtype: str
    device: int
    count: int
    bytes: int
    """Of their storages; one that several tensors share is counted with the first that was found."""
    with_graph: int = 0
    """How many of them keep an autograd graph alive, and with it the activations it saved."""
    graph_nodes: int = 0
    """In those graphs, as far as they were followed."""
    referrers: tuple[str, ...] = ()
    """Who refers to some of them; first who refers to most."""

    @property
    def kind(self) -> Kind:
        """What makes it the same group in another walk."""
        return self.shape, self.dtype, self.device, self.with_graph > 0

    def __str__(self) -> str:
        shape = "x".join(str(size) for size in self.shape) or "scalar"
        graph = f", {self.with_graph} with their autograd graph" if self.with_graph else ""
        held = f", held by {'; '.join(self.referrers)}" if self.referrers else ""
        return f"{self.count} of {self.dtype}[{shape}] on cuda:{self.device}, {human_bytes(self.bytes)}{graph}{held}"


@dataclass(frozen=True, slots=True)
class LingeringTensors:
    """One walk's result. Prints as a table."""

    groups: tuple[TensorGroup, ...] = ()
    """The largest first."""
    complete: bool = True
    """False where a bound ended the walk: there is more."""
    objects: int = 0
    duration_seconds: float = 0.0

    @property
    def bytes(self) -> int:
        """Of all groups."""
        return sum(group.bytes for group in self.groups)

    def __str__(self) -> str:
        lines = [str(group) for group in self.groups] or ["no live CUDA tensor"]
        if not self.complete:
            lines.append("(a bound ended the walk: there may be more)")
        return "\n".join(lines)


@dataclass(slots=True)
class _Found:
    count: int = 0
    bytes: int = 0
    with_graph: int = 0
    graph_nodes: int = 0
    samples: list[Any] = field(default_factory=list)


def lingering_tensors(
    *,
    min_bytes: int = 0,
    max_groups: int = 20,
    max_seconds: float = 1.0,
    max_objects: int = 5_000_000,
    referrers: bool = True,
) -> LingeringTensors:
    """Group the live CUDA tensors by shape, type and device, and say who holds them.

    Holds the GIL for about 0.1 s a million objects; the bounds end it earlier and `complete` says so. Nothing is
    collected, copied or kept. Any thread may call it. Without CUDA it says so and finds nothing.

    Args:
        min_bytes: groups with less are left out.
        max_groups: the largest ones that are told.
        max_seconds: of this thread's time, for the walk, and once more for finding out who refers to them.
        max_objects: looked at.
        referrers: find out who refers to them, which takes longer than finding them.
    """
    torch = initialised_torch()
    if torch is None:
        no_cuda("lingering_tensors")
        return LingeringTensors()
    return walk(torch, min_bytes, max_groups, max_seconds, max_objects, referrers=referrers)


def walk(
    torch: Any,
    min_bytes: int,
    max_groups: int,
    max_seconds: float,
    max_objects: int,
    *,
    referrers: bool = True,
    only: Collection[Kind] | None = None,
    device_type: str = "cuda",
) -> LingeringTensors:
    """The same for a given torch, and for chosen kinds of tensors, of which then more are asked who refers to them."""
    begun = time.perf_counter()
    reader = _Reader(torch, device_type, _SAMPLES if only is None else _SAMPLES_MAX)
    # The thread's own time: on a busy machine it is not cut short for having waited.
    count, complete = _group(reader, time.thread_time() + max_seconds, max_objects)
    found = reader.found
    chosen = sorted(
        ((kind, group) for kind, group in found.items() if group.bytes >= min_bytes and (only is None or kind in only)),
        key=lambda each: -each[1].bytes,
    )
    complete = complete and len(chosen) <= max_groups
    chosen = chosen[:max_groups]
    held: dict[int, str] = {}
    if referrers and chosen:
        samples = [sample for _, group in chosen for sample in group.samples]
        finder = Referrers(ignored=(samples, found, *(group.samples for group in found.values())))
        held = finder.describe(samples, time.thread_time() + max_seconds)
        del samples, finder
    groups = tuple(
        TensorGroup(
            shape=kind[0],
            dtype=kind[1],
            device=kind[2],
            count=group.count,
            bytes=group.bytes,
            with_graph=group.with_graph,
            graph_nodes=group.graph_nodes,
            referrers=_holders(group.samples, held),
        )
        for kind, group in chosen
    )
    return LingeringTensors(groups, complete, count, time.perf_counter() - begun)


def _holders(samples: list[Any], held: Mapping[int, str]) -> tuple[str, ...]:
    told = Counter(held[id(sample)] for sample in samples if id(sample) in held)
    return tuple(holder for holder, _ in told.most_common(_HOLDERS_MAX))


def _group(reader: _Reader, end: float, max_objects: int) -> tuple[int, bool]:
    """Read the tensors among all objects, the youngest first: what leaks is young.

    Of each generation the youngest stand last. Within a piece the oldest come first, so that a storage is counted with
    the tensor that made it, and not with a view.

    Returns:
        How many objects there are, and whether no bound ended it.
    """
    count, left, complete = 0, max_objects, True
    seen: set[int] = set()
    kept: list[list[Any]] = []  # as long as their identities are compared
    with reader.base_class_alone():
        for generation in _GENERATIONS:
            size = count_objects(generation)
            skip = max(0, size - left)
            readable = {kind for kind in find_types(generation, skip=skip) if reader.reads(kind)}
            tensors = find_of_types(generation, readable, skip=skip)
            count += size
            complete = complete and not skip
            left = max(0, left - size)
            kept.append(tensors)
            for stop in range(len(tensors), 0, -_CHUNK):
                if time.thread_time() >= end:
                    return count, False
                read: list[tuple[_Found, Any]] = []
                for tensor in tensors[max(0, stop - _CHUNK) : stop]:
                    if id(tensor) in seen:
                        continue  # which has come into an older generation meanwhile
                    seen.add(id(tensor))
                    group = reader.add(tensor)
                    if group is not None:
                        read.append((group, tensor))
                tensor = None
                while read:
                    reader.sample(*read.pop())
    return count, complete


class _Reader:
    """Reads plain tensors through their base class."""

    def __init__(self, torch: Any, device_type: str, samples_max: int) -> None:
        base = torch_access.tensor_base_class(torch)
        self._torch = torch
        self._base = base
        self._device_type = device_type
        self._samples_max = samples_max
        self.found: dict[Kind, _Found] = {}
        self._storages: set[tuple[int, int]] = set()
        self._nodes: set[Any] = set()
        self._names: dict[Any, str] = {}

    def base_class_alone(self) -> Any:
        """Within it, no `__torch_function__` is called, be it a subclass's or that of a mode the program has on."""
        return torch_access.without_torch_function(self._torch)

    def reads(self, kind: type) -> bool:
        """Tensors of this type can be read without running anybody's code: wrappers' inner tensors are found anyway."""
        if self._torch.Tensor not in kind.__mro__:
            return False
        for base in kind.__mro__:
            if base is self._torch.Tensor:
                return True
            if "__torch_dispatch__" in base.__dict__:
                return False
        return False

    def add(self, tensor: Any) -> _Found | None:
        """Count it; returns its group, None where it is not to be counted."""
        base = self._base
        device = base.device.__get__(tensor)
        if device.type != self._device_type:
            return None
        index = device.index if device.index is not None else 0
        try:
            graph = base.grad_fn.__get__(tensor)
        except RuntimeError:
            graph = None  # a view whose base was changed in place has none that may be asked for
        try:
            shape = tuple(base.size(tensor))
        except RuntimeError:
            return None  # nested: its buffers are tensors of their own
        dtype = base.dtype.__get__(tensor)
        name = self._names.get(dtype)
        if name is None:
            name = self._names[dtype] = str(dtype).removeprefix("torch.")
        group = self.found.setdefault((shape, name, index, graph is not None), _Found())
        group.count += 1
        if graph is not None:
            group.with_graph += 1
            group.graph_nodes += self._follow(graph)
        try:
            storage = base.untyped_storage(tensor)
            key = index, storage.data_ptr()
            if key not in self._storages:
                self._storages.add(key)
                group.bytes += storage.nbytes()
        except (RuntimeError, NotImplementedError, AttributeError):
            pass  # sparse: its parts are tensors of their own
        return group

    def sample(self, group: _Found, tensor: Any) -> None:
        """Keep as many of the youngest as of the oldest: those of this step, and those of long ago."""
        if len(group.samples) == self._samples_max:
            del group.samples[self._samples_max // 2]
        group.samples.append(tensor)

    def _follow(self, node: Any) -> int:
        """How many nodes hang on this one and on none before."""
        waiting, count = [node], 0
        while waiting and len(self._nodes) < _GRAPH_NODES_MAX:
            node = waiting.pop()
            if node is None or node in self._nodes:
                continue
            self._nodes.add(node)
            count += 1
            waiting += [parent for parent, _ in object.__getattribute__(node, "next_functions")]
        return count


def allocating_frames(torch: Any, sizes: Collection[int], *, max_frames: int = 3) -> tuple[str, ...]:
    """Where blocks of these sizes were allocated, by the allocator's history; empty where none is recorded.

    Args:
        torch: the program's.
        sizes: bytes of a block.
        max_frames: places that are told.
    """
    try:
        if not sizes or not torch_access.history_is_recorded(torch):
            return ()
        segments = torch.cuda.memory_snapshot()
    except (AttributeError, RuntimeError):
        return ()
    counts: dict[str, int] = {}
    for segment in segments:
        for block in segment["blocks"]:
            if block["state"] == "active_allocated" and block.get("requested_size") in sizes and block.get("frames"):
                place = _own_frame(block["frames"])
                counts[place] = counts.get(place, 0) + 1
    ranked = sorted(counts.items(), key=lambda each: -each[1])[:max_frames]
    return tuple(f"{count} allocated at {place}" for place, count in ranked)


def _own_frame(frames: list[dict[str, Any]]) -> str:
    torch_folder = (getattr(sys.modules.get("torch"), "__file__", None) or "").rpartition("/")[0]
    for frame in frames:
        filename = frame["filename"]
        if filename.endswith((".py", ">")) and not (torch_folder and filename.startswith(torch_folder)):
            return f"{filename}:{frame['line']} in {frame['name']}"
    first = frames[0]
    return f"{first['filename']}:{first['line']} in {first['name']}"
