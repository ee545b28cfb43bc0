"""What a profile shows: its blocks by stack and owner, with frames and names in place of indices.

Every format is made of these lines. A line of one profile has nothing before it; a line of a difference has the bytes
of both profiles.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from functools import cache
from typing import Literal, NamedTuple

from gpumem_client.profile.model import Frame, Owner, Profile
from gpumem_exporter.errors import NoPeakError

Moment = Literal["live", "peak"]

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
_TORCH = re.compile(
    r"(^|/)((site|dist)-packages/torch/"
    r"|torch/(nn|optim|autograd|utils|distributed|cuda|_dynamo|_inductor|_functorch|fx|amp|ao|library|random)[/.]"
    r"|torch/(_ops|_tensor|_compile|_jit_internal|functional|overrides|storage|serialization)\.py)"
)
_PACKAGES = re.compile(r"(^|/)((site|dist)-packages|lib/python3[.\d]*)/")
_INDEX = re.compile(r"(?<![^. ])\d+(?=\.|$)")
_NUMBER = re.compile(r"\d+")
# The innermost frames of a stack that are shown.
_MAX_FRAMES = 128
# The length of the names of all owners' modules. The names in a path of 4096 characters could take 4 MiB: without the
# limit, a profile of 1 KiB whose names have 2,000 dots became a page of 240 MB.
_MAX_PATHS_LENGTH = 4 << 20


class Line(NamedTuple):
    """The blocks of one device with the same pool, owner and stack."""

    device: int
    """Index in the devices of the profile."""
    pool: str
    owner: Owner | None
    stack: tuple[Frame, ...]
    """The innermost frame first; empty without a recorded stack."""
    bytes: int
    blocks: int
    before_bytes: int = 0
    before_blocks: int = 0

    @property
    def change_bytes(self) -> int:
        """By how much the line grew."""
        return self.bytes - self.before_bytes

    @property
    def change_blocks(self) -> int:
        """By how many blocks the line grew."""
        return self.blocks - self.before_blocks


def lines_of(profile: Profile, moment: Moment = "live") -> list[Line]:
    """Return the lines of a profile at its end, or at its highest moment.

    Raises NoPeakError for the highest moment of a profile that was taken without a recording.
    """
    if moment == "peak" and not has_peak(profile):
        raise NoPeakError(f"profile {profile.id} was taken without a recording, so it has no highest moment")
    stacks = [tuple(profile.frames[frame] for frame in stack[:_MAX_FRAMES]) for stack in profile.stacks]
    lines = []
    for row in profile.rows:
        size, blocks = (row.live_bytes, row.live_blocks) if moment == "live" else (row.peak_bytes, row.peak_blocks)
        if size:
            owner = None if row.owner is None else profile.owners[row.owner]
            stack = () if row.stack is None else stacks[row.stack]
            lines.append(Line(row.device, row.pool, owner, stack, size, blocks or 0))
    return lines


def joined(lines: Iterable[Line], key: Callable[[Line], Hashable]) -> list[Line]:
    """Return one line for each key: the first one, with the sizes of all."""
    found: dict[Hashable, Line] = {}
    for line in lines:
        first = found.setdefault(identity := key(line), line)
        if first is not line:
            sizes = (one + other for one, other in zip(first[4:], line[4:], strict=True))
            found[identity] = Line(*first[:4], *sizes)
    return list(found.values())


def has_peak(profile: Profile) -> bool:
    """Return whether a profile has its highest moment."""
    return any(device.peak_bytes is not None for device in profile.devices)


def is_torch(frame: Frame) -> bool:
    """Return whether a frame is in torch's folder."""
    return _is_in_torch(frame.file)


# The rows of a profile share its files and names: without caches, the searches in them could take an hour.


@cache
def _is_in_torch(file: str) -> bool:
    return _TORCH.search(file) is not None


@cache
def _is_in_package(file: str) -> bool:
    return _is_in_torch(file) or _PACKAGES.search(file) is not None


@cache
def _without_indices(name: str) -> str:
    return _INDEX.sub("*", name)


@cache
def without_numbers(name: str) -> str:
    """Return a text with `#` for each number."""
    return _NUMBER.sub("#", name)


def forget_names() -> None:
    """Release the texts and the stacks of the profiles that were shown."""
    _shown_frames.clear()
    for each in (_is_in_torch, _is_in_package, _without_indices, without_numbers):
        each.cache_clear()


class _ShownFrames(NamedTuple):
    """The frames that stand for a stack, which it keeps: another stack would have its id."""

    stack: Sequence[Frame]
    user: Frame | None
    caller: Frame | None


_shown_frames: dict[int, _ShownFrames] = {}
"""By the id of the stack: the rows of a profile share their stacks, and a hash reads all frames."""


