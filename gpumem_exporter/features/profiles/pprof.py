"""Profiles as pprof's `profile.proto`, which `go tool pprof`, Pyroscope, Parca and Grafana read.

The message is encoded here, because the package protobuf is no dependency of the exporter:
https://github.com/google/pprof/blob/main/proto/profile.proto
"""

from __future__ import annotations

import gzip
from collections.abc import Iterable

from gpumem_client.profile.profile_types import Frame, Owner
from gpumem_exporter.features.profiles.profile_diff import Difference
from gpumem_exporter.features.profiles.profile_lines import Line, Numbers, Stack, bounded, kind_text, owner_path
from gpumem_exporter.features.profiles.stored_profile import StoredProfile, device_names

# The length of all samples, each with the names that it is the first to have. A path of 4096 characters has up to 4 MiB
# of names: without the limit, a profile of 1 KiB became a page of 240 MB.
_MAX_LENGTH = 12 << 20
_VARINT, _LENGTH_DELIMITED = 0, 2


def encode(profile: StoredProfile | Difference, changed: Iterable[Line]) -> bytes:
    """Return rows as a compressed profile, the first ones in full. The values are the changes.

    A change is negative where memory was freed.
    """
    stored = profile.after if isinstance(profile, Difference) else profile
    devices = device_names(profile.uuids, profile.gpus)
    new = bytearray()  # the texts, functions and locations that nothing before has; a reader takes them in any order
    texts = Numbers[str](lambda text, _: new.extend(_field(6, text.encode("utf-8", "replace"))))
    functions = Numbers[tuple[str, str]](lambda each, number: new.extend(_function(number, *map(texts.of, each))), 1)
    locations = Numbers[Frame](
        lambda each, number: new.extend(_location(number, functions.of((each.function, each.file)), each.line)), 1
    )
    texts.of("")  # as the format requires
    stacks: dict[Stack, bytes] = {}

    def sample(line: Line) -> bytes:
        if line.stack is None:
            names = _with_modules(line.owner)
            at = _packed(1, [locations.of(Frame(name, "", 0)) for name in reversed(names)])
        elif line.stack in stacks:
            at = stacks[line.stack]
        else:
            at = stacks[line.stack] = _packed(1, [locations.of(each) for each in line.stack.frames])
        owner = line.owner and " ".join(filter(None, (kind_text(line.owner.kind), line.owner.name)))
        labels = (("device", devices[line.device]), ("pool", line.pool), ("owner", owner))
        encoded = _message(
            2,
            at,
            _packed(2, (line.change_blocks, line.change_bytes)),
            *(_message(3, _number(1, texts.of(name)), _number(2, texts.of(text))) for name, text in labels if text),
        )
        encoded = bytes(new) + encoded
        new.clear()
        return encoded

    body = bytearray()
    for name, unit in (("inuse_objects", "count"), ("inuse_space", "bytes")):
        body += _message(1, _number(1, texts.of(name)), _number(2, texts.of(unit)))
    for each in bounded(changed, sample, _MAX_LENGTH):
        body += each
    # Says that the names are complete: otherwise pprof looks for a program to read them from.
    body += _message(3, _number(1, 1), *(_number(flag, 1) for flag in (7, 8, 9)))
    body += _number(9, int(stored.time_unix_seconds * 1e9))
    body += _number(10, int(stored.recorded_seconds * 1e9))
    for comment in profile.notes:
        body += _number(13, texts.of(comment))
    body += _number(14, texts.of("inuse_space"))
    return gzip.compress(bytes(body + new), compresslevel=6, mtime=0)


def _with_modules(owner: Owner | None) -> list[str]:
    """Return the names of an owner as the frames of a stack, from the kind to the full name: see `owner_path`."""
    names, path = owner_path(owner)
    parts = path.split(".") if path else []
    return [*names, *(".".join(parts[: i + 1]) for i in range(len(parts)))]


def _function(number: int, name: int, file: int) -> bytes:
    return _message(5, _number(1, number), _number(2, name), _number(3, name), _number(4, file))


def _location(number: int, function: int, line: int) -> bytes:
    return _message(4, _number(1, number), _number(2, 1), _message(4, _number(1, function), _number(2, line)))


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


def _field(field: int, content: bytes) -> bytes:
    return _varint(field << 3 | _LENGTH_DELIMITED) + _varint(len(content)) + content


def _packed(field: int, values: Iterable[int]) -> bytes:
    return _field(field, b"".join(map(_varint, values)))


def _message(field: int, *parts: bytes) -> bytes:
    return _field(field, b"".join(parts))
