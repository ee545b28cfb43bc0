"""The console script: runs one command and turns every expected error into one line and an exit code.

click parses every command except `run`, which is the client's: see `gpumem_exporter.application`.
"""

from __future__ import annotations

import errno
import gc
import http.client
import os
import sys
from collections.abc import Sequence

from gpumem_client.wire.errors import ConfigurationError, ExporterAnswerError, GpumemError
from gpumem_exporter.cli.program import (
    COMPLETION_VARIABLE,
    FAILED,
    INTERRUPTED,
    PROGRAM,
    WRONG_USAGE,
    one_line,
    replace_missing_characters,
)

_CREDENTIALS = "; give a token with --token-file, or a password with --url http://USER:PASSWORD@HOST:PORT"
_CANNOT_WRITE = (errno.EPIPE, errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command in the words after the program's name and return its exit code. Without words, print the help."""
    words = list(sys.argv[1:] if arguments is None else arguments)
    _open_closed_output()
    replace_missing_characters(sys.stdout)
    try:
        code = _dispatch(words)
        sys.stdout.flush()
    except ConfigurationError as error:
        return _fail(words, str(error), WRONG_USAGE)
    except ExporterAnswerError as error:
        # A value that only the exporter could check is invalid.
        wrong = error.status == http.client.UNPROCESSABLE_ENTITY
        hint = _CREDENTIALS if error.status == http.client.UNAUTHORIZED else ""
        return _fail(words, f"{error}{hint}", WRONG_USAGE if wrong else FAILED)
    except GpumemError as error:
        return _fail(words, str(error), FAILED)
    except KeyboardInterrupt:
        return INTERRUPTED
    except OSError as error:
        if error.errno not in _CANNOT_WRITE:
            raise
        # So that the interpreter does not fail on the buffered output at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        if error.errno == errno.EPIPE:  # the reader of the output exited, such as `head`
            return FAILED
        return _fail(words, f"cannot write: {error.strerror}", FAILED)
    return code


def _open_closed_output() -> None:
    """Open /dev/null for an output that the caller closed, so that no other file gets its number and the text."""
    for name in ("stdout", "stderr"):
        if getattr(sys, name) is None:
            setattr(sys, name, os.fdopen(os.open(os.devnull, os.O_WRONLY), "w"))


def _dispatch(words: list[str]) -> int:
    if words[:1] == ["help"]:
        words = [*words[1:], "--help"]
    # `run` does without click, which would double the time until the job starts.
    if words[:1] == ["run"] and COMPLETION_VARIABLE not in os.environ:
        from gpumem_client.run import run

        return run(words[1:])
    if words[:1] == ["serve"]:
        # Imports make almost no garbage, and the search for it takes a sixth of the CPU until the first poll. The
        # exporter enables the collector when it serves.
        gc.disable()
    from gpumem_exporter.application import invoke

    try:
        return invoke(words or ["--help"])
    finally:
        gc.enable()


def _fail(words: list[str], message: str, code: int) -> int:
    from gpumem_exporter.application import COMMANDS

    prefix = f"{PROGRAM} {words[0]}" if words[:1] and words[0] in COMMANDS else PROGRAM
    print(f"{prefix}: {one_line(message)}", file=sys.stderr)
    return code
