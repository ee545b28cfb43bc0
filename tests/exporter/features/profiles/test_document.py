"""What a reporter may send as a profile. The sender is any local user, so a hostile document costs little."""

from __future__ import annotations

import gzip
import json
import tracemalloc
import zlib
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gpumem_client.profile.aggregate import encode
from gpumem_client.profile.profile_types import (
    MAX_DOCUMENT_BYTES,
    MAX_LISTS,
    MAX_ROWS,
    MAX_VALUES,
    Frame,
    Owner,
    Profile,
    ProfiledDevice,
    Row,
)
from gpumem_client.wire.protocol import to_wire
from gpumem_exporter.errors import ProfileInvalidError
from gpumem_exporter.features.profiles.profile_document import read_profile
from tests.support.builders.builders import identity
from tests.support.builders.profile_documents import body, document, profile

SENT = identity(7, rank="3")


def read(changed: Any) -> Any:
    return read_profile(gzip.compress(json.dumps(changed).encode()))


def test_a_profile_is_read_as_it_was_sent() -> None:
    sent = profile(oom_number=3, age_seconds=1.5, step=7, notes=("2 objects are frozen",))
    assert read_profile(body(SENT, sent)) == (SENT, sent)


def test_a_later_version_may_add_fields_and_leave_out_defaults() -> None:
    sent = document(SENT, profile(notes=()))
    without = {name: value for name, value in sent.items() if name not in ("notes", "step", "oom_number")}
    later = {**without, "new": 1, "process": {**to_wire(SENT), "new": 2}}  # type: ignore[arg-type]
    later["rows"] = [[*row, "new"] for row in later["rows"]]
    later["owners"] = [["new_kind", *later["owners"][0][1:]], ["unseen"]]
    found_identity, found = read(later)
    assert found_identity == SENT
    assert (found.rows, found.owners[0].kind) == (profile().rows, "new_kind")


WRONG: dict[str, dict[str, Any]] = {
    "format": {"format": 2},
    "no process": {"process": None},
    "pid": {"process": {**to_wire(SENT), "pid": 0}},  # type: ignore[arg-type]
    "cause": {"cause": "other"},
    "an error without a number": {"cause": "out_of_memory"},
    "id": {"id": ""},
    "infinite age": {"age_seconds": 1e400},
    "step": {"step": True},
    "no devices": {"devices": [], "rows": []},
    "a device twice": {"devices": document(SENT, profile())["devices"] * 2},
    "a device without sums": {"devices": [{"uuid": "GPU-1"}]},
    "a long uuid": {"devices": [{**document(SENT, profile())["devices"][0], "uuid": "GPU-" + "1" * 125}]},
    "a short row": {"rows": [[0, "default", 0, None, 700, 1]]},
    "no device": {"rows": [[1, "default", None, None, 700, 1, 900, 1]]},
    "no stack": {"rows": [[0, "default", 2, None, 700, 1, 900, 1]]},
    "a negative row": {"rows": [[0, "default", None, None, 800, 1, 900, 1], [0, "default", None, None, -100, 1, 0, 0]]},
    "no owner": {"rows": [[0, "default", None, 2, 700, 1, 900, 1]]},
    "a large row": {"rows": [[0, "default", None, None, 2**63, 1, 900, 1]]},
    "a pool": {"rows": [[0, 1, None, None, 700, 1, 900, 1]]},
    "too little": {"rows": [[0, "default", None, None, 699, 1, 900, 1]]},
    "too little at the peak": {"rows": [[0, "default", None, None, 700, 1, 899, 1]]},
    "no frame": {"stacks": [[0], [2]]},
    "a frame": {"frames": [["f", "file"], ["g", "file", 1]]},
    "a long name": {"frames": [["f" * 5000, "file", 1], ["g", "file", 1]]},
    "an owner": {"owners": ["parameters", "unseen"]},
    "a long kind": {"owners": [["parameters"], ["unseen" * 20]]},
    "notes": {"notes": ["x"] * 65},
}


