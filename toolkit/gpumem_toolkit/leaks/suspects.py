"""Finds the suspects of a leak: the kinds of live tensors that grow in number, and what refers to them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from typing import NamedTuple

from gpumem_client.objects.referrers import NO_REFERRER
from gpumem_client.torch_access import initialized_torch
from gpumem_toolkit.leaks.live_tensors import LingeringTensors, TensorGroup, walk

# For each of three recounts, the number of new tensors that makes a kind a suspect. A leak need not keep a tensor at
# each step, so the later recounts accept fewer.
_RECOUNTS = {1: 3, 2: 2, 3: 1}
_EVERY_MAX = 16
_SUSPECTS_MAX = 3
# A kind without its shape, of which only the number of dimensions counts.
_Alike = tuple[int, str, int, bool]
_NONE = TensorGroup((), "", 0, 0, 0)
_OF_MODELS = ("attribute _parameters of", "attribute state of")


class SuspectSearch:
    """Counts the live tensors when it is created, and again some steps later. The intervals double until a kind grows.

    Growth that was found in a short window is fast, and its first intervals are short.
    """

    def __init__(self, window_steps: int) -> None:
        self._every = min(_EVERY_MAX, window_steps // 7)
        self._before = _count()
        self._steps = 0

    def step(self) -> tuple[str, ...]:
        """Return the suspects after a further step, the likeliest cause first; empty while none is found."""
        self._steps += 1
        least = _RECOUNTS.get(self._steps // self._every)
        if least is None or self._steps % self._every:
            return ()
        # The search for referrers takes 6 s per million objects, a count 0.1 s: search only if there is a suspect.
        counted = _count()
        found = grown(self._before, counted, least=least)
        if found:
            found = grown(self._before, _count(referrers=True), least=least)
        if not found and least == min(_RECOUNTS.values()):
            self._every, self._steps, self._before = 2 * self._every, 0, counted
        return found


def _count(*, referrers: bool = False) -> LingeringTensors:
    torch = initialized_torch()
    return LingeringTensors() if torch is None else walk(torch, referrers=referrers)


class _Growth(NamedTuple):
    group: TensorGroup
    more: int
    more_bytes: int
    more_nodes: int
    """Nodes of the autograd graphs that these tensors keep."""

    def __str__(self) -> str:
        more = f"{self.more} more: " if 0 < self.more < self.group.count else ""
        nodes = f", with {self.more_nodes} more nodes in their autograd graph" if self.more_nodes else ""
        return f"{more}{self.group}{nodes}"

    @property
    def only_in_graph(self) -> bool:
        """Whether only an autograd graph keeps the tensors."""
        return bool(self.group.referrers) and all(each == NO_REFERRER for each in self.group.referrers)


def grown(before: LingeringTensors, after: LingeringTensors, *, least: int) -> tuple[str, ...]:
    """Describe the kinds with `least` more tensors or graph nodes, the likeliest cause first."""
    # A kind counts only if all shapes with its number of dimensions together grew as much. The tensors of a batch of
    # another length are of a new kind, but they take the place of other tensors.
    more: Counter[_Alike] = Counter()
    more_nodes: Counter[_Alike] = Counter()
    for sign, count in ((1, after), (-1, before)):
        for group in count.groups:
            more[_alike(group)] += sign * group.count
            more_nodes[_alike(group)] += sign * group.graph_nodes
    growths = _growths(before, after)
    found = [
        growth
        for growth in growths
        if min(growth.more, more[_alike(growth.group)]) >= least
        or min(growth.more_nodes, more_nodes[_alike(growth.group)]) >= least
    ]
    # If no kind grew enough, the leaked tensors may have many lengths.
    return _described(found or [each for each in growths if each.more > 0 and more[_alike(each.group)] >= least])


def frequent(counted: LingeringTensors, *, least: int) -> tuple[str, ...]:
    """Describe the kinds with `least` tensors or graph nodes, except for models and optimizers. Needs one count."""
    return _described(
        growth
        for growth in _growths(LingeringTensors(), counted)
        if max(growth.more, growth.more_nodes) >= least
        and not any(part in each for each in growth.group.referrers for part in _OF_MODELS)
    )


def _growths(before: LingeringTensors, after: LingeringTensors) -> list[_Growth]:
    counted = {group.kind: group for group in before.groups}
    growths = []
    for group in after.groups:
        was = counted.get(group.kind, _NONE)
        nodes = max(0, group.graph_nodes - was.graph_nodes)
        growths.append(_Growth(group, group.count - was.count, group.bytes - was.bytes, nodes))
    return growths


def _described(growths: Iterable[_Growth]) -> tuple[str, ...]:
    found = list(growths)
    # Tensors that only an autograd graph keeps are no cause: the tensors that keep the graph are. Without such tensors,
    # the size of a graph says nothing: the graph of a loss has as many nodes as its batch is long.
    by_graph = any(each.only_in_graph for each in found)
    found.sort(key=lambda each: (each.only_in_graph, -each.more_nodes if by_graph else 0, -each.more_bytes))
    return tuple(map(str, found[:_SUSPECTS_MAX]))


def _alike(group: TensorGroup) -> _Alike:
    return (len(group.shape), *group.kind[1:])
