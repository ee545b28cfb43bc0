"""Counts the live CUDA tensors by kind, and finds what refers to them.

The walk covers the objects that Python's garbage collector tracks. It runs none of the user's code: it compares types
by `type()`, and reads tensors through the base class, with `__torch_function__` disabled. The result contains text and
numbers, so it keeps no tensor alive.

The walk does not find tensors that only C++ refers to, such as activations saved for a backward pass. It marks tensors
with an autograd graph, because the graph keeps such activations.
"""

from __future__ import annotations

import gc
import time
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from gpumem_client import torch_access
from gpumem_client.allocator.allocator import no_cuda
from gpumem_client.objects.referrers import describe_referrers
from gpumem_client.objects.tensors import TensorReader
from gpumem_client.objects.tracked import MAX_OBJECTS, each_tracked, find_frozen
from gpumem_client.torch_access import initialized_torch
from gpumem_client.uninterrupted import Slices
from gpumem_client.wire.units import ShownAsText, human_bytes

_GRAPH_NODES_MAX = 20_000
_HOLDERS_MAX = 4

Kind = tuple[tuple[int, ...], str, int, bool]
"""Shape, dtype, device, and whether the tensors have an autograd graph. The key of a group, the same in every walk."""


@dataclass(frozen=True, slots=True)
class TensorGroup(ShownAsText):
    """Live tensors of one shape and dtype on one device."""

    shape: tuple[int, ...]
    dtype: str
    device: int
    count: int
    bytes: int
    """Bytes of their storages. A storage that several tensors share is counted with the first of them."""
    with_graph: int = 0
    """Number of tensors that keep an autograd graph, and with it the activations that it saved."""
    graph_nodes: int = 0
    """Nodes in those graphs, at most 20,000 per walk."""
    referrers: tuple[str, ...] = ()
    """What refers to the tensors, the most frequent first."""

    @property
    def kind(self) -> Kind:
        """The key of the group, the same in every walk."""
        return self.shape, self.dtype, self.device, self.with_graph > 0

    def __str__(self) -> str:
        shape = "x".join(str(size) for size in self.shape) or "scalar"
        graph = f", {self.with_graph} with their autograd graph" if self.with_graph else ""
        held = f", held by {'; '.join(self.referrers)}" if self.referrers else ""
        tensors = f"{self.count} tensors {self.dtype}[{shape}] on cuda:{self.device}"
        return f"{tensors}, {human_bytes(self.bytes)}{graph}{held}"


@dataclass(frozen=True, slots=True)
class LingeringTensors(ShownAsText):
    """The result of a walk. Prints as a table."""

    groups: tuple[TensorGroup, ...] = ()
    """The groups with most bytes first."""
    complete: bool = True
    """False if a limit ended the walk, or if objects are hidden: there may be more."""
    hidden_objects: int = 0
    """Objects that `gc.freeze()` hides from the walk, and that it did not reach from other objects. Most belong to
    built-in types, but some may be tensors that only C code refers to."""

    @property
    def bytes(self) -> int:
        """Bytes of all groups."""
        return sum(group.bytes for group in self.groups)

    def __str__(self) -> str:
        lines = [str(group) for group in self.groups] or ["no live CUDA tensor"]
        if self.hidden_objects:
            lines.append(f"(gc.freeze() hides {self.hidden_objects:,} objects from the walk: there may be more)")
        elif not self.complete:
            lines.append("(a limit ended the walk: there may be more)")
        return "\n".join(lines)


def lingering_tensors(
    *,
    min_bytes: int = 0,
    max_groups: int = 20,
    max_seconds: float = 10.0,
    max_objects: int = 5_000_000,
    referrers: bool = True,
) -> LingeringTensors:
    """Group the live CUDA tensors by shape, dtype and device, and name what refers to them.

    The walk keeps the GIL for about 0.1 s per million objects. It collects, copies and keeps nothing. Any thread may
    call this. Without CUDA the result is empty and a warning is logged. Objects that `gc.freeze()` hides are found
    through what refers to them, which takes about 1.3 s per million objects more.

    The result has the `max_groups` largest groups, each of `min_bytes` at least. `max_seconds` is the CPU time for the
    walk, again for frozen objects, and again for the search for `referrers`, which takes longer than the walk: about
    6 s per million objects. If a limit ends the walk, `complete` is False, and names may be missing.
    """
    torch = initialized_torch()
    if torch is None:
        no_cuda("lingering_tensors")
        return LingeringTensors()
    return walk(torch, min_bytes, max_groups, max_seconds, max_objects, referrers=referrers, count_frozen=True)