@pytest.mark.parametrize("changes", WRONG.values(), ids=WRONG.keys())
def test_what_is_wrong_or_does_not_add_up_is_refused(changes: dict[str, Any]) -> None:
    with pytest.raises(ProfileInvalidError):
        read({**document(SENT, profile()), **changes})


def deflated(text: bytes) -> bytes:
    writer = zlib.compressobj(9, zlib.DEFLATED, 31)
    return writer.compress(text) + writer.flush()


HOSTILE: dict[str, Callable[[], bytes]] = {
    "nothing": lambda: b"",
    "no gzip": lambda: json.dumps(document(SENT, profile())).encode(),
    "cut off": lambda: body(SENT, profile())[:-9],
    "two members": lambda: body(SENT, profile()) * 2,
    "a pickle": lambda: gzip.compress(b"\x80\x04cos\nsystem\n."),
    "no JSON": lambda: gzip.compress(b"{"),
    "no UTF-8": lambda: gzip.compress(b'{"id": "\xff"}'),
    "a surrogate": lambda: gzip.compress(b'{"id": "\\ud800"}'),
    "NaN": lambda: gzip.compress(b'{"age_seconds": NaN}'),
    "nested": lambda: gzip.compress(b'{"rows":' + b"[" * 100_000 + b"]" * 100_000 + b"}"),
    "a list": lambda: gzip.compress(b"[]"),
    "a bomb": lambda: deflated(b" " * (7 * MAX_DOCUMENT_BYTES)),
    "long": lambda: deflated(b" " * MAX_DOCUMENT_BYTES + b"{}"),
    "many values": lambda: gzip.compress(b'{"rows": [' + b"1," * (MAX_VALUES + 1) + b"1]}"),
    "many lists": lambda: gzip.compress(b'{"rows": [' + b"[]," * (MAX_LISTS + 1) + b"[]]}"),
    "one text": lambda: gzip.compress(b'{"id": "' + "😀".encode() * 4_000_000 + b'"}'),
    "long numbers": lambda: gzip.compress(b'{"rows": [' + b"9" * 4000 + b"]}"),
}
"""Built by their own tests: they are large."""


@pytest.mark.parametrize("name", HOSTILE)
def test_a_hostile_body_is_refused_within_bounded_memory(name: str) -> None:
    hostile = HOSTILE[name]()
    tracemalloc.start()
    try:
        with pytest.raises(ProfileInvalidError):
            read_profile(hostile)
        _, peak_bytes = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak_bytes < 6 * MAX_DOCUMENT_BYTES


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4),
    max_leaves=8,
)
KEYS = tuple(document(SENT, profile()))


@settings(max_examples=100)
@given(key=st.sampled_from(KEYS), value=JSON, deep=st.booleans())
def test_any_other_value_is_read_or_refused(key: str, value: Any, deep: bool) -> None:
    """No value raises another error, wherever it is."""
    changed = document(SENT, profile())
    if deep and isinstance(changed[key], (list, tuple)):
        changed[key] = [*changed[key], value]
    elif deep and isinstance(changed[key], dict):
        changed[key] = {**changed[key], "pid": value}
    else:
        changed[key] = value
    try:
        _, found = read(changed)
    except ProfileInvalidError:
        return
    assert sum(row.live_bytes for row in found.rows) == sum(device.allocated_bytes for device in found.devices)


def test_the_exporter_reads_the_largest_profile_that_a_client_sends() -> None:
    count = MAX_ROWS + 2_000
    rows = tuple(Row(0, "default", number % 7_000, number, 512 + number, 1, None, None) for number in range(count))
    sent = Profile(
        "id",
        "action",
        devices=(ProfiledDevice("GPU-1", sum(row.live_bytes for row in rows)),),
        rows=rows,
        stacks=tuple((number,) for number in range(7_000)),
        frames=tuple(Frame("f", "x.py", number) for number in range(7_000)),
        owners=tuple(Owner("tensors", f"x{number}") for number in range(count)),
    )
    _, received = read_profile(encode(sent, SENT))
    assert MAX_ROWS // 2 < len(received.rows) <= MAX_ROWS + 1
    assert sum(row.live_bytes for row in received.rows) == sent.devices[0].allocated_bytes
