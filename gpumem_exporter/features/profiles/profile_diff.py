"""The difference of two profiles: what grew, by stack and by owner.

Rows are compared by what they show: device, pool, owner and stack. Addresses are not part of a profile. In one process,
a line of code stays where it is, so stacks are equal or different. Two processes may run two versions of a script: a
stack that only one of them has is compared with the stack of the same functions in the same files.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from typing import Any, TypeVar

from gpumem_client.profile.profile_types import Owner
from gpumem_exporter.features.profiles.profile_lines import (
    PATH_KINDS,
    Line,
    ShownProfile,
    Stack,
    joined,
    without_numbers,
)

T = TypeVar("T", bound=Hashable)


def difference(before: ShownProfile, after: ShownProfile) -> ShownProfile:
    """Return what grew and what shrank from one profile to another."""
    old, new = before.lines, after.lines
    notes = []
    with_stacks = [any(line.stack for line in lines) for lines in (old, new)]
    if any(with_stacks) and not all(with_stacks):
        notes.append("One of the profiles has no stacks, so only owners are compared.")
        old, new = ([line._replace(stack=None) for line in lines] for lines in (old, new))
    devices, places = _devices(before.devices, after.devices)
    moved = [
        Line(places[line.device], line.pool, line.owner, line.stack, 0, 0, line.bytes, line.blocks) for line in old
    ]
    both = [*new, *moved]
    lines = joined(both, _key(both, lambda stack: stack.frames))
    if before.about["process"] != after.about["process"]:
        # A stack of one profile only is joined with its counterpart at other line numbers.
        rest = [line for line in lines if not line.before_bytes] + [line for line in lines if not line.bytes]
        by_names = _key(rest, lambda stack: tuple([each[:2] for each in stack.frames]))
        lines = [line for line in lines if line.bytes and line.before_bytes] + joined(rest, by_names)
    return ShownProfile(after.about, after.moment, lines, devices, notes, before.about)


def _devices(
    old: Sequence[Mapping[str, Any]], new: Sequence[Mapping[str, Any]]
) -> tuple[list[Mapping[str, Any]], list[int]]:
    """Return the devices of a difference, and the index of each device of the earlier profile in them.

    A job that started again may have another device: without one in common, the devices are paired in their order.
    """
    gpus = {device["uuid"]: device["gpu"] for device in (*old, *new) if device["gpu"]}
    known = {device["uuid"] for device in new}
    others = [device["uuid"] for device in old if device["uuid"] not in known]
    in_common = len(others) < len(old)
    uuids = [*(device["uuid"] for device in new), *(others if in_common else others[len(new) :])]
    places = [uuids.index(device["uuid"]) for device in old] if in_common else list(range(len(old)))
    return [{"gpu": gpus.get(uuid), "uuid": uuid} for uuid in uuids], places


def _key(lines: Sequence[Line], of_stack: Callable[[Stack], Hashable]) -> Callable[[Line], Hashable]:
    """Return what identifies a line: a module's tensor by its name, because only some profiles have the stack of it.

    The path of a module has its numbers. Other owners are compared without the numbers in their texts, such as the
    length of a list.
    """

    def of_owner(owner: Owner | None) -> Hashable:
        if owner is None or owner.kind in PATH_KINDS:
            return owner
        return owner._replace(name=without_numbers(owner.name))

    owners = _numbers({line.owner for line in lines}, of_owner)
    stacks = _numbers({line.stack for line in lines}, lambda stack: stack and of_stack(stack))

    def key(line: Line) -> Hashable:
        named = line.owner is not None and line.owner.kind in PATH_KINDS
        return line.device, line.pool, owners[line.owner], None if named else stacks[line.stack]

    return key


def _numbers(values: Iterable[T], key: Callable[[T], Hashable]) -> dict[T, int]:
    """Return the same number for values with the same key: the lines of a profile share their stacks and owners."""
    numbers: dict[Hashable, int] = {}
    return {value: numbers.setdefault(key(value), len(numbers)) for value in values}
