"""The difference of two profiles: what grew, by stack and by owner.

Rows are compared by what they show: device, pool, owner and stack. Addresses are not part of a profile. In one process,
a line of code stays where it is, so stacks are equal or different. Two processes may run two versions of a script: a
stack that only one of them has is compared with the stack of the same functions in the same files.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Sequence
from typing import TypeVar

from gpumem_client.profile.profile_types import Owner, ProfiledDevice
from gpumem_exporter.features.profiles.profile_lines import PATH_KINDS, Line, joined, without_numbers
from gpumem_exporter.features.profiles.stored_profile import ShownProfile

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
    lines = joined(both, _exact(both))
    if before.facts.process_key != after.facts.process_key:
        lines = _with_moved_code(lines)
    return ShownProfile(after.facts, after.moment, lines, devices, tuple(notes), before=before.facts)


def _devices(
    old: Sequence[ProfiledDevice], new: Sequence[ProfiledDevice]
) -> tuple[tuple[ProfiledDevice, ...], list[int]]:
    """Return the devices of a difference, and the index of each device of the earlier profile in them.

    A job that started again may have another device: without one in common, the devices are paired in their order.
    """
    known = {device.uuid for device in new}
    others = [device for device in old if device.uuid not in known]
    if len(others) == len(old):
        return (*new, *old[len(new) :]), list(range(len(old)))
    uuids = [device.uuid for device in (*new, *others)]
    return (*new, *others), [uuids.index(device.uuid) for device in old]


def _exact(lines: Sequence[Line]) -> Callable[[Line], Hashable]:
    """What identifies a line: a module's tensor by its name, because only some profiles have the stack of it."""
    owners = _owners(lines)
    stacks = _numbers({line.stack for line in lines}, lambda stack: stack and stack.frames)

    def key(line: Line) -> Hashable:
        named = line.owner is not None and line.owner.kind in PATH_KINDS
        return line.device, line.pool, owners[line.owner], None if named else stacks[line.stack]

    return key


def _with_moved_code(lines: Sequence[Line]) -> list[Line]:
    """Return lines in which a stack of one profile only is joined with its counterpart at other line numbers."""
    in_both = [line for line in lines if line.bytes and line.before_bytes]
    rest = [line for line in lines if not line.before_bytes] + [line for line in lines if not line.bytes]
    owners = _owners(rest)
    stacks = _numbers({line.stack for line in rest}, lambda stack: stack and tuple([each[:2] for each in stack.frames]))
    return in_both + joined(rest, lambda line: (line.device, line.pool, owners[line.owner], stacks[line.stack]))


def _owners(lines: Iterable[Line]) -> dict[Owner | None, int]:
    """Return the numbers of owners without the numbers in their texts, such as the length of a list.

    The path of a module has its numbers.
    """

    def key(owner: Owner | None) -> Hashable:
        if owner is None or owner.kind in PATH_KINDS:
            return owner
        return owner._replace(name=without_numbers(owner.name))

    return _numbers({line.owner for line in lines}, key)


def _numbers(values: Iterable[T], key: Callable[[T], Hashable]) -> dict[T, int]:
    """Return the same number for values with the same key: the lines of a profile share their stacks and owners."""
    numbers: dict[Hashable, int] = {}
    return {value: numbers.setdefault(key(value), len(numbers)) for value in values}
