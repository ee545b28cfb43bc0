"""`clear`: have PyTorch processes give their cached memory back to the driver."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any

import typer

from gpumem_exporter.cli.action_requests import TimedOptions, TimedRequest, ask
from gpumem_exporter.cli.options import with_options

__all__ = ["ClearRequest", "register"]

_EXAMPLES = """\b
Examples:
  gpumem-exporter clear --all --dry-run               # what would come back
  gpumem-exporter clear --gpu 0
  gpumem-exporter clear --workload notebook --gc --reason "make room for the release run"
  gpumem-exporter clear --workload llm-pretrain --group    # every rank, after the same step
  gpumem-exporter clear --workload notebook --mode idle --deadline 600
  gpumem-exporter clear --pid 4711 --json | jq .freed_bytes
"""


@dataclass(frozen=True, kw_only=True)
class ClearRequest(TimedRequest):
    """What a clear is asked with."""

    collect_garbage: Annotated[
        bool,
        typer.Option("--gc", help="Run Python's garbage collector first, which runs the program's finalizers."),
    ] = False

    def details(self) -> dict[str, Any]:
        """Mode, group, and whether garbage is collected first."""
        return {**super().details(), "collect_garbage": self.collect_garbage}


@dataclass(frozen=True, kw_only=True)
class ClearOptions(ClearRequest, TimedOptions):
    """What `clear` takes."""


def register(application: typer.Typer) -> None:
    """Add the command."""
    application.command("clear", epilog=_EXAMPLES)(with_options(ClearOptions)(clear))


def clear(options: ClearOptions) -> int:
    """Give cached memory back to the driver.

    Every chosen process runs torch.cuda.empty_cache(). No tensor is touched. A process clears all of its devices:
    PyTorch has no other way. The next allocations ask the driver again, which costs some milliseconds once.
    """
    return ask("empty_cache", options)
