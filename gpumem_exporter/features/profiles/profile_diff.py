"""The difference of two profiles: what grew, by stack and by owner.

Rows are compared by what they show: device, pool, owner and stack. Addresses are not part of a profile. In one process,
a line of code stays where it is, so stacks are equal or different. Two processes may run two versions of a script: a
stack that only one of them has is compared with the stack of the same functions in the same files.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass
from typing import TypeVar

from gpumem_client.profile.profile_types import Owner
from gpumem_exporter.features.profiles.profile_lines import PATH_KINDS, Line, Moment, joined, without_numbers
from gpumem_exporter.features.profiles.stored_profile import ProfileAtMoment, ProfileFacts

T = TypeVar("T", bound=Hashable)


@dataclass(frozen=True, slots=True)
class Difference:
    """Two profiles, and the lines that differ."""

    before: ProfileFacts
    after: ProfileFacts
    moment: Moment
    lines: tuple[Line, ...]
    """The lines of both profiles, also the lines that are equal."""
    uuids: tuple[str, ...]
    """The devices: of `after`, then the others of `before`."""
    notes: tuple[str, ...]

    @property
    def gpus(self) -> dict[str, str]:
        """The NVML index of each device by UUID; a device whose index is unknown is left out."""
        return self.before.gpus | self.after.gpus


def difference(before: ProfileAtMoment, after: ProfileAtMoment) -> Difference:
    """Return what grew and what shrank from one profile to another."""
    old, new = before.lines, after.lines
    notes = []
    with_stacks = [any(line.stack for line in lines) for lines in (old, new)]
    if any(with_stacks) and not all(with_stacks):
        notes.append("One of the profiles has no stacks, so only owners are compared.")
        old, new = (tuple([line._replace(stack=None) for line in lines]) for lines in (old, new))
    uuids, places = _devices(before.uuids, after.uuids)
    moved = [
        Line(places[line.device], line.pool, line.owner, line.stack, 0, 0, line.bytes, line.blocks) for line in old
    ]
    both = [*new, *moved]
    lines = joined(both, _exact(both))
    if before.process_key != after.process_key:
        lines = _with_moved_code(lines)
    return Difference(before, after, after.moment, tuple(lines), uuids, tuple(notes))


def _devices(old: Sequence[str], new: Sequence[str]) -> tuple[tuple[str, ...], list[int]]:
    """Return the devices of a difference, and the index of each device of the earlier profile in them.

    A job that started again may have another device: without one in common, the devices are paired in their order.
    """
    if not set(old) & set(new):
        return (*new, *old[len(new) :]), list(range(len(old)))
    uuids = tuple(dict.fromkeys((*new, *old)))
    return uuids, [uuids.index(uuid) for uuid in old]


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
