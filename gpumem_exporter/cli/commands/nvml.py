"""`release-nvml` and `attach-nvml`: close the exporter's NVML for maintenance of the driver, and open it again."""

from __future__ import annotations

from typing import Any

import click

from gpumem_exporter.cli.api_client import ExporterApi
from gpumem_exporter.cli.options import Seconds, api_options, option_group
from gpumem_exporter.cli.program import FAILED, one_line
from gpumem_exporter.cli.render.terminal import plain, print_result

_RELEASE_EXAMPLES = """\b
Examples:
  gpumem-exporter release-nvml --reason "driver upgrade"
  gpumem-exporter release-nvml && nvidia-smi -i 0 -mig 1 && gpumem-exporter attach-nvml
"""
_ATTACH_EXAMPLES = """\b
Examples:
  gpumem-exporter attach-nvml
  gpumem-exporter attach-nvml --url http://gpu-node-7:9844 --reason "upgrade done"
"""

_nvml_options = option_group(
    click.option(
        *("--wait", "wait_seconds"),
        type=Seconds(0, 60),
        metavar="SECONDS",
        default=10.0,
        show_default=True,
        help="How long to wait; 0 does not wait.",
    ),
    click.option("--reason", metavar="TEXT", default="", help="Recorded in the audit log."),
    api_options,
)


@click.command(epilog=_RELEASE_EXAMPLES)
@_nvml_options
def release_nvml(api: ExporterApi, as_json: bool, **body: Any) -> int:
    """Release NVML for maintenance of the driver.

    The exporter shuts NVML down and unloads its library, so that the driver can be unloaded or a GPU reset. The
    exporter keeps running, and processes keep reporting. Device metrics are absent until attach-nvml or a restart of
    the exporter. Jobs on the GPUs are not touched: they keep the driver in use.
    """
    answer = api.post("/api/v1/nvml/release", body, hold_seconds=body["wait_seconds"])
    open_files, released = answer.get("held") or (), answer.get("state") == "released"
    text = "NVML is released. Run attach-nvml to attach it again."
    if not released:
        text = "The driver has not answered yet. The exporter releases NVML as soon as it does."
    elif open_files:
        text = f"NVML is shut down, but the exporter still has {one_line(', '.join(map(str, open_files)))} open."
    print_result(answer, [plain(text)], as_json=as_json)
    return 0 if (released or body["wait_seconds"] == 0) and not open_files else FAILED


@click.command(epilog=_ATTACH_EXAMPLES)
@_nvml_options
def attach_nvml(api: ExporterApi, as_json: bool, **body: Any) -> int:
    """Attach NVML again after release-nvml.

    The exporter tries the driver at once. If the driver does not answer yet, the exporter attaches as soon as it does.
    """
    answer = api.post("/api/v1/nvml/attach", body, hold_seconds=body["wait_seconds"])
    state = answer.get("state")
    text = "NVML is attached. The exporter reads the driver again."
    if state != "attached":
        error = one_line(str(answer.get("error") or "no answer yet"))
        text = f"The driver does not answer ({error}). The exporter attaches as soon as it does."
    print_result(answer, [plain(text)], as_json=as_json)
    return 0 if state == "attached" or (state == "attaching" and body["wait_seconds"] == 0) else FAILED
