"""`attach-nvml`: have the exporter take the driver up again."""

from __future__ import annotations

import typer

from gpumem_exporter.cli.main import FAILED, one_line
from gpumem_exporter.cli.nvml_requests import NvmlOptions, ask_nvml
from gpumem_exporter.cli.options import with_options

__all__ = ["register"]

_EXAMPLES = """\b
Examples:
  gpumem-exporter attach-nvml
  gpumem-exporter attach-nvml --url http://gpu-node-7:9844 --reason "upgrade done"
"""


def register(application: typer.Typer) -> None:
    """Add the command."""
    application.command("attach-nvml", epilog=_EXAMPLES)(with_options(NvmlOptions)(attach_nvml))


def attach_nvml(options: NvmlOptions) -> int:
    """Have the exporter take the driver up again.

    Ends what release-nvml began; where the driver is merely missing, it is tried at once. A driver that does not
    answer yet is taken up as soon as it does.
    """
    answer = ask_nvml("attach", options)
    state = answer.get("state")
    if not options.as_json:
        if state == "attached":
            print("The exporter reads the driver again.")
        else:
            why = one_line(str(answer.get("error") or "it has not answered yet"))
            print(f"The driver does not answer ({why}); the exporter attaches as soon as it does.")
    return 0 if state == "attached" or (state == "attaching" and options.wait_seconds == 0) else FAILED
