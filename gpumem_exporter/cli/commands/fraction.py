"""`fraction`: cap what PyTorch processes may reserve."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any

import typer

from gpumem_exporter.cli.action_requests import TimedOptions, TimedRequest, ask
from gpumem_exporter.cli.options import with_options
from gpumem_exporter.errors import ConfigurationError

__all__ = ["FractionRequest", "register"]

_EXAMPLES = """\b
Examples:
  gpumem-exporter fraction 0.5 --workload notebook
  gpumem-exporter fraction 1 --pid 4711               # no cap any more
"""


@dataclass(frozen=True, kw_only=True)
class FractionRequest(TimedRequest):
    """What a cap is asked with."""

    fraction: Annotated[float, typer.Argument(metavar="F", help="Share of each device's memory: over 0, at most 1.")]
    force: Annotated[
        bool, typer.Option("--force", help="Even if more is reserved already: the next new segment fails then.")
    ] = False

    def details(self) -> dict[str, Any]:
        """Mode, group, and the cap."""
        if not 0 < self.fraction <= 1:
            raise ConfigurationError(f"F {self.fraction:g}: must be over 0 and at most 1")
        return {**super().details(), "fraction": self.fraction, "force": self.force}


@dataclass(frozen=True, kw_only=True)
class FractionOptions(FractionRequest, TimedOptions):
    """What `fraction` takes."""


def register(application: typer.Typer) -> None:
    """Add the command."""
    application.command("fraction", epilog=_EXAMPLES)(with_options(FractionOptions)(fraction))


def fraction(options: FractionOptions) -> int:
    """Cap what processes may reserve.

    Every chosen process runs torch.cuda.set_per_process_memory_fraction(F) for the chosen devices. It gives nothing
    back; what the allocator would take from the driver beyond it is an out-of-memory error. CUDA contexts, NCCL and
    other libraries are not in it.
    """
    return ask("set_memory_fraction", options)
