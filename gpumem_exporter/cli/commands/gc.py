"""`gc`: have PyTorch processes run Python's garbage collector."""

from __future__ import annotations

import typer

from gpumem_exporter.cli.action_requests import TimedOptions, ask
from gpumem_exporter.cli.options import with_options

__all__ = ["register"]

_EXAMPLES = """\b
Examples:
  gpumem-exporter gc --pid 4711
  gpumem-exporter gc --workload notebook --reason "tensors in reference cycles"
  gpumem-exporter clear --workload notebook --gc      # collect, then give the cache back
"""


def register(application: typer.Typer) -> None:
    """Add the command."""
    application.command("gc", epilog=_EXAMPLES)(with_options(TimedOptions)(collect))


def collect(options: TimedOptions) -> int:
    """Run Python's garbage collector in processes.

    It lets go of tensors in reference cycles, and runs the program's own finalizers. The memory stays in the
    allocator's cache; `clear --gc` also gives it back to the driver.
    """
    return ask("collect_garbage", options)
