"""Converts the bytes of a terminal to keys: `up`, `page down`, `enter`, or the character itself. Pure."""

from __future__ import annotations

import codecs
import re
from collections.abc import Iterator

__all__ = ["KeyReader"]

_SEQUENCE = re.compile(r"\x1b(?:\[[0-?]*[ -/]*[@-~]|O[ -~])")
_INCOMPLETE = re.compile(r"\x1b(?:\[[0-?]*[ -/]*|O)?\Z")
"""An escape sequence without its end; a lone Escape is one too."""

_SEQUENCES = {
    "A": "up",
    "B": "down",
    "H": "home",
    "F": "end",
    "1~": "home",
    "7~": "home",
    "4~": "end",
    "8~": "end",
    "5~": "page up",
    "6~": "page down",
}
_CONTROLS = {
    "\r": "enter",
    "\n": "enter",
    "\x7f": "backspace",
    "\b": "backspace",
    "\x15": "erase line",
    "\x0c": "redraw",
}


class KeyReader:
    """Converts bytes to keys. A key may arrive in several parts."""

    def __init__(self) -> None:
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
        self._text = ""

    @property
    def incomplete(self) -> bool:
        """Whether the last key may be incomplete. If no more bytes arrive soon, call `flush`."""
        return bool(self._text)

    def feed(self, data: bytes) -> tuple[str, ...]:
        """Return the keys that these bytes complete, without unknown keys."""
        self._text += self._decoder.decode(data)
        return tuple(self._keys())

    def flush(self) -> tuple[str, ...]:
        """End the last key: a lone Escape is that key, an incomplete sequence is dropped."""
        escape = self._text == "\x1b"
        self._text = ""
        return ("escape",) if escape else ()

    def _keys(self) -> Iterator[str]:
        while self._text and not _INCOMPLETE.match(self._text):
            sequence = _SEQUENCE.match(self._text)
            length = len(sequence.group()) if sequence else 1
            typed, self._text = self._text[:length], self._text[length:]
            if sequence:
                if typed[2:] in _SEQUENCES:
                    yield _SEQUENCES[typed[2:]]
            elif typed in _CONTROLS:
                yield _CONTROLS[typed]
            elif typed == "\x1b":
                yield "escape"
            elif typed.isprintable():
                yield typed
