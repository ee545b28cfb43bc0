"""`release-nvml` and `attach-nvml`: close the exporter's NVML for maintenance of the driver, and open it again."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any

import typer

from gpumem_client.wire.errors import ConfigurationError
from gpumem_exporter.cli.api_client import ExporterApi
from gpumem_exporter.cli.options import ConnectionOptions, command_from_options
from gpumem_exporter.cli.program import FAILED, one_line
from gpumem_exporter.cli.render.terminal import print_json

__all__ = ["build"]

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
_LONGEST_WAIT_SECONDS = 60.0


@dataclass(frozen=True, kw_only=True)
class NvmlOptions(ConnectionOptions):
    """The options of both commands."""

    wait_seconds: Annotated[
        float, typer.Option("--wait", metavar="SECONDS", help="How long to wait, at most 60; 0 does not wait.")
    ] = 10.0
    reason: Annotated[str, typer.Option("--reason", metavar="TEXT", help="Recorded in the audit log.")] = ""


def build(name: str) -> typer.Typer:
    """Return the command."""
    run, epilog = (_release, _RELEASE_EXAMPLES) if name == "release-nvml" else (_attach, _ATTACH_EXAMPLES)
    return command_from_options(name, run, NvmlOptions, epilog=epilog)


def _release(options: NvmlOptions) -> int:
    """Release NVML for maintenance of the driver.

    The exporter shuts NVML down and unloads its library, so that the driver can be unloaded or a GPU reset. The
    exporter keeps running, and processes keep reporting. Device metrics are absent until attach-nvml or a restart of
    the exporter. Jobs on the GPUs are not touched: they keep the driver in use.
    """
    answer = _post("release", options)
    open_files = answer.get("held") or ()
    released = answer.get("state") == "released"
    if not options.as_json:
        if not released:
            print("The driver has not answered yet. The exporter releases NVML as soon as it does.")
        elif open_files:
            print(f"NVML is shut down, but the exporter still has {one_line(', '.join(map(str, open_files)))} open.")
        else:
            print("NVML is released. Run attach-nvml to attach it again.")
    done = released or options.wait_seconds == 0
    return 0 if done and not open_files else FAILED


def _attach(options: NvmlOptions) -> int:
    """Attach NVML again after release-nvml.

    The exporter tries the driver at once. If the driver does not answer yet, the exporter attaches as soon as it does.
    """
    answer = _post("attach", options)
    state = answer.get("state")
    if not options.as_json:
        if state == "attached":
            print("NVML is attached. The exporter reads the driver again.")
        else:
            error = one_line(str(answer.get("error") or "no answer yet"))
            print(f"The driver does not answer ({error}). The exporter attaches as soon as it does.")
    return 0 if state == "attached" or (state == "attaching" and options.wait_seconds == 0) else FAILED


def _post(operation: str, options: NvmlOptions) -> Mapping[str, Any]:
    """Request `release` or `attach`, print the answer with --json, and return it."""
    if not 0 <= options.wait_seconds <= _LONGEST_WAIT_SECONDS:
        raise ConfigurationError(f"--wait {options.wait_seconds:g}: must be 0 to {_LONGEST_WAIT_SECONDS:g} seconds")
    body = {"reason": options.reason, "wait_seconds": options.wait_seconds}
    with ExporterApi(options.urls(), token=options.token()) as api:
        answer = api.post(f"/api/v1/nvml/{operation}", body, hold_seconds=options.wait_seconds)
    if options.as_json:
        print_json(answer)
    return answer
