from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpumem_exporter.cli.top.keys import KeyReader

_TYPED = {
    b"\x1b[A": ("up",),
    b"\x1bOB": ("down",),
    b"\x1b[5~": ("page up",),
    b"\x1b[6~": ("page down",),
    b"\x1b[H\x1b[1~\x1bOH": ("home", "home", "home"),
    b"\x1b[F\x1b[4~": ("end", "end"),
    b"\r\n": ("enter", "enter"),
    b"\x7f\x08\x15": ("backspace", "backspace", "erase line"),
    b"sS/": ("s", "S", "/"),
    "ä漢".encode(): ("ä", "漢"),
    b"\x1b[15~\x1b[1;5C\x01j": ("j",),
    b"\x1bj": ("escape", "j"),
}


@pytest.mark.parametrize(("data", "keys"), _TYPED.items())
def test_bytes_of_a_terminal_are_keys(data: bytes, keys: tuple[str, ...]) -> None:
    assert KeyReader().feed(data) == keys


@given(st.sampled_from(sorted(_TYPED)), st.data())
def test_keys_do_not_depend_on_how_the_bytes_are_split(data: bytes, draw: st.DataObject) -> None:
    cut = draw.draw(st.integers(0, len(data)))
    reader = KeyReader()
    assert (*reader.feed(data[:cut]), *reader.feed(data[cut:])) == _TYPED[data]
    assert not reader.incomplete


def test_escape_is_a_key_only_if_nothing_follows() -> None:
    reader = KeyReader()
    assert reader.feed(b"\x1b") == ()
    assert reader.incomplete
    assert reader.flush() == ("escape",)
    assert not reader.incomplete
    assert reader.feed(b"\x1b[") == ()
    assert reader.flush() == ()


@given(st.lists(st.binary()))
def test_no_bytes_raise(pieces: list[bytes]) -> None:
    reader = KeyReader()
    for piece in pieces:
        assert all(key.isprintable() for key in reader.feed(piece))
    reader.flush()
    assert not reader.incomplete
