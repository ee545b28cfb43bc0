"""What a profile shows: its blocks by stack and owner, with frames and names in place of indices.

Every format is made of these lines. A line of one profile has nothing before it; a line of a difference has the bytes
of both profiles.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, partial
from typing import Any, Literal, NamedTuple

from gpumem_client.profile.profile_types import Frame, Owner, Profile
from gpumem_exporter.errors import NoPeakError

Moment = Literal["live", "peak"]
Format = Literal["json", "pprof", "html"]
"""The formats of `profile_formats`."""

KINDS: Mapping[str, str] = {
    "parameters": "parameters",
    "gradients": "gradients",
    "optimizer_state": "optimizer state",
    "buffers": "buffers",
    "kv_cache": "KV cache",
    "tensors": "other tensors",
    "backward": "allocated in backward",
    "before": "allocated before the recording",
    "unsearched": "owner not searched: add --search",
    "unseen": "no visible owner",
    "merged": "many small blocks",
}
"""The words for the kinds of owners. Blocks without an owner, which only their stack explains, are `unseen`, too."""

PATH_KINDS = ("parameters", "gradients", "optimizer_state", "buffers", "kv_cache")
"""The kinds whose names end with the path of a module."""
TORCH = re.compile(
    r"(^|/)((site|dist)-packages/torch/"
    r"|torch/(nn|optim|autograd|utils|distributed|cuda|_dynamo|_inductor|_functorch|fx|amp|ao|library|random)[/.]"
    r"|torch/(_ops|_tensor|_compile|_jit_internal|functional|overrides|storage|serialization)\.py)"
)
_PACKAGES = re.compile(r"(^|/)((site|dist)-packages|lib/python3[.\d]*)/")
_INDEX = re.compile(r"(?<![^. ])\d+(?=\.|$)")
_NUMBER = re.compile(r"\d+")
# The end of a path in which folders are searched, and the longest name in which numbers are replaced: with texts of
# 4096 characters, both together took seconds of CPU.
_MAX_SEARCHED = 512
# The innermost frames of a stack that are shown.
_MAX_FRAMES = 128


@dataclass(frozen=True, slots=True, eq=False)
class Stack:
    """A stack with the frames that stand for it.

    The lines of a profile share their stacks, so a stack is equal to itself only: a hash of the frames would read all
    of them for each line.
    """

    frames: tuple[Frame, ...]
    """The innermost frame first; at least one."""
    user: Frame
    """The innermost frame outside of torch; the innermost one if all are in torch."""
    caller: Frame | None
    """The innermost frame outside of installed packages, if it is not the user frame itself."""


class Line(NamedTuple):
    """The blocks of one device with the same pool, owner and stack."""

    device: int
    """Index in the devices of the profile."""
    pool: str
    owner: Owner | None
    stack: Stack | None
    """None without a recorded stack."""
    bytes: int
    blocks: int
    before_bytes: int = 0
    before_blocks: int = 0

    @property
    def change_bytes(self) -> int:
        """By how much the line grew."""
        return self.bytes - self.before_bytes

    @property
    def kind(self) -> str:
        """The kind of the owner."""
        return self.owner.kind if self.owner else "unseen"


@dataclass(frozen=True, slots=True)
class ShownProfile:
    """What every format is made of: a profile at one moment, or the difference of two."""

    about: Mapping[str, Any]
    """The head of its document; of a difference, of the later profile."""
    moment: Moment
    lines: Sequence[Line]
    """Of a difference: the lines of both profiles, also the lines that are equal."""
    devices: Sequence[Mapping[str, Any]]
    """As in its document. Of a difference: the devices of the later profile, then the others of the earlier one."""
    notes: Sequence[str] = ()
    """What is missing and why, for people."""
    before: Mapping[str, Any] | None = None
    """The head of the earlier profile of a difference."""

    def ranked(self) -> list[Line]:
        """Return the lines from the largest change to the smallest; of equal ones, the largest line is first."""
        return sorted(self.lines, key=lambda line: (-abs(line.change_bytes), -line.bytes))


def stacks_of(stacks: Iterable[Sequence[Frame]]) -> Iterator[Stack | None]:
    """Yield a stack for the frames of each stack of a profile; None for one without frames."""
    # Stacks share their files, which are searched once.
    in_torch, in_packages = (cache(partial(_is_in, folders)) for folders in (TORCH, _PACKAGES))
    for frames in stacks:
        if not frames:
            yield None
            continue
        user = next((frame for frame in frames if not in_torch(frame.file)), frames[0])
        own = next((each for each in frames if not in_torch(each.file) and not in_packages(each.file)), None)
        yield Stack(tuple(frames), user, None if own == user else own)


def lines_of(profile: Profile, moment: Moment = "live") -> list[Line]:
    """Return the lines of a profile at its end, or at its highest moment.

    Raises NoPeakError for the highest moment of a profile that was taken without a recording.
    """
    if moment == "peak" and not has_peak(profile):
        raise NoPeakError(f"profile {profile.id} was taken without a recording, so it has no highest moment")
    lines = []
    stacks = [*stacks_of([profile.frames[frame] for frame in stack[:_MAX_FRAMES]] for stack in profile.stacks)]
    for row in profile.rows:
        size, blocks = (row.live_bytes, row.live_blocks) if moment == "live" else (row.peak_bytes, row.peak_blocks)
        if size:
            owner = None if row.owner is None else profile.owners[row.owner]
            stack = None if row.stack is None else stacks[row.stack]
            lines.append(Line(row.device, row.pool, owner, stack, size, blocks or 0))
    return lines


def joined(lines: Iterable[Line], key: Callable[[Line], Hashable]) -> list[Line]:
    """Return one line for each key: the first one, with the sizes of all."""
    return [_with_sizes(of_key[0], of_key) for of_key in _by(key, lines)]


def _by(key: Callable[[Line], Hashable], lines: Iterable[Line]) -> Iterable[list[Line]]:
    found: dict[Hashable, list[Line]] = {}
    for line in lines:
        found.setdefault(key(line), []).append(line)
    return found.values()


def _with_sizes(line: Line, lines: Iterable[Line]) -> Line:
    """Return a line with the sums of the sizes of these lines."""
    return Line(*line[:4], *map(sum, zip(*(each[4:] for each in lines), strict=True)))


def bounded(lines: Iterable[Line], encode: Callable[[Line], bytes], most_bytes: int) -> Iterator[bytes]:
    """Yield encoded lines until they are this long, and then the sums of the others.

    Only the line that reaches the limit may exceed it. Each line is written in full: without a limit, a compressed
    profile of 1 MiB could become gigabytes.
    """
    others = iter(lines)
    for line in others:
        yield (text := encode(line))
        most_bytes -= len(text)
        if most_bytes < 0:
            break
    for merged in joined(others, lambda line: line[:2]):
        yield encode(merged._replace(owner=Owner("merged"), stack=None))


def has_peak(profile: Profile) -> bool:
    """Return whether a profile has its highest moment."""
    return any(device.peak_bytes is not None for device in profile.devices)


def _is_in(folders: re.Pattern[str], file: str) -> bool:
    return folders.search(file, len(file) - _MAX_SEARCHED) is not None


def place(frame: Frame | None) -> str | None:
    """Return `train.py:12 in main`; None without a frame."""
    if frame is None:
        return None
    return f"{frame_place(frame._replace(file=frame.file.rpartition('/')[2] or frame.file))} in {frame.function}"


def frame_text(frame: Frame) -> str:
    """Return `main (train.py:12)`."""
    return f"{frame.function} ({frame_place(frame)})"


def frame_place(frame: Frame) -> str:
    """Return `train.py:12`."""
    return f"{frame.file}:{frame.line}" if frame.line else frame.file


def kind_text(kind: str | None) -> str:
    """Return the words for a kind of owner, or for blocks without an owner."""
    return KINDS.get(kind, kind) if kind else KINDS["unseen"]


def owner_name(owner: Owner) -> str:
    """Return the name of an owner for a list: `model.layers.*.weight` for the same parameter of every layer."""
    is_path = owner.kind in PATH_KINDS and len(owner.name) <= _MAX_SEARCHED
    return _INDEX.sub("*", owner.name) if is_path else owner.name


def without_numbers(name: str) -> str:
    """Return a name with `#` for each number."""
    return _NUMBER.sub("#", name) if len(name) <= _MAX_SEARCHED else name


def by_kind(lines: Iterable[Line]) -> list[Line]:
    """Return the kinds of owners, the largest change first."""
    return _groups(lines, lambda line: line.kind)


def by_owner(lines: Iterable[Line]) -> list[Line]:
    """Return the owners, the largest change first. The tensors of repeated modules are one owner: see `owner_name`.

    Blocks without an owner are grouped by line of code.
    """
    names: dict[Owner, str] = {}  # a search in the names of all rows could take an hour

    def key(line: Line) -> Hashable:
        if line.owner is None:
            return line.stack and line.stack.user
        if line.owner not in names:
            names[line.owner] = owner_name(line.owner)
        return line.owner.kind, names[line.owner]

    return _groups(lines, key)


def by_code(lines: Iterable[Line]) -> list[Line]:
    """Return the lines of code outside of torch that allocated the blocks, the largest change first."""
    return _groups((line for line in lines if line.stack), lambda line: line.stack and line.stack.user)


def _groups(lines: Iterable[Line], key: Callable[[Line], Hashable]) -> list[Line]:
    """Return one line for each key, with the sizes of all, which are shown together.

    It has the owner of the line with the largest change (of equal ones, a line with an owner), and the stack of the one
    with the largest change among the lines with a stack.
    """
    groups = []
    for of_key in _by(key, lines):
        largest = max(of_key, key=_weight)
        code = max((line for line in of_key if line.stack), key=_weight, default=largest)
        groups.append(_with_sizes(largest._replace(stack=code.stack), of_key))
    return sorted(groups, key=lambda group: -abs(group.change_bytes))


def _weight(line: Line) -> tuple[int, bool]:
    return abs(line.change_bytes), line.kind != "unseen"
