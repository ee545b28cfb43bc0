"""The difference of two profiles: what grew, by stack and by owner.

Rows are compared by what they show: device, pool, owner and stack. Addresses are not part of a profile. In one process,
a line of code stays where it is, so stacks are equal or different. Two processes may run two versions of a script: a
stack that only one of them has is compared with the stack of the same functions in the same files.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass
from typing import TypeAlias

from gpumem_exporter.profiles.lines import PATH_KINDS, Line, Moment, summed, without_numbers
from gpumem_exporter.profiles.model import SavedProfile, StoredProfile

Comparable: TypeAlias = StoredProfile | SavedProfile


@dataclass(frozen=True, slots=True)
class Difference:
    """Two profiles, and the lines that differ."""

    before: Comparable
    after: Comparable
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


def difference(before: Comparable, after: Comparable, moment: Moment = "live") -> Difference:
    """Return what grew and what shrank from one profile to another.

    Raises NoPeakError for the highest moment if one of the profiles was taken without a recording.
    """
    old, new = before.lines(moment), after.lines(moment)
    notes = []
    with_stacks = [any(line.stack for line in lines) for lines in (old, new)]
    if any(with_stacks) and not all(with_stacks):
        notes.append("One of the profiles has no stacks, so only owners are compared.")
        old, new = ([line._replace(stack=()) for line in lines] for lines in (old, new))
    uuids, places = _devices(before.uuids, after.uuids)
    moved = [
        line._replace(device=places[line.device], bytes=0, blocks=0, before_bytes=line.bytes, before_blocks=line.blocks)
        for line in old
    ]
    lines = _joined((*new, *moved), _exact)
    if before.process_key != after.process_key:
        lines = _with_moved_code(lines)
    return Difference(before, after, moment, tuple(lines), uuids, tuple(notes))


def _devices(old: Sequence[str], new: Sequence[str]) -> tuple[tuple[str, ...], list[int]]:
    """Return the devices of a difference, and the index of each device of the earlier profile in them.

    A job that started again may have another device: without one in common, the devices are paired in their order.
    """
    if not set(old) & set(new):
        return (*new, *old[len(new) :]), list(range(len(old)))
    uuids = tuple(dict.fromkeys((*new, *old)))
    return uuids, [uuids.index(uuid) for uuid in old]


def _exact(line: Line) -> Hashable:
    """What identifies a line: a module's tensor by its name, because only some profiles have the stack of it."""
    named = line.owner is not None and line.owner.kind in PATH_KINDS
    return (line.device, line.pool, _owner(line), () if named else line.stack)


def _without_line_numbers(line: Line) -> Hashable:
    return (line.device, line.pool, _owner(line), tuple((frame.function, frame.file) for frame in line.stack))


def _owner(line: Line) -> Hashable:
    """The owner without the numbers in its text, such as the length of a list. The path of a module has its numbers."""
    if line.owner is None or line.owner.kind in PATH_KINDS:
        return line.owner
    return line.owner._replace(name=without_numbers(line.owner.name))


def _joined(lines: Iterable[Line], key: Callable[[Line], Hashable]) -> list[Line]:
    """Return one line for each key, with the stack and the owner of its first line."""
    found: dict[Hashable, list[Line]] = {}
    for line in lines:
        found.setdefault(key(line), []).append(line)
    return [summed(members) for members in found.values()]


def _with_moved_code(lines: Sequence[Line]) -> list[Line]:
    """Return lines in which a stack of one profile only is joined with its counterpart at other line numbers."""
    in_both = [line for line in lines if line.bytes and line.before_bytes]
    later = [line for line in lines if not line.before_bytes]
    earlier = [line for line in lines if not line.bytes]
    return [*in_both, *_joined((*later, *earlier), _without_line_numbers)]