def _frames_of(stack: Sequence[Frame]) -> _ShownFrames:
    known = _shown_frames.get(id(stack))
    if known is None:
        user = next((frame for frame in stack if not _is_in_torch(frame.file)), stack[0] if stack else None)
        own = next((frame for frame in stack if not _is_in_package(frame.file)), None)
        known = _shown_frames[id(stack)] = _ShownFrames(stack, user, None if own == user else own)
    return known


def user_frame(stack: Sequence[Frame]) -> Frame | None:
    """Return the innermost frame outside of torch; the innermost one if all are in torch."""
    return _frames_of(stack).user


def caller(stack: Sequence[Frame]) -> Frame | None:
    """Return the innermost frame outside of installed packages, if it is not the user frame itself."""
    return _frames_of(stack).caller


def place(frame: Frame | None) -> str:
    """Return `train.py:12 in main`; empty without a frame."""
    if frame is None:
        return ""
    file = frame.file.rpartition("/")[2] or frame.file
    return f"{file}:{frame.line} in {frame.function}" if frame.line else f"{file} in {frame.function}"


def kind_text(kind: str | None) -> str:
    """Return the words for a kind of owner, or for blocks without an owner."""
    return KINDS.get(kind, kind) if kind else KINDS["unseen"]


def owner_name(owner: Owner) -> str:
    """Return the name of an owner for a list: `model.layers.*.weight` for the same parameter of every layer."""
    return _without_indices(owner.name) if owner.kind in PATH_KINDS else owner.name


class OwnerPaths:
    """The names of owners from the kind to the full name.

    The path of a module is one name for each module: `parameters`, `model`, `model.layers`, `model.layers.0`, so that
    a reader of stacks adds up each module. When the names of a file are too long, the owners that follow have one name.
    """

    def __init__(self) -> None:
        self._length = 0

    def of(self, owner: Owner) -> list[str]:
        """Return the names of an owner."""
        names = [kind_text(owner.kind), *([owner.name] if owner.name else [])]
        if owner.kind not in PATH_KINDS or not owner.name:
            return names
        state, _, path = owner.name.rpartition(" ")  # `Adam.exp_avg model.layers.0.weight`
        self._length += len(path) * (path.count(".") + 2) // 2
        if self._length > _MAX_PATHS_LENGTH:
            return names
        parts = path.split(".")
        return [*names[:1], *([state] if state else []), *(".".join(parts[: i + 1]) for i in range(len(parts)))]


def frames(line: Line) -> Iterator[str]:
    """Yield the frames of a line as text, the outermost first: `main (train.py:12)`."""
    for function, file, number in reversed(line.stack):
        yield f"{function} ({file}:{number})" if number else f"{function} ({file})"


def stack_names(line: Line, paths: OwnerPaths) -> list[str]:
    """Return the frames of a line as text, the outermost first; without a stack, the names of its owner."""
    return list(frames(line)) or paths.of(line.owner or Owner("unseen"))


class Group(NamedTuple):
    """Lines that are shown together, such as the lines with the same owner."""

    bytes: int
    blocks: int
    before_bytes: int
    largest: Line
    """The line with the largest change, of equal ones a line with an owner."""
    code: Line
    """The line with the largest change among the lines with a stack; if there is none, `largest`."""

    @property
    def change_bytes(self) -> int:
        """By how much the group grew."""
        return self.bytes - self.before_bytes


def by_kind(lines: Iterable[Line]) -> list[Group]:
    """Return the kinds of owners, the largest change first."""
    return _groups(lines, lambda line: line.owner.kind if line.owner else "unseen")


def by_owner(lines: Iterable[Line]) -> list[Group]:
    """Return the owners, the largest change first. The tensors of repeated modules are one owner: see `owner_name`.

    Blocks without an owner are grouped by line of code.
    """
    return _groups(
        lines, lambda line: (line.owner.kind, owner_name(line.owner)) if line.owner else user_frame(line.stack)
    )


def by_code(lines: Iterable[Line]) -> list[Group]:
    """Return the lines of code outside of torch that allocated the blocks, the largest change first."""
    return _groups((line for line in lines if line.stack), lambda line: user_frame(line.stack))


def _groups(lines: Iterable[Line], key: Callable[[Line], object]) -> list[Group]:
    found: dict[object, Group] = {}
    for line in lines:
        identity = key(line)
        group = found.get(identity)
        if group is None:
            found[identity] = Group(line.bytes, line.blocks, line.before_bytes, line, line)
            continue
        size, blocks, before, largest, code = group
        if _weight(line) > _weight(largest):
            largest = line
        if line.stack and (not code.stack or _weight(line) > _weight(code)):
            code = line
        code = code if code.stack else largest
        found[identity] = Group(size + line.bytes, blocks + line.blocks, before + line.before_bytes, largest, code)
    return sorted(found.values(), key=lambda group: -abs(group.change_bytes))


def _weight(line: Line) -> tuple[int, bool]:
    return abs(line.change_bytes), line.owner is not None and line.owner.kind != "unseen"
