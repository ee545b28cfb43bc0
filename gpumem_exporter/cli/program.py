"""What all commands share: exit codes, characters of the output, and a thread. Standard library only."""

from __future__ import annotations

import codecs
import io
import threading
from collections.abc import Callable
from typing import IO, NamedTuple, TypeVar

T = TypeVar("T")

PROGRAM = "gpumem-exporter"

COMPLETION_VARIABLE = "_GPUMEM_EXPORTER_COMPLETE"
"""Set by the shell at a tab."""

FAILED = 1
"""The request failed."""
WRONG_USAGE = 2
"""Wrong usage or configuration."""
INTERRUPTED = 130
"""Ended by Ctrl-C: 128 plus the number of the signal, as in a shell."""

# The ASCII character for each character that bars, arrows and units use.
_SIMILAR = dict(zip("█▓▒░·▁▂▃▄▅▆▇▲▼▸▾…→µ≥", "#+%-.1234567^v>v~>u>", strict=True))


class Listed(NamedTuple):
    """A command in the help of the program, which therefore imports no command."""

    group: str
    """One of `GROUPS`."""
    summary: str
    """The first sentence of the command's own help."""
    module: str
    """The module of the command's function, for a feature relative to its folder. Empty if `main` takes the words."""


LOOK, RELEASE, EXPLAIN, OPERATE, NODES = GROUPS = ("Look", "Release", "Explain", "Operate", "Many nodes")
"""What a command is for, in the order of the help."""


def one_line(text: str) -> str:
    """Return a text from any source as one line without control characters."""
    return "".join(c if c.isprintable() else "?" for c in " ".join(text.split()))


def replace_missing_characters(file: IO[str]) -> None:
    """Let a file write a similar ASCII character for each character that its encoding lacks."""
    if isinstance(file, io.TextIOWrapper):
        file.reconfigure(errors="gpumem")


def _similar(error: UnicodeError) -> tuple[str, int]:
    assert isinstance(error, UnicodeEncodeError)  # noqa: S101 - only an output uses this handler
    return "".join(_SIMILAR.get(character, "?") for character in error.object[error.start : error.end]), error.end


codecs.register_error("gpumem", _similar)


async def in_daemon_thread(work: Callable[[], T]) -> T:
    """Return the result of `work`, which runs in a daemon thread."""
    import asyncio  # slow to import
    from concurrent.futures import Future

    # Not `asyncio.to_thread`, whose threads delay the exit while one of them hangs.
    done: Future[T] = Future()
    done.set_running_or_notify_cancel()  # a task that no longer waits leaves the future alone

    def run() -> None:
        try:
            done.set_result(work())
        except BaseException as error:  # noqa: BLE001 - the waiting task raises it
            done.set_exception(error)

    threading.Thread(target=run, name="gpumem-live", daemon=True).start()
    return await asyncio.wrap_future(done)
