"""What `release-nvml` and `attach-nvml` share: the request, and the driver's state that it ended in."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any

import typer

from gpumem_exporter.cli.api_client import ExporterApi
from gpumem_exporter.cli.options import ConnectionOptions
from gpumem_exporter.cli.render.terminal import print_json
from gpumem_exporter.errors import ConfigurationError, ExporterAnswerError

__all__ = ["NvmlOptions", "ask_nvml"]

LONGEST_WAIT_SECONDS = 60.0


@dataclass(frozen=True, kw_only=True)
class NvmlOptions(ConnectionOptions):
    """How long it may take, and why it is done."""

    wait_seconds: Annotated[
        float, typer.Option("--wait", metavar="SECONDS", help="How long to wait for it, 60 at most; 0 only asks.")
    ] = 10.0
    reason: Annotated[str, typer.Option("--reason", metavar="TEXT", help="Kept in the audit log.")] = ""


def ask_nvml(what: str, options: NvmlOptions) -> Mapping[str, Any]:
    """Ask the exporter to `release` or `attach`; prints the answer where JSON is wanted, and returns it.

    Raises:
        ConfigurationError: a time that is none, or a value that the exporter finds wrong.
        ExporterError: it could not be asked, or refused.
    """
    if not 0 <= options.wait_seconds <= LONGEST_WAIT_SECONDS:
        raise ConfigurationError(f"--wait {options.wait_seconds:g}: must be 0 to {LONGEST_WAIT_SECONDS:g} seconds")
    body = {"reason": options.reason, "wait_seconds": options.wait_seconds}
    try:
        with ExporterApi(options.urls(), token=options.token()) as api:
            answer = api.post(f"/api/v1/nvml/{what}", body, hold_seconds=options.wait_seconds)
    except ExporterAnswerError as error:
        if error.status == 422:
            raise ConfigurationError(error.detail) from error
        raise
    if options.as_json:
        print_json(answer)
    return answer
