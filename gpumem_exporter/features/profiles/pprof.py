"""Profiles as pprof's `profile.proto`, which `go tool pprof`, Pyroscope, Parca and Grafana read.

The message is encoded here, because the package protobuf is no dependency of the exporter:
https://github.com/google/pprof/blob/main/proto/profile.proto
"""

from __future__ import annotations

import gzip
from collections.abc import Callable, Hashable, Iterable
from itertools import accumulate
from typing import TypeVar

from gpumem_client.profile.profile_types import Frame, Owner
from gpumem_exporter.features.profiles.profile_lines import PATH_KINDS, Line, ShownProfile, Stack, bounded, kind_text

T = TypeVar("T", bound=Hashable)

# The length of all samples, each with the names that it is the first to have. A path of 4096 characters has up to 4 MiB
# of names: without the limit, a profile of 1 KiB became a page of 240 MB.
_MAX_LENGTH = 12 << 20
_VARINT, _LENGTH_DELIMITED = 0, 2


class _Numbers(dict[T, int]):
    """The numbers of the names that samples share, such as their frames.

    `add` is called with each new name and its number, after the names that it needs itself.
    """

    def __init__(self, add: Callable[[T, int], None], first: int = 0) -> None:
        super().__init__()
        self._add, self._first = add, first

    def __missing__(self, name: T) -> int:
        number = self[name] = self._first + len(self)
        self._add(name, number)
        return number


def encode(shown: ShownProfile) -> bytes:
    """Return the rows that changed as a compressed profile, the largest ones in full. The values are the changes.

    A change is negative where memory was freed.
    """
    devices = [f"GPU {each['gpu']}" if each["gpu"] else each["uuid"] for each in shown.devices]
    new = bytearray()  # the texts, functions and locations that nothing before has; a reader takes them in any order
    texts = _Numbers[str](lambda text, _: new.extend(_message(6, text.encode("utf-8", "replace"))))

    def add_function(name: tuple[str, str], number: int) -> None:
        function, file = map(texts.__getitem__, name)
        new.extend(_message(5, _number(1, number), _number(2, function), _number(3, function), _number(4, file)))

    def add_location(frame: Frame, number: int) -> None:
        line = _message(4, _number(1, functions[frame.function, frame.file]), _number(2, frame.line))
        new.extend(_message(4, _number(1, number), _number(2, 1), line))

    functions, locations = _Numbers[tuple[str, str]](add_function, 1), _Numbers[Frame](add_location, 1)
    texts[""]  # as the format requires
    stacks: dict[Stack, bytes] = {}

    def sample(line: Line) -> bytes:
        if line.stack is None:
            names = _owner_frames(line.owner)
            at = _packed(1, [locations[Frame(name, "", 0)] for name in reversed(names)])
        elif line.stack in stacks:
            at = stacks[line.stack]
        else:
            at = stacks[line.stack] = _packed(1, [locations[each] for each in line.stack.frames])
        owner = line.owner and " ".join(filter(None, (kind_text(line.owner.kind), line.owner.name)))
        labels = (("device", devices[line.device]), ("pool", line.pool), ("owner", owner))
        encoded = _message(
            2,
            at,
            _packed(2, (line.blocks - line.before_blocks, line.change_bytes)),
            *(_message(3, _number(1, texts[name]), _number(2, texts[text])) for name, text in labels if text),
        )
        encoded = bytes(new) + encoded
        new.clear()
        return encoded

    body = bytearray()
    for name, unit in (("inuse_objects", "count"), ("inuse_space", "bytes")):
        body += _message(1, _number(1, texts[name]), _number(2, texts[unit]))
    for each in bounded((line for line in shown.ranked() if line.change_bytes), sample, _MAX_LENGTH):
        body += each
    # Says that the names are complete: otherwise pprof looks for a program to read them from.
    body += _message(3, _number(1, 1), *(_number(flag, 1) for flag in (7, 8, 9)))
    body += _number(9, int(shown.about["unix_seconds"] * 1e9))
    body += _number(10, int(shown.about["recorded_seconds"] * 1e9))
    for comment in shown.notes:
        body += _number(13, texts[comment])
    body += _number(14, texts["inuse_space"])
    return gzip.compress(bytes(body + new), compresslevel=6, mtime=0)


def _owner_frames(owner: Owner | None) -> list[str]:
    """Return the names of an owner as the frames of a stack, from its kind to its full name.

    The path of a module has a frame for each part, so that a reader adds up each module: `model`, `model.layers`.
    """
    kind = kind_text(owner and owner.kind)
    if owner is None or not owner.name:
        return [kind]
    if owner.kind not in PATH_KINDS:
        return [kind, owner.name]
    state, _, path = owner.name.rpartition(" ")  # `Adam.exp_avg model.layers.0.weight`
    modules = accumulate(path.split("."), "{}.{}".format) if path else ()
    return [kind, *([state] if state else []), *modules]


def _varint(value: int) -> bytes:
    value &= (1 << 64) - 1  # a negative int64 is ten bytes
    encoded = bytearray()
    while value > 0x7F:
        encoded.append(value & 0x7F | 0x80)
        value >>= 7
    encoded.append(value)
    return bytes(encoded)


def _number(field: int, value: int) -> bytes:
    return _varint(field << 3 | _VARINT) + _varint(value) if value else b""


def _packed(field: int, values: Iterable[int]) -> bytes:
    return _message(field, *map(_varint, values))


def _message(field: int, *parts: bytes) -> bytes:
    content = b"".join(parts)
    return _varint(field << 3 | _LENGTH_DELIMITED) + _varint(len(content)) + content
