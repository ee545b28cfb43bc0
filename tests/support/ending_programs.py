"""Programs that end by their own code, in processes that `TorchProcess` starts."""

from __future__ import annotations

import textwrap

from tests.emulation.torch_process import TorchProcess

__all__ = ["end_with"]


def end_with(process: TorchProcess, code: str) -> int:
    """Run code in a process as the rest of its program, and return the process' exit status.

    What the code raises is caught by nothing: it ends the process as an uncaught error ends any program.
    """
    process.exec(f"import __main__, os, sys, time\ndef program(*_):\n{textwrap.indent(code, '    ')}")
    process.exec("__main__.answer = program")
    process.send("hello")
    return process.finish()
