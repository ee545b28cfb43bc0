"""Who leaks: what has become more between two walks over the live tensors. Pure, but for the walks' own figures."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

from gpumem_exporter.client.leaks.live_tensors import Kind, LingeringTensors, TensorGroup
from gpumem_exporter.client.leaks.referrers import NOBODY

__all__ = ["Growth", "growing", "held", "numerous", "suspicions", "worth_asking"]

_SUSPECTS_MAX = 3
_MANY_SHAPES = 3
_ASKED_BY_BYTES = 6
_ASKED_BY_NODES = 2


@dataclass(frozen=True, slots=True)
class Growth:
    """A kind of tensors that has become more."""

    group: TensorGroup
    more: int
    more_bytes: int
    more_nodes: int

    def __str__(self) -> str:
        nodes = f", and {self.more_nodes} more nodes in their autograd graph" if self.more_nodes else ""
        return f"{self.more} more of these: {self.group}{nodes}" if self.more else f"{self.group}{nodes}"


def growing(before: LingeringTensors, after: LingeringTensors, *, least: int) -> tuple[Growth, ...]:
    """The kinds that have at least so many more tensors, or nodes in their graphs, the likeliest culprit first.

    Where no shape has, but one number of dimensions has (each step has other lengths), its newest shapes are told.
    """
    counted = {group.kind: group for group in before.groups}
    grown = [_compare(counted.get(group.kind), group) for group in after.groups]
    found = [growth for growth in grown if growth.more >= least or growth.more_nodes >= least]
    if not found:
        found = _by_dimensions(grown, least)
    return _ranked(found)


def worth_asking(found: Iterable[Growth]) -> frozenset[Kind]:
    """Of which kinds to find out who holds them: of all at once it would take too long, and say too little of each."""
    growths = list(found)
    by_bytes = sorted(growths, key=lambda growth: -growth.more_bytes)[:_ASKED_BY_BYTES]
    by_nodes = sorted(growths, key=lambda growth: -growth.more_nodes)[:_ASKED_BY_NODES]
    return frozenset(growth.group.kind for growth in [*by_bytes, *by_nodes])


def held(found: Iterable[Growth], walked: LingeringTensors) -> tuple[Growth, ...]:
    """The same with their holders, which a walk over some of these kinds told; the likeliest culprit first."""
    holders = {group.kind: group.referrers for group in walked.groups}
    return _ranked(
        replace(growth, group=replace(growth.group, referrers=holders.get(growth.group.kind, ()))) for growth in found
    )


def numerous(walked: LingeringTensors, *, least: int) -> tuple[Growth, ...]:
    """Where there was no walk before: the kinds of which there are that many, and that no model or optimizer holds."""
    found = [
        Growth(group, 0, 0, group.graph_nodes if group.graph_nodes >= least else 0)
        for group in walked.groups
        if (group.count >= least or group.graph_nodes >= least) and not _of_a_model(group)
    ]
    return _ranked(found)


def suspicions(found: Iterable[Growth]) -> tuple[str, ...]:
    """The first of them, in words."""
    return tuple(str(growth) for growth in found)[:_SUSPECTS_MAX]


def _ranked(found: Iterable[Growth]) -> tuple[Growth, ...]:
    """Tensors that nobody refers to hang on a graph: whoever keeps the graph that grew most is the cause then."""
    growths = list(found)
    by_graph = any(_held_by_nobody(growth.group) for growth in growths)

    def rank(growth: Growth) -> tuple[int, bool, int]:
        nodes = growth.more_nodes if by_graph and not _held_by_nobody(growth.group) else 0
        return -nodes, _held_by_nobody(growth.group), -(growth.more_bytes or growth.group.bytes)

    return tuple(sorted(growths, key=rank))


def _compare(before: TensorGroup | None, after: TensorGroup) -> Growth:
    if before is None:
        return Growth(after, after.count, after.bytes, after.graph_nodes)
    return Growth(
        after, after.count - before.count, after.bytes - before.bytes, max(0, after.graph_nodes - before.graph_nodes)
    )


def _by_dimensions(grown: list[Growth], least: int) -> list[Growth]:
    alike: dict[tuple[int, str, int, bool], list[Growth]] = {}
    for growth in grown:
        group = growth.group
        alike.setdefault((len(group.shape), group.dtype, group.device, group.with_graph > 0), []).append(growth)
    found: list[Growth] = []
    for growths in alike.values():
        if sum(growth.more for growth in growths) >= least:
            found += sorted((each for each in growths if each.more > 0), key=lambda each: -each.more_bytes)[
                :_MANY_SHAPES
            ]
    return found


def _held_by_nobody(group: TensorGroup) -> bool:
    return bool(group.referrers) and all(referrer == NOBODY for referrer in group.referrers)


def _of_a_model(group: TensorGroup) -> bool:
    return any("attribute _parameters of" in each or "attribute state of" in each for each in group.referrers)
