"""`release-nvml`: have the exporter let the driver go, for its maintenance."""

from __future__ import annotations

import typer

from gpumem_exporter.cli.main import FAILED, one_line
from gpumem_exporter.cli.nvml_requests import NvmlOptions, ask_nvml
from gpumem_exporter.cli.options import with_options

__all__ = ["register"]

_EXAMPLES = """\b
Examples:
  gpumem-exporter release-nvml --reason "driver upgrade"
  gpumem-exporter release-nvml && nvidia-smi -i 0 -mig 1 && gpumem-exporter attach-nvml
"""


def register(application: typer.Typer) -> None:
    """Add the command."""
    application.command("release-nvml", epilog=_EXAMPLES)(with_options(NvmlOptions)(release_nvml))


def release_nvml(options: NvmlOptions) -> int:
    """Have the exporter let the driver go.

    It shuts NVML down and unloads its library, so that the driver can be unloaded, upgraded or a GPU reset while the
    exporter goes on and processes go on reporting. Device figures are absent until attach-nvml, or a restart of the
    exporter. Jobs that hold the GPUs are not touched: they keep the driver busy all the same.
    """
    answer = ask_nvml("release", options)
    held = answer.get("held") or ()
    done = answer.get("state") == "released" and not held
    if not options.as_json:
        if answer.get("state") != "released":
            print("The driver has not answered yet; the exporter lets it go as soon as it does.")
        elif held:
            print(f"NVML is shut down, but the exporter still holds {one_line(', '.join(map(str, held)))}.")
        else:
            print("The exporter holds nothing of the driver now; attach-nvml takes it up again.")
    return 0 if done or (options.wait_seconds == 0 and not held) else FAILED
