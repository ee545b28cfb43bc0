"""Programs in a `TorchProcess` that end by their own code."""

from __future__ import annotations

import textwrap

from tests.emulation.torch_process import TorchProcess


def end_with(process: TorchProcess, code: str) -> int:
    """Run code as the rest of the program of a process, and return the exit status.

    An exception of the code is not caught and ends the process.
    """
    process.exec(f"import __main__, os, sys, time\ndef program(*_):\n{textwrap.indent(code, '    ')}")
    process.exec("__main__.answer = program")
    process.send("hello")
    return process.finish()
