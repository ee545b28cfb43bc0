"""The difference of two profiles: what grew, by stack and by owner.

Rows are compared by what they show: device, pool, owner and stack. Addresses are not part of a profile. In one process,
a line of code stays where it is, so stacks are equal or different. Two processes may run two versions of a script: a
stack that only one of them has is compared with the stack of the same functions in the same files.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass, fields
from itertools import chain
from typing import TypeAlias

from gpumem_client.profile.model import Frame
from gpumem_exporter.features.profiles.profile_lines import PATH_KINDS, Line, Moment, joined, without_numbers
from gpumem_exporter.features.profiles.stored_profile import ProfileFacts, SavedProfile, StoredProfile

Comparable: TypeAlias = StoredProfile | SavedProfile


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


def at_moment(profile: StoredProfile, moment: Moment) -> SavedProfile:
    """Return a profile with the lines of one moment, which takes less memory.

    Raises NoPeakError for the highest moment if it was taken without a recording.
    """
    facts = {each.name: getattr(profile, each.name) for each in fields(ProfileFacts)}
    return SavedProfile(**facts, saved_lines=tuple(profile.lines(moment)))


def difference(before: Comparable, after: Comparable, moment: Moment = "live") -> Difference:
    """Return what grew and what shrank from one profile to another; a `SavedProfile` has the lines of this moment.

    Raises NoPeakError for the highest moment if one of the profiles was taken without a recording.
    """
    old, new = before.lines(moment), after.lines(moment)
    notes = []
    with_stacks = [any(line.stack for line in lines) for lines in (old, new)]
    if any(with_stacks) and not all(with_stacks):
        notes.append("One of the profiles has no stacks, so only owners are compared.")
        old, new = ([line._replace(stack=()) for line in lines] for lines in (old, new))
    uuids, places = _devices(before.uuids, after.uuids)
    moved = (
        Line(places[line.device], line.pool, line.owner, line.stack, 0, 0, line.bytes, line.blocks) for line in old
    )
    numbers = _StackNumbers()
    lines = joined(chain(new, moved), lambda line: _exact(line, numbers))
    if before.process_key != after.process_key:
        lines = _with_moved_code(lines, numbers)
    return Difference(before, after, moment, tuple(lines), uuids, tuple(notes))


class _StackNumbers:
    """Gives each distinct stack a number, once: the lines of a profile share their stacks."""

    def __init__(self) -> None:
        # By the ids of stacks, which the lines keep.
        self._exact: dict[int, int] = {}
        self._without_lines: dict[int, int] = {}
        self._stacks: dict[tuple[Frame, ...], int] = {}
        self._functions: dict[Hashable, int] = {}

    def exact(self, stack: tuple[Frame, ...]) -> int:
        """Return the number of a stack."""
        number = self._exact.get(id(stack))
        if number is None:
            number = self._exact[id(stack)] = self._stacks.setdefault(stack, len(self._stacks))
        return number

    def without_lines(self, stack: tuple[Frame, ...]) -> int:
        """Return the number of a stack without its line numbers."""
        number = self._without_lines.get(id(stack))
        if number is None:
            functions = tuple([frame[:2] for frame in stack])
            number = self._without_lines[id(stack)] = self._functions.setdefault(functions, len(self._functions))
        return number


def _devices(old: Sequence[str], new: Sequence[str]) -> tuple[tuple[str, ...], list[int]]:
    """Return the devices of a difference, and the index of each device of the earlier profile in them.

    A job that started again may have another device: without one in common, the devices are paired in their order.
    """
    if not set(old) & set(new):
        return (*new, *old[len(new) :]), list(range(len(old)))
    uuids = tuple(dict.fromkeys((*new, *old)))
    return uuids, [uuids.index(uuid) for uuid in old]


def _exact(line: Line, numbers: _StackNumbers) -> Hashable:
    """What identifies a line: a module's tensor by its name, because only some profiles have the stack of it."""
    named = line.owner is not None and line.owner.kind in PATH_KINDS
    return (line.device, line.pool, _owner(line), None if named else numbers.exact(line.stack))


def _owner(line: Line) -> Hashable:
    """The owner without the numbers in its text, such as the length of a list. The path of a module has its numbers."""
    if line.owner is None or line.owner.kind in PATH_KINDS:
        return line.owner
    return line.owner._replace(name=without_numbers(line.owner.name))


def _with_moved_code(lines: Sequence[Line], numbers: _StackNumbers) -> list[Line]:
    """Return lines in which a stack of one profile only is joined with its counterpart at other line numbers."""
    in_both = [line for line in lines if line.bytes and line.before_bytes]
    later = (line for line in lines if not line.before_bytes)
    earlier = (line for line in lines if not line.bytes)
    return in_both + joined(
        chain(later, earlier),
        lambda line: (line.device, line.pool, _owner(line), numbers.without_lines(line.stack)),
    )
