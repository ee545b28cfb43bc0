"""`reset-peak`: have PyTorch processes begin their peaks anew."""

from __future__ import annotations

import typer

from gpumem_exporter.cli.action_requests import TimedOptions, ask
from gpumem_exporter.cli.options import with_options

__all__ = ["register"]

_EXAMPLES = """\b
Examples:
  gpumem-exporter reset-peak --all
  gpumem-exporter reset-peak --workload llm-pretrain --rank 0 --reason "after the warm-up"
"""


def register(application: typer.Typer) -> None:
    """Add the command."""
    application.command("reset-peak", epilog=_EXAMPLES)(with_options(TimedOptions)(reset_peak))


def reset_peak(options: TimedOptions) -> int:
    """Begin the peaks of processes anew.

    Every chosen process runs torch.cuda.reset_peak_memory_stats() for the chosen devices. The program sees it too: its
    own torch.cuda.max_memory_allocated() begins anew.
    """
    return ask("reset_peak", options)
