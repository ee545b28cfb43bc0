"""Compares two counts of the live tensors and ranks the kinds that grew: the suspects of a leak."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass

from gpumem_toolkit.leaks.live_tensors import Kind, LingeringTensors, TensorGroup
from gpumem_toolkit.leaks.referrers import NO_REFERRER

_SUSPECTS_MAX = 3
_SHAPES_MAX = 3
_SEARCHED_BY_BYTES = 6
_SEARCHED_BY_NODES = 2


@dataclass(frozen=True, slots=True)
class Growth:
    """The growth of one kind of tensors between two counts."""

    group: TensorGroup
    more: int
    more_bytes: int
    more_nodes: int
    """Nodes of the autograd graphs that these tensors keep."""

    def __str__(self) -> str:
        nodes = f", with {self.more_nodes} more nodes in their autograd graph" if self.more_nodes else ""
        return f"{self.more} more: {self.group}{nodes}" if self.more else f"{self.group}{nodes}"

    @property
    def held_by_graph(self) -> bool:
        """Whether only an autograd graph keeps the tensors."""
        return bool(self.group.referrers) and all(each == NO_REFERRER for each in self.group.referrers)


def grown(before: LingeringTensors, after: LingeringTensors, *, least: int) -> tuple[Growth, ...]:
    """Return the kinds that grew by `least` tensors or graph nodes, the likeliest cause first.

    If no single shape grew enough, shapes with the same number of dimensions are compared together, for batches of many
    lengths. The result then has the largest of them.
    """
    none = TensorGroup((), "", 0, 0, 0)
    counted = {group.kind: group for group in before.groups}
    growths: list[Growth] = []
    by_rank: dict[tuple[int, str, int, bool], list[Growth]] = defaultdict(list)
    for group in after.groups:
        was = counted.get(group.kind, none)
        more_nodes = max(0, group.graph_nodes - was.graph_nodes)
        growths.append(Growth(group, group.count - was.count, group.bytes - was.bytes, more_nodes))
        by_rank[(len(group.shape), *group.kind[1:])].append(growths[-1])
    found = [growth for growth in growths if growth.more >= least or growth.more_nodes >= least]
    for alike in by_rank.values() if not found else ():
        if sum(growth.more for growth in alike) >= least:
            found += _by_bytes(growth for growth in alike if growth.more > 0)[:_SHAPES_MAX]
    return _ranked(found)


def kinds_to_search(growths: Iterable[Growth]) -> frozenset[Kind]:
    """Return the few kinds whose referrers to search. A search for all kinds would take too long."""
    growths = list(growths)
    by_nodes = sorted(growths, key=lambda growth: -growth.more_nodes)
    searched = [*_by_bytes(growths)[:_SEARCHED_BY_BYTES], *by_nodes[:_SEARCHED_BY_NODES]]
    return frozenset(growth.group.kind for growth in searched)


def frequent(counted: LingeringTensors, *, least: int) -> tuple[Growth, ...]:
    """Return the kinds with `least` tensors or graph nodes, except those of models and optimizers. Needs one count."""
    return _ranked(
        Growth(group, 0, 0, group.graph_nodes if group.graph_nodes >= least else 0)
        for group in counted.groups
        if max(group.count, group.graph_nodes) >= least
        and not any("attribute _parameters of" in each or "attribute state of" in each for each in group.referrers)
    )


def descriptions(growths: Iterable[Growth]) -> tuple[str, ...]:
    """Return the text of the first suspects."""
    return tuple(map(str, growths))[:_SUSPECTS_MAX]


def _by_bytes(growths: Iterable[Growth]) -> list[Growth]:
    return sorted(growths, key=lambda growth: -growth.more_bytes)


def _ranked(growths: Iterable[Growth]) -> tuple[Growth, ...]:
    """Sort by bytes. If only an autograd graph keeps some tensors, the tensors that keep the graph come first."""
    growths = list(growths)
    by_graph = any(growth.held_by_graph for growth in growths)

    def rank(growth: Growth) -> tuple[int, bool, int]:
        nodes = growth.more_nodes if by_graph and not growth.held_by_graph else 0
        return -nodes, growth.held_by_graph, -(growth.more_bytes or growth.group.bytes)

    return tuple(sorted(growths, key=rank))
