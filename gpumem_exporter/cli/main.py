"""The console script: runs one command and turns every expected error into one line and an exit code.

`run` and `--version` use the standard library alone, because a training image has this package without its
dependencies. Typer parses every other command, except plain options of `serve`: see `gpumem_exporter.cli.application`.
"""

from __future__ import annotations

import errno
import importlib
import io
import os
import sys
from collections.abc import Sequence

from gpumem_client.wire.errors import ConfigurationError, GpumemError
from gpumem_exporter import __version__
from gpumem_exporter.cli.program import COMMANDS, FAILED, INTERRUPTED, PROGRAM, WRONG_USAGE, one_line

__all__ = ["main"]

_DISK_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code. Without arguments, print the help.

    Args:
        arguments: the words after the program's name; those of this process by default.
    """
    words = list(sys.argv[1:] if arguments is None else arguments)
    name = words[0] if words and words[0] in COMMANDS else ""
    prefix = f"{PROGRAM} {name}".rstrip()
    _open_closed_output()
    if isinstance(sys.stdout, io.TextIOWrapper):
        # A character that the terminal lacks is replaced. It does not end the command.
        sys.stdout.reconfigure(errors="replace")
    try:
        code = _dispatch(words)
        sys.stdout.flush()
    except ConfigurationError as error:
        return _fail(prefix, str(error), WRONG_USAGE)
    except GpumemError as error:
        return _fail(prefix, str(error), FAILED)
    except KeyboardInterrupt:
        return INTERRUPTED
    except BrokenPipeError:
        # The reader of the output exited, such as `head`.
        _discard_output()
        return FAILED
    except OSError as error:
        if error.errno not in _DISK_FULL:
            raise
        _discard_output()
        return _fail(prefix, f"cannot write: {error.strerror}", FAILED)
    return code


def _open_closed_output() -> None:
    """Open /dev/null for an output that the caller closed, so that no other file gets its number and the text."""
    for name in ("stdout", "stderr"):
        if getattr(sys, name) is None:
            setattr(sys, name, os.fdopen(os.open(os.devnull, os.O_WRONLY), "w"))


def _discard_output() -> None:
    """Send the buffered output to /dev/null, so that the interpreter does not fail on it at exit."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)


def _dispatch(words: list[str]) -> int:
    first = words[0] if words else ""
    if first == "--version":
        print(f"{PROGRAM} {__version__}")
        return 0
    if first == "run":
        from gpumem_client.run import run

        return run(words[1:])
    try:
        if first == "serve":
            serve = importlib.import_module(COMMANDS[first])
            values = serve.read_plain_words(words[1:])
            if values is not None:
                return int(serve.serve(values))
        return int(importlib.import_module("gpumem_exporter.cli.application").invoke(words or ["--help"]))
    except ModuleNotFoundError as error:
        raise _missing_dependency(first or "the help", error) from error


def _missing_dependency(command: str, error: ModuleNotFoundError) -> Exception:
    """The error for a missing dependency. A missing module of this package is a defect and is returned as it is."""
    module = (error.name or "").partition(".")[0]
    if module in ("", "gpumem_exporter"):
        return error
    return ConfigurationError(
        f"{command} needs the Python package {module!r}: install {PROGRAM} without --no-deps "
        f"(an installation with --no-deps has `{PROGRAM} run` and the client)"
    )


def _fail(prefix: str, message: str, code: int) -> int:
    print(f"{prefix}: {one_line(message)}", file=sys.stderr)
    return code
