"""Compares two counts of the live tensors and ranks the kinds that grew: the suspects of a leak."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from gpumem_toolkit.leaks.live_tensors import Kind, LingeringTensors, TensorGroup
from gpumem_toolkit.leaks.referrers import NO_REFERRER

__all__ = ["Growth", "descriptions", "frequent", "grown", "kinds_to_search"]

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


def grown(before: LingeringTensors, after: LingeringTensors, *, least: int) -> tuple[Growth, ...]:
    """Return the kinds that grew by `least` tensors or graph nodes, the likeliest cause first.

    If no single shape grew enough, shapes with the same number of dimensions are compared together, for batches of many
    lengths. The result then has the largest of them.
    """
    counted = {group.kind: group for group in before.groups}
    growths = [_compare(counted.get(group.kind), group) for group in after.groups]
    found = [growth for growth in growths if growth.more >= least or growth.more_nodes >= least]
    return _ranked(found or _grown_by_rank(growths, least))


def kinds_to_search(growths: Iterable[Growth]) -> frozenset[Kind]:
    """Return the few kinds whose referrers to search. A search for all kinds would take too long."""
    growths = list(growths)
    by_bytes = sorted(growths, key=lambda growth: -growth.more_bytes)[:_SEARCHED_BY_BYTES]
    by_nodes = sorted(growths, key=lambda growth: -growth.more_nodes)[:_SEARCHED_BY_NODES]
    return frozenset(growth.group.kind for growth in [*by_bytes, *by_nodes])


def frequent(counted: LingeringTensors, *, least: int) -> tuple[Growth, ...]:
    """Return the kinds with `least` tensors or graph nodes, except those of models and optimizers. Needs one count."""
    return _ranked(
        Growth(group, 0, 0, group.graph_nodes if group.graph_nodes >= least else 0)
        for group in counted.groups
        if max(group.count, group.graph_nodes) >= least and not _held_by_model(group)
    )


def descriptions(growths: Iterable[Growth]) -> tuple[str, ...]:
    """Return the text of the first suspects."""
    return tuple(map(str, growths))[:_SUSPECTS_MAX]


def _ranked(growths: Iterable[Growth]) -> tuple[Growth, ...]:
    """Sort by bytes. If only an autograd graph keeps some tensors, the tensors that keep the graph come first."""
    growths = list(growths)
    by_graph = any(_held_by_graph(growth.group) for growth in growths)

    def rank(growth: Growth) -> tuple[int, bool, int]:
        nodes = growth.more_nodes if by_graph and not _held_by_graph(growth.group) else 0
        return -nodes, _held_by_graph(growth.group), -(growth.more_bytes or growth.group.bytes)

    return tuple(sorted(growths, key=rank))


def _compare(before: TensorGroup | None, after: TensorGroup) -> Growth:
    if before is None:
        return Growth(after, after.count, after.bytes, after.graph_nodes)
    more_nodes = max(0, after.graph_nodes - before.graph_nodes)
    return Growth(after, after.count - before.count, after.bytes - before.bytes, more_nodes)


def _grown_by_rank(growths: list[Growth], least: int) -> list[Growth]:
    by_rank: dict[tuple[int, str, int, bool], list[Growth]] = {}
    for growth in growths:
        group = growth.group
        by_rank.setdefault((len(group.shape), group.dtype, group.device, group.with_graph > 0), []).append(growth)
    found: list[Growth] = []
    for alike in by_rank.values():
        if sum(growth.more for growth in alike) >= least:
            more = sorted((growth for growth in alike if growth.more > 0), key=lambda growth: -growth.more_bytes)
            found += more[:_SHAPES_MAX]
    return found


def _held_by_graph(group: TensorGroup) -> bool:
    return bool(group.referrers) and all(referrer == NO_REFERRER for referrer in group.referrers)


def _held_by_model(group: TensorGroup) -> bool:
    return any("attribute _parameters of" in each or "attribute state of" in each for each in group.referrers)
