"""The console script: finds the command that is meant and turns every expected error into one line and an exit code.

`run` and `--version` use the standard library alone, because a training image has this package without its
dependencies. `serve` reads flags that are plainly right by itself, because importing Typer takes a tenth of its start.
Everything else is handed to `gpumem_exporter.cli.application`, which brings Typer.
"""

from __future__ import annotations

import errno
import importlib
import os
import sys
from collections.abc import Sequence
from difflib import get_close_matches

from gpumem_exporter import __version__
from gpumem_exporter.errors import ConfigurationError, GpumemError

__all__ = ["COMMANDS", "FAILED", "INTERRUPTED", "PROGRAM", "WRONG_USAGE", "main", "one_line"]

PROGRAM = "gpumem-exporter"

COMMANDS = (
    *("serve", "run", "info", "top"),
    *("clear", "gc", "reset-peak", "snapshot", "fraction", "terminate"),
    *("plan", "release-nvml", "attach-nvml", "doctor"),
    "fleet",
)
"""In the order in which the help lists them."""

FAILED = 1
"""The thing asked for failed."""
WRONG_USAGE = 2
"""Wrong usage or configuration."""
INTERRUPTED = 130
"""Ended by Ctrl-C, as a shell counts it."""

_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code.

    Args:
        arguments: what follows the program's name; the process' own by default.
    """
    words = list(sys.argv[1:] if arguments is None else arguments)
    name = words[0] if words and words[0] in COMMANDS else ""
    speaker = f"{PROGRAM} {name}".rstrip()
    _open_what_is_closed()
    try:
        code = _dispatch(words)
        sys.stdout.flush()
    except ConfigurationError as error:
        return _fail(speaker, str(error), WRONG_USAGE)
    except GpumemError as error:
        return _fail(speaker, str(error), FAILED)
    except KeyboardInterrupt:
        return INTERRUPTED
    except BrokenPipeError:
        # Whoever read the output has gone.
        _drop_output()
        return FAILED
    except OSError as error:
        if error.errno not in _FULL:
            raise
        _drop_output()
        return _fail(speaker, f"cannot write: {error.strerror}", FAILED)
    return code


def one_line(text: str) -> str:
    """Text as one line without control characters, whatever it came from."""
    return "".join(c if c.isprintable() else "?" for c in " ".join(text.split()))


def _open_what_is_closed() -> None:
    """Output that the caller has closed goes nowhere; the next file opened must not get its number, and the text."""
    for name in ("stdout", "stderr"):
        if getattr(sys, name) is None:
            setattr(sys, name, os.fdopen(os.open(os.devnull, os.O_WRONLY), "w"))


def _drop_output() -> None:
    """The interpreter must not trip over the rest of the output when it ends."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)


def _dispatch(words: list[str]) -> int:
    first = words[0] if words else ""
    if first == "--version":
        print(f"{PROGRAM} {__version__}")
        return 0
    if first == "run":
        from gpumem_exporter.cli.commands.run import run

        return run(words[1:])
    if first in COMMANDS or first in ("--help", "-h"):
        return _with_dependencies(words)
    raise ConfigurationError(_unknown(first))


def _with_dependencies(words: list[str]) -> int:
    try:
        if words[0] == "serve":
            serve = importlib.import_module("gpumem_exporter.cli.commands.serve")
            flags = serve.read_flags(words[1:])
            if flags is not None:
                return int(serve.start(flags))
        return int(importlib.import_module("gpumem_exporter.cli.application").invoke(words))
    except ModuleNotFoundError as error:
        raise _incomplete(words[0], error) from error


def _incomplete(command: str, error: ModuleNotFoundError) -> Exception:
    """Say what to install when a dependency is missing; a missing module of this package is a defect, passed on."""
    module = (error.name or "").partition(".")[0]
    if module in ("", "gpumem_exporter"):
        return error
    return ConfigurationError(
        f"{command} needs the Python package {module!r}: install {PROGRAM} without --no-deps "
        f"(what is here suffices for `{PROGRAM} run` and the client)"
    )


def _unknown(word: str) -> str:
    known = f"the commands are {', '.join(COMMANDS)}"
    if not word:
        return f"no command is given; {known}; see {PROGRAM} --help"
    if word.startswith("-"):
        return f"no option {word!r} before a command; {known}; see {PROGRAM} --help"
    close = get_close_matches(word, COMMANDS, n=1)
    meant = f"did you mean {close[0]!r}?" if close else known
    return f"no command {word!r}; {meant}"


def _fail(speaker: str, message: str, code: int) -> int:
    print(f"{speaker}: {one_line(message)}", file=sys.stderr)
    return code
