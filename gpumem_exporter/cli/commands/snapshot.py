"""`snapshot`: have PyTorch processes write what their allocators hold."""

from __future__ import annotations

import typer

from gpumem_exporter.cli.action_requests import TimedOptions, ask
from gpumem_exporter.cli.options import with_options

__all__ = ["register"]

_EXAMPLES = """\b
Examples:
  gpumem-exporter snapshot --pid 4711
  gpumem-exporter snapshot --workload llm-pretrain --rank 0 --mode step
"""


def register(application: typer.Typer) -> None:
    """Add the command."""
    application.command("snapshot", epilog=_EXAMPLES)(with_options(TimedOptions)(snapshot))


def snapshot(options: TimedOptions) -> int:
    """Have processes write a memory snapshot.

    Every chosen process writes PyTorch's own pickle, for https://pytorch.org/memory_viz, into its GPUMEM_SNAPSHOT_DIR
    or a folder of its user's among the temporary files, and says where. With torch.cuda.memory._record_memory_history()
    running in the program, it also says which code allocated what.
    """
    return ask("snapshot", options)