def walk(
    torch: Any,
    min_bytes: int = 0,
    max_groups: int = 10_000,
    max_seconds: float = 10.0,
    max_objects: int = MAX_OBJECTS,
    *,
    referrers: bool = False,
    count_frozen: bool = False,
) -> LingeringTensors:
    """Walk as `lingering_tensors` does. Counts frozen tensors only with `count_frozen`."""
    frozen: list[Any] = []
    if referrers or count_frozen:
        frozen = find_frozen(time.thread_time() + max_seconds, max_objects)
    walker = _Walker(torch)
    end = time.thread_time() + max_seconds  # CPU time: waits on a busy machine do not shorten the walk
    with torch_access.without_torch_function(torch):
        walker.count(each_tracked(walker.types, lambda: time.thread_time() >= end, max_objects))
        complete = time.thread_time() < end and Slices(rests=False).count() <= max_objects
        # Not for two counts that are compared: they would differ if a limit ended one of them.
        if count_frozen:
            walker.count(each for each in frozen if type(each) in walker.types)
    hidden = max(0, gc.get_freeze_count() - len(frozen))
    kinds = sorted(walker.ids, key=lambda kind: -walker.bytes[kind])
    kinds = [kind for kind in kinds if walker.bytes[kind] >= min_bytes]
    complete = complete and not hidden and len(kinds) <= max_groups
    kinds = kinds[:max_groups]
    names: Mapping[int, str] = {}
    if referrers:
        walker.forget_graphs()
        wanted = [each for kind in kinds for each in walker.ids[kind]]
        end = time.thread_time() + max_seconds
        # The caller is the job itself: rests would only stop it for longer.
        names = describe_referrers(
            wanted,
            Slices(rests=False),
            lambda: time.thread_time() >= end,
            frozen,
            nodes=torch_access.node_types(torch),
            tensors=walker.types,
        )
    return LingeringTensors(tuple(walker.group(kind, names) for kind in kinds), complete, hidden)


def unfinished_losses(torch: Any) -> int:
    """Return the number of forward passes whose losses wait for one backward pass, at most; 0 without such a loss."""
    reader, losses, terms = TensorReader(torch), list[Any](), 0
    with torch_access.without_torch_function(torch):
        for tensor in each_tracked(reader.types, lambda: False, MAX_OBJECTS):
            if reader.is_cuda(tensor) and reader.shape(tensor) == ():
                losses.append(reader.base.grad_fn.__get__(tensor))
    waiting, seen, uses = [each for each in losses if each is not None], set[Any](), Counter[Any]()
    terms = len(waiting)
    for node in waiting[:]:
        chain = 1
        while node is not None and type(node).__name__ == "AddBackward0" and chain < _GRAPH_NODES_MAX:
            node, chain = object.__getattribute__(node, "next_functions")[0][0], chain + 1
        terms = max(terms, chain)
    # The terms of one forward pass share its graph. Those of several have only the parameters in common.
    while waiting and len(seen) < _GRAPH_NODES_MAX:
        node = waiting.pop()
        if node in seen:
            continue
        seen.add(node)
        for parent, _ in object.__getattribute__(node, "next_functions"):
            if parent is not None:
                uses[parent] += type(parent).__name__ == "AccumulateGrad"
                waiting.append(parent)
    shared = sorted(filter(None, uses.values()))
    return min(terms, shared[len(shared) // 2]) if shared else 0


class _Walker:
    """Counts tensors by kind. Each is released before the next, so that other threads can free their memory."""

    def __init__(self, torch: Any) -> None:
        self._reader = TensorReader(torch)
        self.types = self._reader.types
        self.ids: dict[Kind, list[int]] = defaultdict(list)
        self.bytes: Counter[Kind] = Counter()
        self._graph_nodes: Counter[Kind] = Counter()
        self._seen: set[int] = set()
        self._storages: set[tuple[int, int]] = set()
        self._nodes: set[Any] = set()

    def group(self, kind: Kind, names: Mapping[int, str]) -> TensorGroup:
        """Return the tensors of a kind, with the most frequent names of what refers to them."""
        ids, nodes = self.ids[kind], self._graph_nodes[kind]
        holders = Counter(names[each] for each in ids if each in names).most_common(_HOLDERS_MAX)
        with_graph = len(ids) if kind[3] else 0
        referrers = tuple(holder for holder, _ in holders)
        return TensorGroup(*kind[:3], len(ids), self.bytes[kind], with_graph, nodes, referrers)

    def forget_graphs(self) -> None:
        """Release the graph nodes: the search for what refers to nodes would find them."""
        self._nodes.clear()

    def count(self, tensors: Iterable[Any]) -> None:
        """Count these tensors."""
        for tensor in tensors:
            self._add(tensor)

    def _add(self, tensor: Any) -> None:
        reader = self._reader
        if id(tensor) in self._seen:  # the collector has moved it to an older generation
            return
        self._seen.add(id(tensor))
        shape = reader.shape(tensor) if reader.is_cuda(tensor) else None
        if shape is None:
            return
        try:
            graph = reader.base.grad_fn.__get__(tensor)
        except RuntimeError:
            graph = None  # raised for a view whose base was changed in place
        dtype = str(reader.base.dtype.__get__(tensor)).replace("torch.", "")
        kind = shape, dtype, reader.base.get_device(tensor), graph is not None
        self.ids[kind].append(id(tensor))
        self._graph_nodes[kind] += self._follow(graph)
        # Only a storage's Python object has its size; see `TensorReader.place` for threads.
        place = reader.place(tensor)
        if place is not None and place not in self._storages:
            self._storages.add(place)
            self.bytes[kind] += reader.base.untyped_storage(tensor).nbytes()

    def _follow(self, node: Any) -> int:
        """Return the number of graph nodes that are reached from this one for the first time."""
        waiting, before = [node], len(self._nodes)
        while waiting and len(self._nodes) < _GRAPH_NODES_MAX:
            node = waiting.pop()
            if node is not None and node not in self._nodes:
                self._nodes.add(node)
                waiting += [parent for parent, _ in object.__getattribute__(node, "next_functions")]
        return len(self._nodes) - before
